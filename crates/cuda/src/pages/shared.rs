//! The page pool behind its lock, shared by the runner and the exports under way.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::pool::PagePool;
use crate::pinned::PinnedBlock;

/// The pages of a runner, and how many parcels still read them.
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
        // Every change of the page_pool is whole before anything in it can panic.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exports(&self) -> MutexGuard<'_, usize> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no parcel is non_paged.
    pub(crate) fn wait_for_exports(&self) {
        let non_paged = self.export_ended.wait_while(self.exports(), |n| *n > 0);
        drop(non_paged);
    }
}
