//! Finding libnvrtc. It belongs to the CUDA toolkit, not to the driver, so it may be anywhere or nowhere.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use super::error::CompileError;

/// An opened libnvrtc. It stays open until the process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// The file, or `None` when the system found it by name.
    pub path: Option<PathBuf>,
    /// Major and minor version.
    pub version: (i32, i32),
}

/// The first library that was opened: a process has one.
static OPENED: OnceLock<Library> = OnceLock::new();

impl Library {
    /// Opens libnvrtc: the configured file if there is one, else wherever it usually is.
    ///
    /// # Errors
    /// [`CompileError::NoLibrary`] with every place that was looked at.
    pub fn open(configured: Option<&Path>) -> Result<&'static Library, CompileError> {
        if let Some(library) = OPENED.get() {
            return Ok(library);
        }
        let mut looked = Vec::new();
        for file in candidates(configured) {
            looked.push(file.display().to_string());
            if file.is_file() && preload(&file) && by_name() {
                return Ok(OPENED.get_or_init(|| Library {
                    path: Some(file),
                    version: version(),
                }));
            }
        }
        looked.push("the system's library path".to_owned());
        if by_name() {
            return Ok(OPENED.get_or_init(|| Library {
                path: None,
                version: version(),
            }));
        }
        Err(CompileError::NoLibrary { looked })
    }
}

/// Files to try, best first.
fn candidates(configured: Option<&Path>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if let Some(folder) = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(Path::to_path_buf))
    {
        folders.push(folder.clone());
        folders.push(folder.join("../lib"));
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    folders.push(PathBuf::from("/usr/local/cuda/targets/x86_64-linux/lib"));
    let mut files: Vec<PathBuf> = configured.map(Path::to_path_buf).into_iter().collect();
    for folder in folders {
        for name in ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] {
            files.push(folder.join(name));
        }
    }
    files
}

/// Opens a library file and, before it, the builtins beside it, which the library of some Python wheels does
/// not find by itself. The later look-up by name then meets the library that is already there.
fn preload(file: &Path) -> bool {
    let beside = file
        .parent()
        .and_then(|folder| std::fs::read_dir(folder).ok())
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with("libnvrtc-builtins.so"))
        });
    for builtins in beside {
        let _ = keep_open(&builtins);
    }
    keep_open(file)
}

/// Opens a shared library for good.
fn keep_open(file: &Path) -> bool {
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
fn by_name() -> bool {
    // SAFETY: only tries to open the library by its well-known names.
    unsafe { sys::is_culib_present() }
}

fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two ints; the library was found just before.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}
