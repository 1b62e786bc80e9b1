//! Index of one owner's files, and eviction among all owners' files.

use std::collections::BTreeMap;
use std::fs::{self, DirEntry, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use contract::TokenId;

use super::file::{self, PART_EXT, STATE_EXT};
use crate::guarded;

/// Upper bound of file time resolution.
const CLOCK_GRAIN: Duration = Duration::from_secs(2);

/// Index of one owner's files.
pub(super) struct StateDirectory {
    root: PathBuf,
    dir: PathBuf,
    /// The files, keyed by their paths; `None` for an invalid file that could not be removed.
    files: BTreeMap<PathBuf, Option<Arc<[TokenId]>>>,
    /// Modification time of the folder at the last scan.
    seen: Option<SystemTime>,
}

/// File of any owner.
struct StateFile {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl StateDirectory {
    /// Creates missing folders where it can, and checks who may write to them.
    pub(super) fn open(root: &Path, owner: [u8; 16]) -> io::Result<StateDirectory> {
        let name: String = owner.iter().map(|byte| format!("{byte:02x}")).collect();
        let dir = root.join(name);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        // A folder that cannot be written to may still hold states to read.
        let created = builder.create(&dir);
        let found = fs::metadata(root).map_err(|error| created.err().unwrap_or(error))?;
        guarded::check_folder(root, &found)?;
        // The user may have named a link, but the store itself makes none.
        if let Ok(found) = fs::symlink_metadata(&dir) {
            guarded::check_folder(&dir, &found)?;
        }
        Ok(StateDirectory {
            root: root.to_path_buf(),
            dir,
            files: BTreeMap::new(),
            seen: None,
        })
    }

    /// The owner's folder.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Token lists of all files.
    pub(super) fn token_lists(&self) -> Vec<Arc<[TokenId]>> {
        self.files.values().flatten().cloned().collect()
    }

    /// Rescans the folder if it changed.
    pub(super) fn refresh(&mut self) {
        let changed = fs::metadata(&self.dir).and_then(|dir| dir.modified()).ok();
        if changed.is_some() && changed == self.seen {
            return;
        }
        // A change within the time resolution would be missed, so such a time is not recorded.
        let settled = |at: &SystemTime| at.elapsed().is_ok_and(|age| age > CLOCK_GRAIN);
        self.seen = changed.filter(settled);
        let Ok(entries) = fs::read_dir(&self.dir) else {
            self.files.clear();
            return;
        };
        let mut before = std::mem::take(&mut self.files);
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_none_or(|ending| ending != STATE_EXT) {
                continue;
            }
            let known = before.remove(&path).flatten();
            let tokens = known.or_else(|| match file::tokens(&path) {
                Ok(tokens) => Some(tokens.into()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a stored state is of no use");
                    // A file that cannot be removed is skipped.
                    let _ = fs::remove_file(&path);
                    None
                }
            });
            self.files.insert(path, tokens);
        }
    }

    /// The longest stored prefix of `prompt` within the bounds.
    pub(super) fn longest_prefix(
        &self,
        prompt: &[TokenId],
        more_than: usize,
        at_most: usize,
    ) -> Option<(Arc<[TokenId]>, PathBuf)> {
        let fits = |tokens: &[TokenId]| {
            let n = tokens.len();
            n > more_than && n <= at_most && prompt.starts_with(tokens)
        };
        let files = self
            .files
            .iter()
            .filter_map(|(path, tokens)| Some((tokens.as_ref()?, path)));
        let best = files
            .filter(|(tokens, _)| fits(tokens))
            .max_by_key(|(tokens, _)| tokens.len());
        best.map(|(tokens, path)| (Arc::clone(tokens), path.clone()))
    }

    /// Adds a file that was just written.
    pub(super) fn add(&mut self, tokens: Arc<[TokenId]>, path: PathBuf) {
        self.files.insert(path, Some(tokens));
    }

    /// Sets the access time (file modification time) of the file with exactly these tokens. Errors
    /// are ignored: a read-only folder still serves.
    pub(super) fn touch(&self, tokens: &[TokenId], used: SystemTime) {
        let file = guarded::open(&self.dir.join(file::name(tokens)), true);
        let _ = file.and_then(|file| file.set_modified(used));
    }

    /// Removes a file.
    pub(super) fn forget(&mut self, tokens: &[TokenId]) {
        let path = self.dir.join(file::name(tokens));
        // Another process may have removed it.
        let _ = fs::remove_file(&path);
        self.files.remove(&path);
    }

    /// Removes orphaned part files, then evicts the least recently used files until all fit into
    /// `budget` bytes. Files used since `spare` stay. Returns whether all fit.
    pub(super) fn evict(&mut self, budget: u64, spare: Option<SystemTime>) -> io::Result<bool> {
        let _lock = guarded::lock(&self.root.join("lock"))?;
        let mut items = Vec::new();
        let mut all = 0;
        for entry in files_below(&self.root)? {
            let path = entry.path();
            // Another process removed the file.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            let ending = path.extension().unwrap_or_default();
            if ending == PART_EXT && is_orphan(&path) && fs::remove_file(&path).is_ok() {
                continue;
            }
            all += metadata.len();
            if ending == STATE_EXT {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let bytes = metadata.len();
                items.push(StateFile { path, bytes, used });
            }
        }
        items.sort_by_key(|item| item.used);
        for item in items {
            if all <= budget || spare.is_some_and(|spare| item.used >= spare) {
                break;
            }
            match fs::remove_file(&item.path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            all -= item.bytes;
            self.files.remove(&item.path);
        }
        Ok(all <= budget)
    }
}

/// All files of all owners.
fn files_below(root: &Path) -> io::Result<Vec<DirEntry>> {
    let mut found = Vec::new();
    for owner in fs::read_dir(root)?.flatten() {
        if owner.file_type().is_ok_and(|ty| ty.is_dir())
            && let Ok(entries) = fs::read_dir(owner.path())
        {
            found.extend(entries.flatten());
        }
    }
    Ok(found)
}

/// Whether no writer holds the lock of a part file.
fn is_orphan(path: &Path) -> bool {
    match guarded::open(path, true) {
        Ok(file) => !matches!(file.try_lock(), Err(TryLockError::WouldBlock)),
        Err(_) => false,
    }
}
