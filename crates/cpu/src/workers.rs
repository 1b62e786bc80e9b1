//! Worker threads that run borrowed closures.
//!
//! A region lends a closure to threads that outlive it, which the standard library cannot do
//! without starting threads. Soundness: a worker registers as active before it reads the closure's
//! pointer; the owner clears the pointer and then waits until no worker is active.

use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time that workers spin after a pass, so that the next decode step finds them awake.
const SPIN_TIMEOUT: Duration = Duration::from_micros(500);

/// Spins before the worker yields the processor.
const SPIN_LIMIT: u32 = 1 << 12;

/// Worker threads. Dropping this ends them.
pub(crate) struct Workers {
    /// Joined on drop.
    threads: Vec<JoinHandle<()>>,
    shared: Arc<PoolState>,
}

#[derive(Default)]
struct PoolState {
    /// The region's closure, or null between regions.
    work: AtomicPtr<RegionTask<'static>>,
    /// Number of regions, so that a worker joins each once.
    region: AtomicUsize,
    /// Workers that hold or are about to read `work`.
    active: AtomicUsize,
    /// Whether a region is running; nested regions run on their caller alone.
    busy: AtomicBool,
    /// Running passes; workers spin while there is one.
    passes: AtomicUsize,
    ending: AtomicBool,
    /// Panic payload of a worker, for the region's owner.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A region's closure, on the owner's stack.
struct RegionTask<'a> {
    run: &'a (dyn Fn() + Sync),
}

impl Workers {
    /// Starts `helpers` threads, or as many as the system allows.
    pub(crate) fn new(worker_count: usize) -> Workers {
        let shared = Arc::<PoolState>::default();
        let start = |index| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("cpu-{index}"))
                .spawn(move || shared.run_worker())
                .ok()
        };
        let threads = (1..=worker_count).map_while(start).collect();
        Workers { threads, shared }
    }

    /// Number of started workers.
    pub(crate) fn worker_count(&self) -> usize {
        self.threads.len()
    }

    /// Keeps the workers awake until the returned guard is dropped.
    pub(crate) fn wake(&self) -> AwakeGuard<'_> {
        if self.shared.passes.fetch_add(1, SeqCst) == 0 {
            for thread in &self.threads {
                thread.thread().unpark();
            }
        }
        AwakeGuard(&self.shared)
    }

    /// Calls `run` on this thread and on the awake workers; returns when all are done.
    ///
    /// Resumes a panic of any of them.
    pub(crate) fn region(&self, run: &(dyn Fn() + Sync)) {
        if self.threads.is_empty() || self.shared.busy.swap(true, SeqCst) {
            return run();
        }
        // Drop the payload of an earlier region whose owner panicked too.
        self.shared.take_panic();
        let work = RegionTask { run };
        {
            let _guard = RegionGuard(&self.shared);
            self.shared.region.fetch_add(1, SeqCst);
            let borrowed: *const RegionTask<'_> = &work;
            self.shared.work.store(borrowed.cast_mut().cast(), SeqCst);
            run();
        }
        if let Some(payload) = self.shared.take_panic() {
            resume_unwind(payload);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.ending.store(true, SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // Workers catch the panics of their work, so the result carries no information.
            let _ended = thread.join();
        }
    }
}

/// Workers stay awake while this guard exists.
pub(crate) struct AwakeGuard<'a>(&'a PoolState);

impl Drop for AwakeGuard<'_> {
    fn drop(&mut self) {
        self.0.passes.fetch_sub(1, SeqCst);
    }
}

/// Revokes the closure when the region ends or unwinds.
struct RegionGuard<'a>(&'a PoolState);

impl Drop for RegionGuard<'_> {
    fn drop(&mut self) {
        self.0.work.store(null_mut(), SeqCst);
        let mut turns = 0;
        while self.0.active.load(SeqCst) != 0 {
            turns += 1;
            pause(turns);
        }
        self.0.busy.store(false, SeqCst);
    }
}

fn pause(turns: u32) {
    if turns.is_multiple_of(SPIN_LIMIT) {
        std::thread::yield_now();
    } else {
        spin_loop();
    }
}

impl PoolState {
    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        let mut panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        panic.take()
    }

    /// Main loop of a worker.
    fn run_worker(&self) {
        let mut last_region = 0;
        // The clock is read between passes only: during one, a region may begin at any moment.
        let mut idle_since = None;
        let mut turns = 0_u32;
        while !self.ending.load(SeqCst) {
            let region = self.region.load(SeqCst);
            if region != last_region && !self.work.load(SeqCst).is_null() {
                last_region = region;
                self.join();
                turns = 0;
            } else if self.passes.load(SeqCst) > 0 {
                turns = turns.wrapping_add(1);
                pause(turns);
                idle_since = None;
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() < SPIN_TIMEOUT {
                spin_loop();
            } else {
                // An unpark after `passes` was read makes this return at once.
                std::thread::park();
                idle_since = None;
            }
        }
    }

    /// Joins the running region, if there is one.
    fn join(&self) {
        self.active.fetch_add(1, SeqCst);
        let work = self.work.load(SeqCst);
        if !work.is_null() {
            // SAFETY: this worker was active before it read the pointer. The owner clears the
            // pointer and then waits for all active workers, so it is still inside `region` and
            // keeps the closure alive until the count below is decremented. The closure is `Sync`.
            let run = unsafe { (*work).run };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(run)) {
                let mut panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                *panic = Some(payload);
            }
        }
        self.active.fetch_sub(1, SeqCst);
    }
}
