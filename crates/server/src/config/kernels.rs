//! How CUDA kernels are compiled: flags, and the places that other programs' variables name.

#![allow(
    clippy::disallowed_methods,
    reason = "this is where the environment is read"
)]

use std::env;
use std::path::PathBuf;

use cuda::compile::{NvrtcSearch, Options};

use crate::cli::CompilerArgs;

/// What the compiler flags mean on this machine.
pub fn options(args: &CompilerArgs) -> Options {
    Options {
        nvrtc: NvrtcSearch {
            file: args.nvrtc.clone(),
            toolkits: folders(&["CUDA_HOME", "CUDA_PATH"]),
            python: python(),
        },
        cache: args.kernel_cache.clone().or_else(cache),
        ..Options::default()
    }
}

/// The folders that are named by any of `variables`.
fn folders(variables: &[&str]) -> Vec<PathBuf> {
    variables
        .iter()
        .filter_map(env::var_os)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
        .collect()
}

/// Prefixes of the Python environments in use.
fn python() -> Vec<PathBuf> {
    let mut prefixes = folders(&["VIRTUAL_ENV", "CONDA_PREFIX"]);
    prefixes.extend(
        folders(&["HOME"])
            .into_iter()
            .map(|home| home.join(".local")),
    );
    prefixes
}

/// Where compiled kernels are kept when nobody says: the user's cache folder, if there is one.
fn cache() -> Option<PathBuf> {
    let by_name = folders(&["XDG_CACHE_HOME"]).into_iter().next();
    let by_home = || {
        folders(&["HOME"])
            .into_iter()
            .map(|home| home.join(".cache"))
            .next()
    };
    let folder = by_name.or_else(by_home)?;
    // A relative path there is to be ignored, says the specification of these variables.
    folder.is_absolute().then(|| folder.join("hearth/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_decides_where_kernels_are_kept() {
        let args = CompilerArgs {
            nvrtc: Some("lib.so".into()),
            kernel_cache: Some("here".into()),
        };
        let options = options(&args);
        assert_eq!(options.cache, Some("here".into()));
        assert_eq!(options.nvrtc.file, Some("lib.so".into()));
    }
}
