//! Compiler options of CUDA kernels, from flags and from other programs' variables.

#![allow(clippy::disallowed_methods, reason = "this file reads the environment")]

use std::env;
use std::path::{Path, PathBuf};

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

/// Prefixes of Python environments: those in use, then those that are not active. No folder of the
/// working directory is among them, because a library of a stranger could lie there.
fn python() -> Vec<PathBuf> {
    let mut prefixes = directories(&["VIRTUAL_ENV", "CONDA_PREFIX"]);
    for home in directories(&["HOME"]) {
        prefixes.push(home.join(".local"));
        prefixes.extend(inactive(&home));
    }
    prefixes.push(PathBuf::from(SERVICE_ENVIRONMENT));
    prefixes
}

/// The environment of a system service, as `service/hearth.service` describes it.
const SERVICE_ENVIRONMENT: &str = "/opt/hearth/venv";

/// Environments in the usual places of a home folder, in a fixed order.
fn inactive(home: &Path) -> Vec<PathBuf> {
    let mut found = [".venv", "venv"].map(|name| home.join(name)).to_vec();
    for parent in [
        ".venvs",
        ".virtualenvs",
        ".local/share/pipx/venvs",
        ".conda/envs",
    ] {
        let entries = home.join(parent).read_dir().into_iter().flatten();
        let mut inside: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        inside.sort();
        found.extend(inside);
    }
    found.extend(["miniconda3", "anaconda3", "miniforge3"].map(|name| home.join(name)));
    found
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

    #[test]
    fn inactive_environments_of_the_home_folder_are_searched() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        std::fs::create_dir_all(at(".venvs/b")).unwrap();
        std::fs::create_dir_all(at(".venvs/a")).unwrap();
        let found = inactive(home.path());
        assert_eq!(
            found[..4],
            [at(".venv"), at("venv"), at(".venvs/a"), at(".venvs/b")]
        );
        assert!(python().contains(&PathBuf::from(SERVICE_ENVIRONMENT)));
    }
}
