//! KV rows of snapshots, in pages that snapshots share.
//!
//! Committed rows never change. A page of one snapshot therefore serves later snapshots of the same
//! sequence and of sequences restored from it, and a conversation stores its rows once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::kv_shape::KvShape;

/// Positions of a page.
pub(crate) const PAGE: usize = 256;

/// Bytes of all snapshots; shared pages count once.
#[derive(Debug, Clone, Default)]
pub(crate) struct SnapshotBytes(Arc<AtomicU64>);

impl SnapshotBytes {
    /// Total bytes.
    pub(crate) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds bytes until the returned guard is dropped.
    pub(crate) fn enter(&self, bytes: usize) -> CountedBytes {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
        CountedBytes {
            bytes: bytes as u64,
            ledger: self.clone(),
        }
    }
}

/// Bytes counted in [`SnapshotBytes`] until dropped.
#[derive(Debug)]
pub(crate) struct CountedBytes {
    bytes: u64,
    ledger: SnapshotBytes,
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.ledger.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Stored rows of one attention layer at [`PAGE`] consecutive positions, fewer in the last page.
pub(crate) struct Page {
    /// `[n, n_kv_heads, row]`.
    pub(crate) keys: Box<[u8]>,
    /// `[n, n_kv_heads, row]`.
    pub(crate) values: Box<[u8]>,
    _held: CountedBytes,
}

impl Page {
    fn new(keys: &[u8], values: &[u8], ledger: &SnapshotBytes) -> Arc<Page> {
        Arc::new(Page {
            keys: keys.into(),
            values: values.into(),
            _held: ledger.enter(keys.len() + values.len()),
        })
    }
}

/// Pages of a cache that some snapshot already holds.
#[derive(Default)]
pub(crate) struct SavedPages(Vec<Weak<Page>>);

impl SavedPages {
    /// Positions before `n` that no snapshot holds.
    pub(crate) fn missing(&self, n: usize) -> usize {
        let there = self
            .0
            .iter()
            .take(n / PAGE)
            .filter(|page| page.strong_count() > 0);
        n - there.count() * PAGE
    }

    /// The first `n` positions of a cache: existing pages and copies of the rest.
    pub(crate) fn save(
        &mut self,
        (keys, values): (&[u8], &[u8]),
        shape: KvShape,
        n: usize,
        ledger: &SnapshotBytes,
    ) -> Vec<Arc<Page>> {
        let (k, v) = (shape.k_bytes(), shape.v_bytes());
        let whole = n / PAGE;
        if self.0.len() < whole {
            self.0.resize_with(whole, Weak::new);
        }
        let rows = |at: std::ops::Range<usize>| {
            let keys = &keys[at.start * k..at.end * k];
            Page::new(keys, &values[at.start * v..at.end * v], ledger)
        };
        let mut pages = Vec::with_capacity(n.div_ceil(PAGE));
        for (i, saved) in self.0.iter_mut().enumerate().take(whole) {
            let page = saved.upgrade().unwrap_or_else(|| {
                let page = rows(i * PAGE..(i + 1) * PAGE);
                *saved = Arc::downgrade(&page);
                page
            });
            pages.push(page);
        }
        if n > whole * PAGE {
            pages.push(rows(whole * PAGE..n));
        }
        pages
    }

    /// Records that a cache now holds exactly these pages.
    pub(crate) fn restored(&mut self, pages: &[Arc<Page>], n: usize) {
        self.0 = pages.iter().take(n / PAGE).map(Arc::downgrade).collect();
    }
}

/// Splits the rows of `n` positions into new pages.
pub(crate) fn cut(
    (keys, values): (&[u8], &[u8]),
    n: usize,
    shape: KvShape,
    ledger: &SnapshotBytes,
) -> Vec<Arc<Page>> {
    SavedPages::default().save((keys, values), shape, n, ledger)
}
