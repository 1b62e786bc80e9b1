//! What keeps saved states beyond the process, as far as the algorithm is concerned.
//!
//! This crate knows no files, so whoever owns the scheduler brings a [`Store`]. It is asked before a prompt is
//! read, and given the bytes of states class keeping when there is nothing else to do.

use contract::snapshot::ReadAt;
use contract::{DetachedSnapshot, TokenId};

/// Keeps exported snapshots by their tokens. Nothing it does may fail: what cannot be kept or found is missing.
pub trait Store {
    /// The longest beginning of `prompt` that is kept, of more than `more_than` and at most `at_most` tokens.
    fn find(&mut self, prompt: &[TokenId], more_than: usize, at_most: usize) -> Option<StoreHit>;

    /// How many tokens of `tokens` the longest kept beginning covers.
    fn covered(&mut self, tokens: &[TokenId]) -> usize;

    /// Keeps an exported snapshot of `tokens`. Called on the device's thread, so it must wait neither for a disk nor
    /// for the parcel's bytes.
    fn put(&mut self, tokens: &[TokenId], parcel: Box<dyn DetachedSnapshot>);

    /// The process ends: `by_use` are the states class keeping, the one used last first, whether they are kept already or
    /// come now. None may push out one that was used after it; and [`Store::put`] may wait for a disk.
    fn begin_shutdown(&mut self, _by_use: &[Vec<TokenId>]) {}

    /// Forgets what [`Store::find`] gave for these tokens, because the device did not take it.
    fn forget(&mut self, tokens: &[TokenId]);
}

/// A kept state.
pub struct StoreHit {
    /// How many tokens of the prompt it covers.
    pub position: usize,
    /// Its bytes, as they were exported.
    pub source: Box<dyn ReadAt>,
}
