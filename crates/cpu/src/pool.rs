//! Threads that share the work of one forward pass.
//!
//! A pass has a few hundred short parallel regions, so waking a sleeping thread for each would cost more than
//! the region. [`Pool::enter`] therefore keeps the workers spinning while a pass runs, and for a moment after
//! it; between passes they sleep.
//!
//! Work is cut into items and an item is computed by whichever thread claims it. Every item's result depends
//! on the item alone, so neither the number of threads nor their luck can change a bit of any result.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long workers spin after a pass, so that the next token of a reply finds them awake.
const LINGER: Duration = Duration::from_micros(500);

/// A caller that has waited this many turns for a worker gives its processor away: it may be the one needed.
const PATIENCE: u32 = 1 << 12;

/// The calling thread and its helpers.
pub struct Pool {
    /// `threads - 1` helpers, joined when the pool is dropped; `None` when the caller works alone.
    helpers: Option<rayon::ThreadPool>,
    threads: usize,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// A pass is running.
    running: AtomicBool,
    /// Helpers that spin.
    awake: AtomicUsize,
}

impl Pool {
    /// A pool of `threads` threads, the caller's included; at least one.
    ///
    /// Threads that the system refuses to start are done without.
    pub fn new(threads: usize) -> Pool {
        let helpers = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads - 1)
                    .thread_name(|i| format!("cpu-{}", i + 1))
                    .build()
                    .ok()
            })
            .flatten();
        Pool {
            threads: helpers.as_ref().map_or(1, |_| threads),
            helpers,
            state: Arc::default(),
        }
    }

    /// Threads that work, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `pass` with the helpers kept awake, so that the regions inside start within a microsecond.
    pub fn enter<R>(&self, pass: impl FnOnce() -> R) -> R {
        let Some(helpers) = &self.helpers else {
            return pass();
        };
        let outermost = !self.state.running.swap(true, Ordering::SeqCst);
        if outermost {
            let wanted = self.threads - 1;
            while self.state.join_spinners(wanted) {
                let state = Arc::clone(&self.state);
                helpers.spawn(move || state.spin(wanted));
            }
        }
        let rest = Rest {
            state: &self.state,
            outermost,
        };
        let result = pass();
        drop(rest);
        result
    }

    /// Calls `work(i)` for each `i < n`, in any order and on any thread; returns when all are done.
    pub fn for_each(&self, n: usize, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        self.on_all(n, || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    break;
                }
                work(i);
            }
        });
    }

    /// Calls `work` for each item, such as the disjoint parts of a buffer with their numbers.
    ///
    /// Items are handed out under a lock: make them worth a few microseconds each.
    pub fn for_each_item<T: Send>(
        &self,
        items: impl ExactSizeIterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) {
        let n = items.len();
        let items = Mutex::new(items);
        self.on_all(n, || {
            while let Some(item) = {
                // The iterator of a region whose work panicked elsewhere is still sound to advance.
                let mut items = items.lock().unwrap_or_else(PoisonError::into_inner);
                items.next()
            } {
                work(item);
            }
        });
    }

    /// Runs `work` on the caller and on as many helpers as `n` items can use.
    ///
    /// `work` returns only when nothing is left to claim, so a helper that has not begun by then is not needed.
    fn on_all(&self, n: usize, work: impl Fn() + Sync) {
        let wanted = self.threads.min(n).saturating_sub(1);
        let Some(helpers) = self.helpers.as_ref().filter(|_| wanted > 0) else {
            return work();
        };
        let begun = AtomicUsize::new(0);
        let ended = AtomicUsize::new(0);
        let over = AtomicBool::new(false);
        helpers.in_place_scope(|scope| {
            for _ in 0..wanted {
                scope.spawn(|_| {
                    begun.fetch_add(1, Ordering::SeqCst);
                    let _ended = CountOnDrop(&ended);
                    if !over.load(Ordering::SeqCst) {
                        work();
                    }
                });
            }
            work();
            over.store(true, Ordering::SeqCst);
            // Spinning here spares the scope's own wait, which sleeps and needs a wake-up.
            let mut turns = 0;
            while ended.load(Ordering::SeqCst) < begun.load(Ordering::SeqCst) {
                turns += 1;
                if turns % PATIENCE == 0 {
                    std::thread::yield_now();
                } else {
                    spin_loop();
                }
            }
        });
    }
}

/// Counts a helper as ended, also when its work panics; the scope carries the panic to the caller.
struct CountOnDrop<'a>(&'a AtomicUsize);

impl Drop for CountOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Ends the pass when dropped, also when the pass panics.
struct Rest<'a> {
    state: &'a State,
    outermost: bool,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if self.outermost {
            self.state.running.store(false, Ordering::SeqCst);
        }
    }
}

impl State {
    /// Counts one more spinning helper unless all `wanted` spin already.
    fn join_spinners(&self, wanted: usize) -> bool {
        self.awake
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |awake| {
                (awake < wanted).then_some(awake + 1)
            })
            .is_ok()
    }

    /// Takes work of regions as it comes, until no pass has run for [`LINGER`].
    fn spin(&self, wanted: usize) {
        loop {
            let mut idle_since = None;
            while idle_since.is_none_or(|since: Instant| since.elapsed() < LINGER) {
                let worked = matches!(rayon::yield_now(), Some(rayon::Yield::Executed));
                if worked || self.running.load(Ordering::SeqCst) {
                    idle_since = None;
                } else if idle_since.is_none() {
                    idle_since = Some(Instant::now());
                }
                if !worked {
                    spin_loop();
                }
            }
            self.awake.fetch_sub(1, Ordering::SeqCst);
            // A pass that began between the last look and the line above counted this helper as awake.
            if !self.running.load(Ordering::SeqCst) || !self.join_spinners(wanted) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_is_visited_once_with_and_without_helpers() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for n in [0, 1, 2, 7, 1000] {
                let visits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                let region = || {
                    pool.for_each(n, |i| {
                        visits[i].fetch_add(1, Ordering::SeqCst);
                    });
                };
                region();
                pool.enter(|| pool.enter(region));
                assert!(visits.iter().all(|v| v.load(Ordering::SeqCst) == 2));
            }
        }
    }

    #[test]
    fn items_are_handed_out_once() {
        let pool = Pool::new(3);
        let mut cells = vec![0_usize; 999];
        for _ in 0..50 {
            pool.enter(|| {
                pool.for_each_item(cells.chunks_mut(2).enumerate(), |(i, pair)| {
                    pair.iter_mut().for_each(|cell| *cell += i);
                });
            });
        }
        assert!(
            cells
                .iter()
                .enumerate()
                .all(|(at, &cell)| cell == 50 * (at / 2))
        );
    }

    #[test]
    fn a_panic_inside_a_region_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = Pool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.enter(|| pool.for_each(64, |i| assert!(i != 40, "item 40")));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.enter(|| {
            pool.for_each(10, |i| {
                sum.fetch_add(i, Ordering::SeqCst);
            });
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
