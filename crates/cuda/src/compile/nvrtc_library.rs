//! Locating libnvrtc. It belongs to the CUDA toolkit, not to the driver, so its path varies.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use super::error::CompileError;

/// Search paths for libnvrtc, besides the executable's folder and the system path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvrtcSearch {
    /// The library file itself, tried first.
    pub file: Option<PathBuf>,
    /// CUDA toolkit folders, such as `/usr/local/cuda`, tried before the defaults.
    pub toolkits: Vec<PathBuf>,
    /// Python environments (prefixes) or package folders.
    pub python: Vec<PathBuf>,
}

/// An opened libnvrtc. It stays open until the process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvrtc {
    /// The file, or `None` if the system found it by name.
    pub path: Option<PathBuf>,
    /// Major and minor version.
    pub version: (i32, i32),
}

/// The first library that was opened. A process has one.
static OPENED: OnceLock<Nvrtc> = OnceLock::new();

impl Nvrtc {
    /// Opens libnvrtc from, in order: the named file, the executable's folder, the system path, a
    /// toolkit, a Python environment.
    ///
    /// # Errors
    /// [`CompileError::NvrtcNotFound`] with all searched paths.
    pub fn open(search: &NvrtcSearch) -> Result<&'static Nvrtc, CompileError> {
        if let Some(library) = OPENED.get() {
            return Ok(library);
        }
        let mut searched = Vec::new();
        let named: Vec<PathBuf> = search.file.iter().cloned().collect();
        let mut first = |files: Vec<PathBuf>| {
            files.into_iter().find(|file| {
                searched.push(file.display().to_string());
                file.is_file() && preload(file) && is_loadable()
            })
        };
        let mut found = first(named).or_else(|| first(in_folders(&beside_executable())));
        if found.is_none() && !is_loadable() {
            found =
                first(in_folders(&toolkits(search))).or_else(|| first(in_folders(&wheels(search))));
            if found.is_none() {
                // The error lists one line per folder.
                searched.retain(|file| !file.ends_with(".so.12") && !file.ends_with(".so"));
                searched.extend(wheel_patterns(search));
                searched.push("the system's library path".to_owned());
                return Err(CompileError::NvrtcNotFound { searched });
            }
        }
        Ok(OPENED.get_or_init(|| Nvrtc {
            path: found,
            version: version(),
        }))
    }
}

/// Library names in each folder, newest first.
fn in_folders(folders: &[PathBuf]) -> Vec<PathBuf> {
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    folders
        .iter()
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .collect()
}

fn beside_executable() -> Vec<PathBuf> {
    let executable = std::env::current_exe().ok();
    let folder = executable.as_deref().and_then(Path::parent);
    folder.map_or(Vec::new(), |folder| {
        vec![folder.to_path_buf(), folder.join("../lib")]
    })
}

/// Library folders of CUDA toolkits, newest version first.
fn toolkits(search: &NvrtcSearch) -> Vec<PathBuf> {
    let mut homes = search.toolkits.clone();
    homes.push(PathBuf::from("/usr/local/cuda"));
    let mut others = entries(Path::new("/usr/local"), |name| name.starts_with("cuda-"));
    others.reverse();
    homes.append(&mut others);
    homes.push(PathBuf::from("/opt/cuda"));
    homes
        .iter()
        .flat_map(|home| [home.join("lib64"), home.join("lib")])
        .collect()
}

/// Library folders of NVIDIA's Python packages.
fn wheels(search: &NvrtcSearch) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for prefix in prefixes(search) {
        let mut sites = vec![prefix.clone()];
        for python in entries(&prefix.join("lib"), |name| name.starts_with("python3")) {
            sites.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
        }
        for site in sites {
            // `nvidia/cu13/lib` since version 13, `nvidia/cuda_nvrtc/lib` before.
            for package in entries(&site.join("nvidia"), |_| true).into_iter().rev() {
                folders.push(package.join("lib"));
            }
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Where Python packages are looked for.
fn prefixes(search: &NvrtcSearch) -> Vec<PathBuf> {
    let system = ["/usr", "/usr/local"].map(PathBuf::from);
    search.python.iter().cloned().chain(system).collect()
}

/// The searched folders of Python packages as patterns, for a message.
fn wheel_patterns(search: &NvrtcSearch) -> Vec<String> {
    let pattern =
        |prefix: PathBuf| format!("{}/lib/python3*/*-packages/nvidia/*/lib", prefix.display());
    prefixes(search).into_iter().map(pattern).collect()
}

/// Sorted entries of a folder whose names match. Empty if the folder does not exist.
fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(&wanted)
        })
        .collect();
    paths.sort();
    paths
}

/// Opens a library file after the builtins beside it, which some Python wheels do not find. A later
/// look-up by name finds the loaded library.
fn preload(file: &Path) -> bool {
    let beside = file.parent().map_or(Vec::new(), |folder| {
        entries(folder, |name| name.starts_with("libnvrtc-builtins.so"))
    });
    for builtins in beside {
        let _ = open_permanently(&builtins);
    }
    open_permanently(file)
}

/// Opens a shared library and never closes it.
fn open_permanently(file: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: runs the library's initialisers, and NVIDIA's do not depend on our state. The handle
    // is forgotten, so the library is never unmapped.
    match unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(error) => {
            tracing::debug!(file = %file.display(), %error, "not a library to use");
            false
        }
    }
}

/// Whether the library opens by its usual names. Call this first: cudarc panics without the
/// library.
fn is_loadable() -> bool {
    // SAFETY: only opens the library by its well-known names.
    unsafe { sys::is_culib_present() }
}

fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two ints, and the library is loaded.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_in_environments_and_plain_folders() {
        let root = tempfile::tempdir().unwrap();
        let plain = root.path().join("plain");
        let environment = root.path().join("venv");
        let in_plain = plain.join("nvidia/cu13/lib");
        let in_environment = environment.join("lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
        std::fs::create_dir_all(&in_plain).unwrap();
        std::fs::create_dir_all(&in_environment).unwrap();
        let found = wheels(&NvrtcSearch {
            python: vec![plain, environment],
            ..NvrtcSearch::default()
        });
        assert_eq!(found[..2], [in_plain, in_environment]);
    }

    #[test]
    fn every_environment_is_named_in_the_message() {
        let named = NvrtcSearch {
            python: vec![PathBuf::from("/srv/one/.venv")],
            ..NvrtcSearch::default()
        };
        let error = CompileError::NvrtcNotFound {
            searched: wheel_patterns(&named),
        };
        let text = error.to_string();
        for part in [
            "/srv/one/.venv/lib/python3*",
            "/usr/lib/python3*",
            "--nvrtc",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn named_toolkit_is_searched_first() {
        let named = NvrtcSearch {
            toolkits: vec![PathBuf::from("/named")],
            ..NvrtcSearch::default()
        };
        assert_eq!(toolkits(&named)[0], Path::new("/named/lib64"));
    }
}
