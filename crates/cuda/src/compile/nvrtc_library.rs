//! Finding libnvrtc. It belongs to the CUDA toolkit, not to the driver, so it may be anywhere or nowhere.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use super::error::CompileError;

/// Where to look for libnvrtc, besides beside the executable and where the system looks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvrtcSearch {
    /// The file itself: the first to be tried.
    pub file: Option<PathBuf>,
    /// Folders of a CUDA toolkit, such as `/usr/local/cuda`, tried before the usual ones.
    pub toolkits: Vec<PathBuf>,
    /// Folders in which Python packages may be: an environment's prefix, or the packages' own folder.
    pub python: Vec<PathBuf>,
}

/// An opened libnvrtc. It stays open until the process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvrtc {
    /// The file, or `None` when the system found it by name.
    pub path: Option<PathBuf>,
    /// Major and minor version.
    pub version: (i32, i32),
}

/// The first library that was opened: a process has one.
static OPENED: OnceLock<Nvrtc> = OnceLock::new();

impl Nvrtc {
    /// Opens libnvrtc: the file that was named, else beside the executable, by name, in a toolkit, in a
    /// Python environment.
    ///
    /// # Errors
    /// [`CompileError::NvrtcNotFound`] with every place that was searched at.
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
                // One line a folder is enough for a person.
                searched.retain(|file| !file.ends_with(".so.12") && !file.ends_with(".so"));
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

/// The names of the library in each folder, newest first.
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

/// The library folders of CUDA toolkits, the newest version first.
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

/// The library folders of NVIDIA's Python packages.
fn wheels(search: &NvrtcSearch) -> Vec<PathBuf> {
    let system = ["/usr", "/usr/local"].map(PathBuf::from);
    let mut folders = Vec::new();
    for prefix in search.python.iter().chain(&system) {
        let mut sites = vec![prefix.clone()];
        for python in entries(&prefix.join("lib"), |name| name.starts_with("python3")) {
            sites.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
        }
        for site in sites {
            // `nvidia/cu13/lib` from version 13 on, `nvidia/cuda_nvrtc/lib` before.
            for package in entries(&site.join("nvidia"), |_| true).into_iter().rev() {
                folders.push(package.join("lib"));
            }
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Entries of a folder whose names are wanted, sorted; none where there is no such folder.
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

/// Opens a library file and, before it, the builtins beside it, which the library of some Python wheels does
/// not find by itself. The later look-up by name then meets the library that is already there.
fn preload(file: &Path) -> bool {
    let beside = file.parent().map_or(Vec::new(), |folder| {
        entries(folder, |name| name.starts_with("libnvrtc-builtins.so"))
    });
    for builtins in beside {
        let _ = open_permanently(&builtins);
    }
    open_permanently(file)
}

/// Opens a shared library for good.
fn open_permanently(file: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: runs the library's initialisers; NVIDIA's have none that depend on our state. The handle is
    // forgotten, so nothing it holds is ever unmapped.
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

/// Whether the library answers to its usual names. Must come before any call, because cudarc panics without.
fn is_loadable() -> bool {
    // SAFETY: only tries to open the library by its well-known names.
    unsafe { sys::is_culib_present() }
}

fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two ints; the library was found just before.
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
    fn named_toolkit_is_searched_first() {
        let named = NvrtcSearch {
            toolkits: vec![PathBuf::from("/named")],
            ..NvrtcSearch::default()
        };
        assert_eq!(toolkits(&named)[0], Path::new("/named/lib64"));
    }
}
