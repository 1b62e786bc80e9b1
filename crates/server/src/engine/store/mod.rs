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

use access_times::LastUses;
use directory::Shelf;
use write_queue::{Order, Waiting};

/// Bytes that may wait to be written, so that a slow disk does not fill the memory: beyond that the newest state takes
/// the place of those that have waited longest.
const MOST_WAITING: u64 = 4 << 30;

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
pub struct StoreFacts {
    /// Its folder.
    pub dir: PathBuf,
    /// Bytes that all files below it may have.
    pub budget: u64,
    trouble: Arc<Mutex<Option<String>>>,
}

impl StoreFacts {
    /// Why nothing is written any more, if so.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.trouble).clone()
    }

    fn fail(&self, what: String) {
        tracing::warn!("states are kept on disk no longer: {what}");
        *lock(&self.trouble) = Some(what);
    }
}

/// The states of one owner in one folder. Dropping it waits until everything it took is written.
pub struct DiskStore {
    shelf: Arc<Mutex<Shelf>>,
    waiting: Arc<Waiting>,
    facts: StoreFacts,
    /// Whether the process ends.
    closing: bool,
    writer: Option<JoinHandle<()>>,
}

impl DiskStore {
    /// Opens a folder, reads what is there, and takes away what dead writers left.
    pub fn open(config: StoreConfig) -> io::Result<DiskStore> {
        let mut shelf = Shelf::open(&config.dir, config.owner)?;
        shelf.tidy(config.budget, None)?;
        shelf.look();
        let shelf = Arc::new(Mutex::new(shelf));
        let mut store = DiskStore {
            shelf,
            waiting: Arc::new(Waiting::new(MOST_WAITING)),
            facts: StoreFacts {
                dir: config.dir,
                budget: config.budget,
                trouble: Arc::default(),
            },
            closing: false,
            writer: None,
        };
        let writer = Writer {
            shelf: Arc::clone(&store.shelf),
            waiting: Arc::clone(&store.waiting),
            facts: store.facts.clone(),
        };
        let thread = std::thread::Builder::new().name("state writer".to_owned());
        store.writer = Some(thread.spawn(move || writer.run())?);
        Ok(store)
    }

    /// What can be told from outside.
    pub fn facts(&self) -> StoreFacts {
        self.facts.clone()
    }

    /// Files of this owner, with their tokens.
    pub fn kept(&self) -> Vec<Arc<[TokenId]>> {
        lock(&self.shelf).kept()
    }
}

impl Store for DiskStore {
    fn find(&mut self, prompt: &[TokenId], more_than: usize, at_most: usize) -> Option<StoreHit> {
        let mut shelf = lock(&self.shelf);
        shelf.look();
        loop {
            let (tokens, path) = shelf.longest(prompt, more_than, at_most)?;
            match file::open(&path, &tokens) {
                Ok(payload) => {
                    shelf.renew(&tokens, SystemTime::now());
                    return Some(StoreHit {
                        position: tokens.len(),
                        source: Box::new(payload),
                    });
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a stored state is of no use");
                    shelf.forget(&tokens);
                }
            }
        }
    }

    fn covered(&mut self, tokens: &[TokenId]) -> usize {
        let begun = self.waiting.covered(tokens);
        let mut shelf = lock(&self.shelf);
        shelf.look();
        let kept = shelf.longest(tokens, begun, tokens.len());
        kept.map_or(begun, |(kept, _)| kept.len())
    }

    fn put(&mut self, tokens: &[TokenId], parcel: Box<dyn DetachedSnapshot>) {
        let size = parcel.bytes();
        if size > self.facts.budget || self.facts.trouble().is_some() {
            return;
        }
        let order = Order {
            tokens: tokens.into(),
            parcel,
            size,
        };
        match self.closing {
            false => self.waiting.push(order),
            true => self.waiting.push_with_room(order),
        }
    }

    fn begin_shutdown(&mut self, by_use: &[Vec<TokenId>]) {
        self.closing = true;
        let last_uses = LastUses::new(by_use, SystemTime::now());
        let shelf = lock(&self.shelf);
        for tokens in by_use {
            shelf.renew(tokens, last_uses.of(tokens));
        }
        self.waiting.end(last_uses);
    }

    fn forget(&mut self, tokens: &[TokenId]) {
        lock(&self.shelf).forget(tokens);
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.waiting.close();
        if let Some(writer) = self.writer.take() {
            // A panic there was told where it happened.
            let _ = writer.join();
        }
    }
}

/// The thread that writes.
struct Writer {
    shelf: Arc<Mutex<Shelf>>,
    waiting: Arc<Waiting>,
    facts: StoreFacts,
}

impl Writer {
    fn run(&self) {
        while let Some(mut order) = self.waiting.next() {
            if self.facts.trouble().is_none()
                && let Err(error) = self.write(&mut order)
            {
                match error {
                    DeviceError::SnapshotIo(error) => self.facts.fail(error.to_string()),
                    error => tracing::warn!(%error, "a state cannot be brought to the disk"),
                }
            }
            self.waiting.done();
        }
    }

    fn write(&self, order: &mut Order) -> Result<(), DeviceError> {
        let size = file::size(order.tokens.len(), order.size);
        if size > self.facts.budget {
            return Ok(());
        }
        let dir = {
            let mut shelf = lock(&self.shelf);
            let spare = self.waiting.last_use(&order.tokens);
            if !shelf.tidy(self.facts.budget - size, spare)? {
                let tokens = order.tokens.len();
                tracing::info!(
                    tokens,
                    size,
                    "a state is not kept on disk: those used after it fill --kv-cache-budget"
                );
                return Ok(());
            }
            shelf.dir().to_path_buf()
        };
        // The lock of the shelf is not held while the disk works.
        let path = file::write(&dir, &order.tokens, &mut *order.parcel)?;
        let mut shelf = lock(&self.shelf);
        // The disk may have taken its time since the last byte.
        let used = self.waiting.last_use(&order.tokens);
        shelf.renew(&order.tokens, used.unwrap_or_else(SystemTime::now));
        shelf.add(Arc::clone(&order.tokens), path);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panicking holder left is a list of files; every use of one looks at the file again.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
