//! Saved states on disk: what the prefix cache keeps beyond the process.
//!
//! ```text
//! DIR/lock                  held while files are taken away
//! DIR/OWNER/TOKENS.state    a state ([`file`] says what is inside); OWNER and TOKENS are hashes
//! DIR/OWNER/*.part          a state being written, locked by its writer
//! ```
//!
//! Files are written on a thread of their own, which also fetches the bytes where they still are the device's: into a
//! part file, which is synchronised, renamed, and made lasting by synchronising its folder. So a file under its final name
//! is whole, unless the medium damaged it, which checksums find. Nothing rests on names: tokens are stored and
//! compared. A file that does not fit is a miss and is taken away; a folder that cannot be written turns the
//! store off with a warning.
//!
//! Several processes may share a folder. Whoever writes makes room first, by the age of last use, counting
//! everything below the folder; part files whose writer is gone are taken away. The age is the time of last change; when a
//! process ends, its states get theirs from the order in which it used them, whenever they are or were written.

mod access_times;
mod directory;
pub mod file;
mod write_queue;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::SystemTime;

use contract::{DetachedSnapshot, DeviceError, TokenId};
use decode::Store;
use decode::prefix::StoreHit;

use access_times::AccessTimes;
use directory::StateDirectory;
use write_queue::{PendingWrite, WriteQueue};

/// Bytes that may wait to be written, so that a slow disk does not fill the memory: beyond that the newest state takes
/// the place of those that have waited longest.
const MAX_QUEUED_BYTES: u64 = 4 << 30;

/// Where states are kept, and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// The folder; made if it is not there.
    pub dir: PathBuf,
    /// Bytes that all files below it may have.
    pub budget: u64,
    /// What all states of this process have in common: model, draft, formats. States of another owner are
    /// never looked at.
    pub owner: [u8; 16],
}

/// What can be told of a store from outside.
#[derive(Debug, Clone)]
pub struct StoreStatus {
    /// Its folder.
    pub dir: PathBuf,
    /// Bytes that all files below it may have.
    pub budget: u64,
    failure: Arc<Mutex<Option<String>>>,
}

impl StoreStatus {
    /// Why nothing is written any more, if so.
    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    fn fail(&self, what: String) {
        tracing::warn!("states are kept on disk no longer: {what}");
        *lock(&self.failure) = Some(what);
    }
}

/// The states of one owner in one folder. Dropping it waits until everything it took is written.
pub struct DiskStore {
    directory: Arc<Mutex<StateDirectory>>,
    queue: Arc<WriteQueue>,
    status: StoreStatus,
    /// Whether the process ends.
    closing: bool,
    writer: Option<JoinHandle<()>>,
}

impl DiskStore {
    /// Opens a folder, reads what is there, and takes away what dead writers left.
    pub fn open(config: StoreConfig) -> io::Result<DiskStore> {
        let mut directory = StateDirectory::open(&config.dir, config.owner)?;
        directory.evict(config.budget, None)?;
        directory.refresh();
        let directory = Arc::new(Mutex::new(directory));
        let mut store = DiskStore {
            directory,
            queue: Arc::new(WriteQueue::new(MAX_QUEUED_BYTES)),
            status: StoreStatus {
                dir: config.dir,
                budget: config.budget,
                failure: Arc::default(),
            },
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

    /// What can be told from outside.
    pub fn status(&self) -> StoreStatus {
        self.status.clone()
    }

    /// Files of this owner, with their tokens.
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

    fn covered(&mut self, tokens: &[TokenId]) -> usize {
        let begun = self.queue.covered(tokens);
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
            // A panic there was told where it happened.
            let _ = writer.join();
        }
    }
}

/// The thread that writes.
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
        // The lock of the shelf is not held while the disk works.
        let path = file::write(&dir, &write.tokens, &mut *write.snapshot)?;
        let mut directory = lock(&self.directory);
        // The disk may have taken its time since the last byte.
        let used = self.queue.access_time(&write.tokens);
        directory.touch(&write.tokens, used.unwrap_or_else(SystemTime::now));
        directory.add(Arc::clone(&write.tokens), path);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panicking holder left is a list of files; every use of one looks at the file again.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
