//! The folders that `serve` reads and writes, and the space in them.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statvfs};

use super::finding::{Finding, Severity};
use crate::cli::ServeArgs;
use crate::config;
use crate::open::devices::DeviceChoice;
use crate::progress::bytes_text;

/// Free space below which a folder is reported, in bytes.
const LITTLE_SPACE: u64 = 1 << 30;

pub(super) fn findings(args: &ServeArgs, choice: &DeviceChoice) -> Vec<Finding> {
    let mut found = Vec::new();
    match &choice.gpu.compile.cache {
        Some(cache) => found.push(written(
            "kernels",
            cache,
            "kernels are compiled at every start; name a folder with --kernel-cache",
        )),
        None => found.push(
            Finding::new(
                "kernels",
                Severity::Warning,
                "no cache folder for compiled kernels",
            )
            .at("HOME and XDG_CACHE_HOME are not set")
            .action("name a folder with --kernel-cache"),
        ),
    }
    match config::hub::of_user() {
        Ok(hub) => found.push(written(
            "models",
            hub.cache().root(),
            "models cannot be downloaded by name; name a folder with HF_HOME",
        )),
        Err(error) => found.push(
            Finding::new("models", Severity::Warning, error.to_string())
                .action("models by name cannot be used until this is set right"),
        ),
    }
    if let Some(folder) = &args.cache.kv_cache_dir {
        let action =
            "saved sessions are lost; give --kv-cache-dir a folder that this user can write";
        found.push(written("sessions", folder, action));
    }
    found
}

/// A folder that is written to, or made in the nearest one that exists.
fn written(check: &'static str, folder: &Path, action: &str) -> Finding {
    let place = folder.display().to_string();
    let Some(there) = nearest(folder) else {
        return Finding::new(check, Severity::Warning, "the folder cannot be reached")
            .at(place)
            .action(action);
    };
    if !there.is_dir() {
        return Finding::new(
            check,
            Severity::Warning,
            format!("{} is no folder", there.display()),
        )
        .at(place)
        .action(action);
    }
    if access(&there, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        let what = format!("{} cannot be written by this user", there.display());
        return Finding::new(check, Severity::Warning, what)
            .at(place)
            .action(action);
    }
    match statvfs(&there).map(|system| system.f_bavail.saturating_mul(system.f_frsize)) {
        Ok(free) if free < LITTLE_SPACE => {
            let what = format!("only {} are free", bytes_text(free));
            Finding::new(check, Severity::Warning, what)
                .at(place)
                .action("make space; `hearth list` shows the models and `hearth rm` removes one")
        }
        Ok(free) => Finding::new(
            check,
            Severity::Ok,
            format!("{place}, {} free", bytes_text(free)),
        ),
        Err(error) => Finding::new(check, Severity::Note, error.to_string()).at(place),
    }
}

/// The path, or the nearest one above that exists.
fn nearest(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    let found = absolute.ancestors().find(|path| path.exists());
    found.map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_exist_can_be_made_or_cannot_be_written_are_distinguished() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("file");
        std::fs::write(&file, "").unwrap();
        for (path, severity) in [
            (home.path().to_owned(), Severity::Ok),
            (home.path().join("a/b"), Severity::Ok),
            (file.join("b"), Severity::Warning),
        ] {
            let finding = written("kernels", &path, "do this");
            // A disk that is nearly full is reported too.
            if !finding.what.starts_with("only") {
                assert_eq!(finding.severity, severity, "{finding:?}");
            }
        }
        assert_eq!(written("kernels", &file, "do this").action, "do this");
    }
}
