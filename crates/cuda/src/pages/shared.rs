//! The page pool behind its lock, shared by the runner and the exports under way.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::pool::PagePool;
use crate::pinned::PinnedBlock;

/// The pages of a runner, and the number of exports that still read them.
pub(crate) struct SharedPagePool {
    pages: Mutex<PagePool<PinnedBlock>>,
    exports: Mutex<usize>,
    pub(crate) export_ended: Condvar,
}

impl SharedPagePool {
    pub(crate) fn new(pages: PagePool<PinnedBlock>) -> SharedPagePool {
        SharedPagePool {
            pages: Mutex::new(pages),
            exports: Mutex::new(0),
            export_ended: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, PagePool<PinnedBlock>> {
        // No change of the pool panics half way, so a poisoned lock is consistent.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exports(&self) -> MutexGuard<'_, usize> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all exports have ended.
    pub(crate) fn wait_for_exports(&self) {
        let non_paged = self.export_ended.wait_while(self.exports(), |n| *n > 0);
        drop(non_paged);
    }
}
