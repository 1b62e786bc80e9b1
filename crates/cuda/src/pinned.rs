//! Page-locked host memory that is used again: locking pages takes twenty times as long as copying them.
//!
//! Measured beside an H200: 157 MB are locked in 68 to 110 ms and copied in 3. So blocks that come back are kept, and
//! once a large one was wanted, a thread locks the next before it is. While it does, launches may have to wait for the
//! driver: so while somebody waits for a token the thread sees to it that there is one, and does the rest in a pause or beside long
//! chunks of a prompt, whose launches are queued far ahead.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use contract::DeviceError;

use crate::driver::{CopyEngine, Gpu, Pinned};

/// Blocks of at least this many bytes are locked ahead of time, and have sizes that are multiples of it.
const LARGE: usize = 16 << 20;
/// Blocks of one size that wait to be wanted, once there was time: what the next turns of conversations save.
const PRELOCKED_BLOCKS: usize = 4;
/// The card has a pause when nobody asked for it this long.
const IDLE_AFTER: Duration = Duration::from_millis(150);
/// Rows of a pass beside which memory may be locked.
const LONG_PREFILL_ROWS: usize = 1024;

/// Blocks that nobody uses just now, by their size.
type Idle = Arc<Mutex<BTreeMap<usize, Vec<Pinned<u8>>>>>;

/// Gives out blocks. Must outlive the work queued on the card, since copies from and to blocks that came back may
/// still be under way.
pub(crate) struct PinnedPool {
    idle: Idle,
    copy_engine: CopyEngine,
    /// Sizes of which the thread shall have some ready; `None` until the first is wanted.
    ahead: Mutex<Option<Prelocker>>,
    work: Arc<Activity>,
}

/// When the card was last asked for anything.
struct Activity {
    begun: Instant,
    /// Milliseconds after that.
    last: AtomicU64,
    /// Whether for a long pass.
    long: AtomicBool,
    /// Who wants the driver for themselves just now.
    held: AtomicUsize,
    stopping: AtomicBool,
}

impl Activity {
    /// Whether nobody is kept waiting by a thread that holds the driver.
    fn may_lock(&self) -> bool {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.long.load(Ordering::Relaxed) || self.begun.elapsed().saturating_sub(last) >= IDLE_AFTER
    }
}

/// Keeps the thread that locks memory from doing so.
pub(crate) struct PrelockPause(Arc<Activity>);

impl Drop for PrelockPause {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Prelocker {
    /// `None` once the pool is being dropped, which ends the thread.
    sizes: Option<Sender<usize>>,
    thread: Option<JoinHandle<()>>,
}

/// A block of page-locked memory, contents undefined; goes back to its pool when dropped.
///
/// Copies are queued on the main stream, or on one that the main stream has been told to wait for before the block comes
/// back: so whoever gets a block next and queues a copy there comes after whatever its last owner queued. Reading or writing
/// it on the host needs a wait before.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    /// `None` only while it is being dropped.
    memory: Option<Pinned<u8>>,
    idle: Idle,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A list of memory has no state between two of its changes.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PinnedPool {
    pub(crate) fn new(gpu: &Gpu) -> PinnedPool {
        PinnedPool {
            idle: Idle::default(),
            copy_engine: gpu.copy_engine(),
            ahead: Mutex::new(None),
            work: Arc::new(Activity {
                begun: Instant::now(),
                last: AtomicU64::new(0),
                long: AtomicBool::new(false),
                held: AtomicUsize::new(0),
                stopping: AtomicBool::new(false),
            }),
        }
    }

    /// Tells that the card is at work on a pass of so many rows.
    pub(crate) fn note_pass(&self, rows: usize) {
        self.work
            .long
            .store(rows >= LONG_PREFILL_ROWS, Ordering::Relaxed);
        let now = self.work.begun.elapsed().as_millis();
        self.work
            .last
            .store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Until what comes back is dropped, no memory is locked ahead of time.
    pub(crate) fn pause_prelocking(&self) -> PrelockPause {
        self.work.held.fetch_add(1, Ordering::Relaxed);
        PrelockPause(Arc::clone(&self.work))
    }

    /// A block of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the system locks no more pages.
    pub(crate) fn take(&self, bytes: usize) -> Result<PinnedBlock, DeviceError> {
        let large = bytes >= LARGE;
        let size = if large {
            bytes.next_multiple_of(LARGE)
        } else {
            bytes
        };
        let again = lock(&self.idle).get_mut(&size).and_then(Vec::pop);
        let memory = match again {
            Some(memory) => memory,
            None => self.copy_engine.pinned(size)?,
        };
        if large {
            self.prelock(size);
        }
        Ok(PinnedBlock {
            memory: Some(memory),
            idle: Arc::clone(&self.idle),
        })
    }

    /// Has blocks of `size` bytes locked on another thread. Where there is none, they are locked when wanted.
    fn prelock(&self, size: usize) {
        let mut ahead = lock(&self.ahead);
        let ahead = ahead.get_or_insert_with(|| {
            let (sizes, wanted) = mpsc::channel::<usize>();
            let (idle, copy_engine) = (Arc::clone(&self.idle), self.copy_engine.clone());
            let pauses = Arc::clone(&self.work);
            let work = move || {
                for size in wanted {
                    loop {
                        let ready = lock(&idle).get(&size).map_or(0, Vec::len);
                        let stopping = pauses.stopping.load(Ordering::Relaxed);
                        if ready >= PRELOCKED_BLOCKS || stopping {
                            break;
                        }
                        let held = pauses.held.load(Ordering::Relaxed) > 0;
                        if held || (ready > 0 && !pauses.may_lock()) {
                            std::thread::sleep(IDLE_AFTER / 4);
                            continue;
                        }
                        // What cannot be locked is told to whoever wants it.
                        let Ok(memory) = copy_engine.pinned(size) else {
                            break;
                        };
                        lock(&idle).entry(size).or_default().push(memory);
                    }
                }
            };
            let thread = std::thread::Builder::new().name("memory locker".to_owned());
            Prelocker {
                sizes: Some(sizes),
                thread: thread.spawn(work).ok(),
            }
        });
        if let Some(sizes) = &ahead.sizes {
            // Without a thread nobody listens.
            let _ = sizes.send(size);
        }
    }

    /// Gives idle blocks beyond `bytes` back to the system. Everything queued must have been waited for.
    pub(crate) fn trim(&self, bytes: usize) {
        let mut idle = lock(&self.idle);
        let mut left = bytes;
        for (size, blocks) in idle.iter_mut() {
            let stay = (left / size.max(&1)).min(blocks.len());
            blocks.truncate(stay);
            left -= stay * size;
        }
    }

    /// Bytes of blocks that nobody uses.
    pub(crate) fn idle_bytes(&self) -> usize {
        let idle = lock(&self.idle);
        idle.iter().map(|(size, blocks)| size * blocks.len()).sum()
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        self.work.stopping.store(true, Ordering::Relaxed);
        if let Some(mut ahead) = lock(&self.ahead).take() {
            ahead.sizes = None;
            if let Some(thread) = ahead.thread.take() {
                // A panic there was told where it happened.
                let _ = thread.join();
            }
        }
    }
}

impl PinnedBlock {
    fn memory(&self) -> &Pinned<u8> {
        self.memory
            .as_ref()
            .expect("a block has its memory until it is dropped")
    }

    /// The address by which copies reach it.
    pub(crate) fn address(&self) -> u64 {
        self.memory().device_ptr()
    }

    /// Its size, at least what was asked for.
    pub(crate) fn len(&self) -> usize {
        self.memory().len()
    }

    /// The bytes. Copies into it must have been waited for.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.memory().as_slice()
    }

    /// The bytes, to write. Copies from and into it, and what its last owner queued, must have been waited for.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut();
        memory
            .expect("a block has its memory until it is dropped")
            .as_mut_slice()
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            lock(&self.idle)
                .entry(memory.len())
                .or_default()
                .push(memory);
        }
    }
}
