//! The interface of a store that keeps prefixes beyond the process.
//!
//! This crate knows no files, so the scheduler's owner provides a [`Store`]. It is queried before a
//! prompt is prefilled, and given the entries worth keeping while the scheduler is idle.

use contract::snapshot::ReadAt;
use contract::{DetachedSnapshot, TokenId};

/// Keeps exported snapshots by their tokens. No method fails: what cannot be stored or found is
/// missing.
pub trait Store {
    /// The longest stored prefix of `prompt` with more than `more_than` and at most `at_most`
    /// tokens.
    fn find(&mut self, prompt: &[TokenId], more_than: usize, at_most: usize) -> Option<StoreHit>;

    /// Length of the longest stored prefix of `tokens`.
    fn longest_prefix_len(&mut self, tokens: &[TokenId]) -> usize;

    /// Stores an exported snapshot of `tokens`. Runs on the device's thread, so it must not wait
    /// for a disk or for the snapshot's bytes.
    fn put(&mut self, tokens: &[TokenId], detached: Box<dyn DetachedSnapshot>);

    /// The process ends. `by_use` lists the prefixes worth keeping, the most recently used first,
    /// stored or not. None may evict one that was used after it. [`Store::put`] may wait for a disk
    /// from here on.
    fn begin_shutdown(&mut self, _by_use: &[Vec<TokenId>]) {}

    /// Deletes the entry of these tokens, because the device rejected it.
    fn forget(&mut self, tokens: &[TokenId]);
}

/// A stored prefix.
pub struct StoreHit {
    /// Its length, in tokens of the prompt.
    pub position: usize,
    /// Its bytes, as exported.
    pub source: Box<dyn ReadAt>,
}
