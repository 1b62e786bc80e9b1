//! The folder for prompt states of one run with several models, where the flags name none.
//!
//! ```text
//! PARENT/hearth-sessions-XXXXXX/running    locked as long as the run lasts
//! PARENT/hearth-sessions-XXXXXX/states/    the store
//! ```
//!
//! It is removed at the end. The folder of a run that was killed is removed by the next start,
//! since its prompts must not stay behind.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::TempDir;

/// Where the folders are: on a disk, while the usual temporary folder may be in memory.
const PARENT: &str = "/var/tmp";
const PREFIX: &str = "hearth-sessions-";
/// The file that a run keeps locked.
const LOCK: &str = "running";
/// The folder of the states.
const STATES: &str = "states";

/// A folder that is removed when this is dropped.
pub(super) struct SessionFolder {
    folder: TempDir,
    /// Locked until the folder is removed.
    _lock: File,
}

impl SessionFolder {
    /// Makes a folder, and removes those of runs that were killed.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn make() -> anyhow::Result<SessionFolder> {
        let usual = std::env::temp_dir();
        let disk = Path::new(PARENT);
        let parent = if disk.is_dir() { disk } else { &usual };
        SessionFolder::make_in(parent)
            .context("cannot make a folder for prompt states; name one with --kv-cache-dir")
    }

    fn make_in(parent: &Path) -> std::io::Result<SessionFolder> {
        remove_abandoned(parent);
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        let lock = File::create(folder.path().join(LOCK))?;
        lock.lock()?;
        // Only this user may read prompts; the folder above has those rights already.
        fs::create_dir(folder.path().join(STATES))?;
        Ok(SessionFolder {
            folder,
            _lock: lock,
        })
    }

    /// Where the store keeps its states.
    pub(super) fn states(&self) -> PathBuf {
        self.folder.path().join(STATES)
    }
}

/// Removes the folders whose run has ended without removing them. What belongs to other users, or
/// cannot be removed, stays.
fn remove_abandoned(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // A folder without the file is being made.
        let lock = File::open(entry.path().join(LOCK));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok())
            && fs::remove_dir_all(entry.path()).is_ok()
        {
            let folder = entry.path();
            tracing::info!(
                "removed the prompt states of a killed run: {}",
                folder.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_runs_are_removed_and_those_of_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        let running = SessionFolder::make_in(parent.path()).unwrap();
        fs::write(running.states().join("a.state"), "x").unwrap();
        let killed = at("hearth-sessions-killed");
        fs::create_dir_all(killed.join(STATES)).unwrap();
        fs::write(killed.join(LOCK), "").unwrap();
        let (begun, other) = (at("hearth-sessions-begun"), at("other"));
        fs::create_dir(&begun).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(other.join(LOCK), "").unwrap();
        let next = SessionFolder::make_in(parent.path()).unwrap();
        assert!(!killed.exists());
        assert!(running.states().join("a.state").exists());
        assert!(begun.exists() && other.exists() && next.states().is_dir());
        let (first, second) = (running.states(), next.states());
        drop((running, next));
        assert!(!first.exists() && !second.exists());
    }
}
