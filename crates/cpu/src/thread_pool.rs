//! The threads of one forward pass.
//!
//! Kept by hand instead of `rayon`: a pass has a few hundred parallel regions of microseconds, and
//! waking sleeping threads for each costs more than the region. [`ThreadPool::enter`] keeps the
//! workers spinning during a pass and briefly after it.
//!
//! A region is split into items that threads claim dynamically. An item's result depends on the
//! item alone, so the number of threads cannot change a bit.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, TryLockError};

use crate::workers::Workers;

/// Spins before the thread yields the processor.
const SPIN_LIMIT: u32 = 1 << 10;

/// The calling thread and its workers.
pub struct ThreadPool {
    workers: Workers,
}

impl ThreadPool {
    /// A pool of `threads` threads including the caller; at least one.
    ///
    /// Uses fewer threads if the system refuses to start some.
    pub fn new(threads: usize) -> ThreadPool {
        ThreadPool {
            workers: Workers::new(threads.saturating_sub(1)),
        }
    }

    /// Number of threads including the caller.
    pub fn threads(&self) -> usize {
        1 + self.workers.worker_count()
    }

    /// Runs `pass` with the workers awake, so that regions start within a microsecond.
    pub fn enter<R>(&self, pass: impl FnOnce() -> R) -> R {
        let _awake = self.workers.wake();
        pass()
    }

    /// Calls `work(i)` for each `i < n`, in any order and on any thread; returns when all are done.
    ///
    /// Each thread has a contiguous share of the indices and then helps with the others' shares,
    /// so that threads read weights in long runs and still end together.
    pub fn for_each(&self, n: usize, work: impl Fn(usize) + Sync) {
        let threads = self.threads();
        let share = |thread: usize| ThreadShare {
            next: AtomicUsize::new(n * thread / threads),
            end: n * (thread + 1) / threads,
        };
        let shares: Vec<ThreadShare> = (0..threads).map(share).collect();
        let joined = AtomicUsize::new(0);
        self.on_all(n, &|| {
            let own = joined.fetch_add(1, Ordering::Relaxed);
            for other in 0..threads {
                let share = &shares[(own + other) % threads];
                loop {
                    let i = share.next.fetch_add(1, Ordering::Relaxed);
                    if i >= share.end {
                        break;
                    }
                    work(i);
                }
            }
        });
    }

    /// Calls `work` for each item, such as disjoint parts of a buffer with their index.
    ///
    /// A lock hands out items and is waited for by spinning, so an item should take at least a
    /// microsecond.
    pub fn for_each_item<T: Send>(
        &self,
        items: impl ExactSizeIterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) {
        let n = items.len();
        let items = Mutex::new(items);
        self.on_all(n, &|| {
            while let Some(item) = next(&items) {
                work(item);
            }
        });
    }

    /// Runs `work` on the caller and the workers; one of them may claim all `n` items before others
    /// begin.
    fn on_all(&self, n: usize, work: &(dyn Fn() + Sync)) {
        if n < 2 {
            return work();
        }
        let _awake = self.workers.wake();
        self.workers.region(work);
    }
}

/// Indices that one thread claims first. A cache line of its own, since its owner writes it for
/// each item.
#[repr(align(64))]
struct ThreadShare {
    /// The next index to be claimed; beyond `end` when all are.
    next: AtomicUsize,
    end: usize,
}

/// The next item. Spins, because the lock is held only briefly.
fn next<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    let mut turns = 0_u32;
    loop {
        match items.try_lock() {
            Ok(mut items) => return items.next(),
            // The iterator stays usable after a panic in another thread's work.
            Err(TryLockError::Poisoned(items)) => return items.into_inner().next(),
            Err(TryLockError::WouldBlock) => {
                turns = turns.wrapping_add(1);
                if turns.is_multiple_of(SPIN_LIMIT) {
                    std::thread::yield_now();
                } else {
                    spin_loop();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_visited_once_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads);
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
    fn items_are_processed_once() {
        let pool = ThreadPool::new(3);
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
    fn nested_regions_run_completely() {
        let pool = ThreadPool::new(3);
        let sum = AtomicUsize::new(0);
        pool.for_each(8, |_| {
            pool.for_each(8, |i| {
                sum.fetch_add(i, Ordering::SeqCst);
            });
        });
        assert_eq!(sum.into_inner(), 8 * 28);
    }

    #[test]
    fn sleeping_workers_are_woken_by_the_next_pass() {
        let pool = ThreadPool::new(2);
        for _ in 0..3 {
            // Two items that wait for each other need two threads.
            let met = AtomicUsize::new(0);
            pool.for_each(2, |_| {
                met.fetch_add(1, Ordering::SeqCst);
                while met.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
            });
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn panics_in_a_region_reach_the_caller_and_the_pool_stays_usable() {
        let pool = ThreadPool::new(2);
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
