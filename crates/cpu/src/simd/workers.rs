//! Threads that help with borrowed work.
//!
//! A region lends a closure to threads that outlive it, which no safe interface of the standard library
//! allows without starting threads anew. The rule that makes it sound: a helper announces itself before it
//! looks for work, and the owner takes the work away and then waits until nobody is active.

use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long helpers spin after a pass, so that the next token of a reply finds them awake.
const SPIN_TIMEOUT: Duration = Duration::from_micros(500);

/// Who has spun this many turns in vain gives the processor away: it may be the one needed.
const SPIN_LIMIT: u32 = 1 << 12;

/// Helper threads; dropped, they end.
pub struct Workers {
    /// Joined when the crew is dropped.
    threads: Vec<JoinHandle<()>>,
    shared: Arc<PoolState>,
}

#[derive(Default)]
struct PoolState {
    /// The region's work, or null between regions.
    work: AtomicPtr<RegionTask<'static>>,
    /// Counts regions, so that a helper joins each once.
    region: AtomicUsize,
    /// Helpers that hold, or are about to look at, `work`.
    active: AtomicUsize,
    /// A region is under way; regions inside regions are run by their caller alone.
    busy: AtomicBool,
    /// Passes under way: helpers spin while there is one.
    passes: AtomicUsize,
    ending: AtomicBool,
    /// What a helper's panic carried, for the region's owner.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A region's closure, on its owner's stack.
struct RegionTask<'a> {
    run: &'a (dyn Fn() + Sync),
}

impl Workers {
    /// Starts `helpers` threads, or as many as the system allows.
    pub fn new(worker_count: usize) -> Workers {
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

    /// Helpers that were started.
    pub fn worker_count(&self) -> usize {
        self.threads.len()
    }

    /// Keeps the helpers awake until the returned value is dropped.
    pub fn wake(&self) -> AwakeGuard<'_> {
        if self.shared.passes.fetch_add(1, SeqCst) == 0 {
            for thread in &self.threads {
                thread.thread().unpark();
            }
        }
        AwakeGuard(&self.shared)
    }

    /// Calls `run` on this thread and on whichever helpers are awake in time; returns when all are done.
    ///
    /// A panic on any of them is passed on.
    pub fn region(&self, run: &(dyn Fn() + Sync)) {
        if self.threads.is_empty() || self.shared.busy.swap(true, SeqCst) {
            return run();
        }
        // What a helper threw in a region whose owner threw too is nobody's any more.
        self.shared.take_panic();
        let work = RegionTask { run };
        {
            let _guard = RegionGuard(&self.shared);
            self.shared.region.fetch_add(1, SeqCst);
            let lent: *const RegionTask<'_> = &work;
            self.shared.work.store(lent.cast_mut().cast(), SeqCst);
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
            // A helper catches the panics of its work, so there is nothing to learn from its end.
            let _ended = thread.join();
        }
    }
}

/// Helpers stay awake while one of these exists.
pub struct AwakeGuard<'a>(&'a PoolState);

impl Drop for AwakeGuard<'_> {
    fn drop(&mut self) {
        self.0.passes.fetch_sub(1, SeqCst);
    }
}

/// Takes the work back when the region ends, also by a panic.
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

    /// The life of a helper.
    fn run_worker(&self) {
        let mut last_region = 0;
        // The clock is read between passes only: while one runs, a region may begin at any moment.
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
                // An unpark between the look at `passes` and here makes this return at once.
                std::thread::park();
                idle_since = None;
            }
        }
    }

    /// Takes part in the region under way, if it still is.
    fn join(&self) {
        self.active.fetch_add(1, SeqCst);
        let work = self.work.load(SeqCst);
        if !work.is_null() {
            // SAFETY: the pointer was seen after this helper was active, so the owner, which first clears
            // the pointer and then waits for all active helpers, is still inside `region` and keeps the
            // closure alive until the count below is taken back. The closure is `Sync`.
            let run = unsafe { (*work).run };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(run)) {
                let mut panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                *panic = Some(payload);
            }
        }
        self.active.fetch_sub(1, SeqCst);
    }
}
