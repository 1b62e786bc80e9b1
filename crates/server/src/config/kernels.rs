//! Compiler options of CUDA kernels, from flags and from other programs' variables.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use std::env;
use std::path::PathBuf;

use cuda::compile::{NvrtcSearch, Options};

use crate::cli::CompilerArgs;

/// The compiler options of the flags on this machine.
pub fn options(args: &CompilerArgs) -> Options {
    Options {
        nvrtc: NvrtcSearch {
            file: args.nvrtc.clone(),
            toolkits: directories(&["CUDA_HOME", "CUDA_PATH"]),
            python: python(),
        },
        cache: args.kernel_cache.clone().or_else(cache),
        ..Options::default()
    }
}

/// The directories that `variables` name.
fn directories(variables: &[&str]) -> Vec<PathBuf> {
    variables
        .iter()
        .filter_map(env::var_os)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
        .collect()
}

/// Prefixes of the Python environments in use.
fn python() -> Vec<PathBuf> {
    let mut prefixes = directories(&["VIRTUAL_ENV", "CONDA_PREFIX"]);
    prefixes.extend(
        directories(&["HOME"])
            .into_iter()
            .map(|home| home.join(".local")),
    );
    prefixes
}

/// The default cache of compiled kernels, in the user's cache directory if there is one.
fn cache() -> Option<PathBuf> {
    let by_name = directories(&["XDG_CACHE_HOME"]).into_iter().next();
    let by_home = || {
        directories(&["HOME"])
            .into_iter()
            .map(|home| home.join(".cache"))
            .next()
    };
    let dir = by_name.or_else(by_home)?;
    // The XDG specification requires that a relative path is ignored.
    dir.is_absolute().then(|| dir.join("hearth/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_set_the_library_and_the_cache() {
        let args = CompilerArgs {
            nvrtc: Some("lib.so".into()),
            kernel_cache: Some("here".into()),
        };
        let options = options(&args);
        assert_eq!(options.cache, Some("here".into()));
        assert_eq!(options.nvrtc.file, Some("lib.so".into()));
    }
}
