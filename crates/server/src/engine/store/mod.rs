//! Saved states on disk: the part of the prefix cache that outlives the process.
//!
//! ```text
//! DIR/lock                  held while files are removed
//! DIR/OWNER/TOKENS.state    a state (format: [`file`]); OWNER and TOKENS are hashes
//! DIR/OWNER/*.part          a state being written, locked by its writer
//! DIR/texts/KEY.text        what compression kept of a prompt or a message (format: [`texts`])
//! ```
//!
//! A writer thread copies the bytes from the device if needed and writes them to a part file. It
//! syncs and renames the file, then syncs the folder. A file under its final name is therefore
//! complete; checksums detect damage by the medium. Names are never trusted: tokens are stored and
//! compared. An invalid file is a miss and is removed. An unwritable folder disables the store with
//! a warning.
//!
//! Several processes may share a folder. A writer first evicts the least recently used files,
//! counting all files below the folder, and removes part files of dead writers. The access time is
//! the modification time. When a process ends, it sets its states' access times from the order in
//! which it used them, even for states that are written later.

mod access_times;
mod directory;
pub mod file;
mod texts;
mod write_queue;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use contract::{DetachedSnapshot, DeviceError, TokenId};
use decode::Store;
use decode::prefix::StoreHit;

pub use texts::TextFiles;

use access_times::AccessTimes;
use directory::StateDirectory;
use write_queue::{PendingWrite, WriteQueue};

/// Maximum bytes in the write queue, so that a slow disk does not fill the memory. Beyond that, the
/// newest state replaces the oldest queued ones.
const MAX_QUEUED_BYTES: u64 = 4 << 30;

/// Location and limits of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// The folder; created if missing.
    pub dir: PathBuf,
    /// Maximum bytes of all files below the folder.
    pub budget: u64,
    /// Hash of what all states of this process share: model, draft, formats. States of other owners
    /// are never read.
    pub owner: [u8; 16],
}

/// Status of a store.
#[derive(Debug, Clone)]
pub struct StoreStatus {
    /// The folder.
    pub dir: PathBuf,
    /// Maximum bytes of all files below the folder.
    pub budget: u64,
    failure: Arc<Mutex<Option<String>>>,
}

impl StoreStatus {
    /// Why writing is disabled, if it is.
    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    fn fail(&self, what: String) {
        tracing::warn!("states are kept on disk no longer: {what}");
        *lock(&self.failure) = Some(what);
    }
}

/// The states of one owner in one folder. Dropping it waits until all accepted states are written.
pub struct DiskStore {
    directory: Arc<Mutex<StateDirectory>>,
    queue: Arc<WriteQueue>,
    status: StoreStatus,
    /// Whether the process is shutting down.
    closing: bool,
    writer: Option<JoinHandle<()>>,
}

impl DiskStore {
    /// Opens a folder, indexes its files and removes part files of dead writers.
    ///
    /// A folder that cannot be written is read only: a warning says so. Fails if the folder cannot
    /// be read, belongs to another user, or may be written by everyone.
    pub fn open(config: StoreConfig) -> io::Result<DiskStore> {
        let status = StoreStatus {
            dir: config.dir,
            budget: config.budget,
            failure: Arc::default(),
        };
        let mut directory = StateDirectory::open(&status.dir, config.owner)?;
        if let Err(error) = directory.evict(status.budget, None) {
            status.fail(format!("{}: {error}", status.dir.display()));
        }
        directory.refresh();
        let directory = Arc::new(Mutex::new(directory));
        let mut store = DiskStore {
            directory,
            queue: Arc::new(WriteQueue::new(MAX_QUEUED_BYTES)),
            status,
            closing: false,
            writer: None,
        };
        let writer = Writer {
            directory: Arc::clone(&store.directory),
            queue: Arc::clone(&store.queue),
            status: store.status.clone(),
        };
        let thread = std::thread::Builder::new().name("state writer".to_owned());
        store.writer = Some(thread.spawn(move || writer.run())?);
        Ok(store)
    }

    /// Current status.
    pub fn status(&self) -> StoreStatus {
        self.status.clone()
    }

    /// Token lists of this owner's files.
    pub fn token_lists(&self) -> Vec<Arc<[TokenId]>> {
        lock(&self.directory).token_lists()
    }
}

impl Store for DiskStore {
    fn find(&mut self, prompt: &[TokenId], more_than: usize, at_most: usize) -> Option<StoreHit> {
        let mut directory = lock(&self.directory);
        directory.refresh();
        loop {
            let (tokens, path) = directory.longest_prefix(prompt, more_than, at_most)?;
            match file::open(&path, &tokens) {
                Ok(payload) => {
                    directory.touch(&tokens, SystemTime::now());
                    return Some(StoreHit {
                        position: tokens.len(),
                        source: Box::new(payload),
                    });
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a stored state is of no use");
                    directory.forget(&tokens);
                }
            }
        }
    }

    fn longest_prefix_len(&mut self, tokens: &[TokenId]) -> usize {
        let begun = self.queue.longest_prefix_len(tokens);
        let mut directory = lock(&self.directory);
        directory.refresh();
        let kept = directory.longest_prefix(tokens, begun, tokens.len());
        kept.map_or(begun, |(kept, _)| kept.len())
    }

    fn put(&mut self, tokens: &[TokenId], snapshot: Box<dyn DetachedSnapshot>) {
        let size = snapshot.bytes();
        if size > self.status.budget || self.status.failure().is_some() {
            return;
        }
        let write = PendingWrite {
            tokens: tokens.into(),
            snapshot,
            size,
        };
        if self.closing {
            self.queue.push_with_room(write)
        } else {
            self.queue.push(write)
        }
    }

    fn begin_shutdown(&mut self, by_use: &[Vec<TokenId>]) {
        self.closing = true;
        let access_times = AccessTimes::new(by_use, SystemTime::now());
        let directory = lock(&self.directory);
        for tokens in by_use {
            directory.touch(tokens, access_times.of(tokens));
        }
        self.queue.end(access_times);
    }

    fn forget(&mut self, tokens: &[TokenId]) {
        lock(&self.directory).forget(tokens);
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.queue.close();
        if let Some(writer) = self.writer.take() {
            // The panic hook has already reported a panic of the writer.
            let _ = writer.join();
        }
    }
}

/// The writer thread.
struct Writer {
    directory: Arc<Mutex<StateDirectory>>,
    queue: Arc<WriteQueue>,
    status: StoreStatus,
}

impl Writer {
    fn run(&self) {
        while let Some(mut write) = self.queue.next() {
            if self.status.failure().is_none()
                && let Err(error) = self.write(&mut write)
            {
                match error {
                    DeviceError::SnapshotIo(error) => self.status.fail(error.to_string()),
                    error => tracing::warn!(%error, "a state cannot be brought to the disk"),
                }
            }
            self.queue.done();
        }
    }

    fn write(&self, write: &mut PendingWrite) -> Result<(), DeviceError> {
        let size = file::size(write.tokens.len(), write.size);
        if size > self.status.budget {
            return Ok(());
        }
        let dir = {
            let mut directory = lock(&self.directory);
            let spare = self.queue.access_time(&write.tokens);
            if !directory.evict(self.status.budget - size, spare)? {
                let tokens = write.tokens.len();
                tracing::info!(
                    tokens,
                    size,
                    "a state is not kept on disk: those used after it fill --kv-cache-budget"
                );
                return Ok(());
            }
            directory.dir().to_path_buf()
        };
        // The directory's lock is not held during disk writes.
        let path = file::write(&dir, &write.tokens, &mut *write.snapshot)?;
        let mut directory = lock(&self.directory);
        // Writing may have taken long, so the access time is read again.
        let used = self.queue.access_time(&write.tokens);
        directory.touch(&write.tokens, used.unwrap_or_else(SystemTime::now));
        directory.add(Arc::clone(&write.tokens), path);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // After a panic the list of files is still usable: every use checks the file again.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
