//! A pool of page-locked host memory. Locking pages takes twenty times as long as copying them.
//!
//! Measured on an H200: 157 MB lock in 68 to 110 ms and copy in 3 ms. The pool therefore keeps
//! released blocks. After the first large request, a thread locks blocks of that size ahead of use.
//! Locking can delay launches in the driver. During decode the thread therefore keeps only one
//! block ready. It locks the others while the device is idle, or during long prefill chunks, whose
//! launches are queued far ahead.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use contract::DeviceError;

use crate::driver::{CopyEngine, Gpu, Pinned};

/// Blocks of at least this size are pre-locked, and their sizes are multiples of it.
const LARGE: usize = 16 << 20;
/// Target number of idle blocks per size, for the snapshots of the next turns.
const PRELOCKED_BLOCKS: usize = 4;
/// The device is idle after this time without a pass.
const IDLE_AFTER: Duration = Duration::from_millis(150);
/// Prefill passes of at least this many rows allow locking.
const LONG_PREFILL_ROWS: usize = 1024;

/// Idle blocks by size.
type Idle = Arc<Mutex<BTreeMap<usize, Vec<Pinned<u8>>>>>;

/// Allocates blocks. It must outlive the work queued on the device, since copies of released blocks
/// may still run.
pub(crate) struct PinnedPool {
    idle: Idle,
    copy_engine: CopyEngine,
    /// Sizes to pre-lock. `None` before the first large request.
    ahead: Mutex<Option<Prelocker>>,
    work: Arc<Activity>,
}

/// Recent device activity.
struct Activity {
    begun: Instant,
    /// Milliseconds from `begun` to the last pass.
    last: AtomicU64,
    /// Whether the last pass was a long prefill.
    long: AtomicBool,
    /// Active pauses.
    held: AtomicUsize,
    stopping: AtomicBool,
}

impl Activity {
    /// Whether locking delays no decode step.
    fn may_lock(&self) -> bool {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.long.load(Ordering::Relaxed) || self.begun.elapsed().saturating_sub(last) >= IDLE_AFTER
    }
}

/// Pauses pre-locking until dropped.
pub(crate) struct PrelockPause(Arc<Activity>);

impl Drop for PrelockPause {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Prelocker {
    /// `None` while the pool is dropped, which ends the thread.
    sizes: Option<Sender<usize>>,
    thread: Option<JoinHandle<()>>,
}

/// A block of page-locked memory, contents undefined. It returns to its pool on drop.
///
/// Copies run on the main stream, or on a stream that the main stream waits for before the block
/// returns. A later owner's copies on the main stream are therefore ordered after them. Host access
/// needs a wait first.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    /// `None` only during drop.
    memory: Option<Pinned<u8>>,
    idle: Idle,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A list is consistent after each change.
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

    /// Records a pass of `rows` rows.
    pub(crate) fn note_pass(&self, rows: usize) {
        self.work
            .long
            .store(rows >= LONG_PREFILL_ROWS, Ordering::Relaxed);
        let now = self.work.begun.elapsed().as_millis();
        self.work
            .last
            .store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Pauses pre-locking until the result is dropped.
    pub(crate) fn pause_prelocking(&self) -> PrelockPause {
        self.work.held.fetch_add(1, Ordering::Relaxed);
        PrelockPause(Arc::clone(&self.work))
    }

    /// A block of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the system locks no more pages.
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

    /// Pre-locks blocks of `size` bytes on another thread. If the thread fails to start, requests
    /// lock them.
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
                        // A later request reports the error.
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
            // The channel is closed if the thread did not start.
            let _ = sizes.send(size);
        }
    }

    /// Frees idle blocks beyond `bytes` in total. All queued work must have finished.
    pub(crate) fn trim(&self, bytes: usize) {
        let mut idle = lock(&self.idle);
        let mut left = bytes;
        for (size, blocks) in idle.iter_mut() {
            let stay = (left / size.max(&1)).min(blocks.len());
            blocks.truncate(stay);
            left -= stay * size;
        }
    }

    /// Total size of idle blocks.
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
                // The panic has already been reported.
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

    /// The address for copies.
    pub(crate) fn address(&self) -> u64 {
        self.memory().device_ptr()
    }

    /// Size in bytes, at least the requested size.
    pub(crate) fn len(&self) -> usize {
        self.memory().len()
    }

    /// The bytes. Copies into the block must have finished.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.memory().as_slice()
    }

    /// The bytes, mutable. All copies of this and the last owner must have finished.
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
