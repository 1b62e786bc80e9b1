//! A cached prefix, and what is known about it.

use std::sync::Arc;

use contract::SnapshotId;

/// A cached prefix.
#[derive(Debug, Clone)]
pub(crate) struct PrefixEntry {
    /// Freed by the cache when the entry is removed.
    pub(crate) snapshot: SnapshotId,
    /// Logical time of the last use.
    pub(crate) used: u64,
    /// The session that used it last.
    pub(crate) session: Option<Arc<str>>,
    /// Whether it ends the system prefix (system text and tools).
    pub(crate) system_prefix: bool,
    /// Whether a prompt resumed from it: a cache hit.
    pub(crate) hit: bool,
    /// Whether its conversation has several turns: the prompt that led to it resumed from an
    /// earlier turn.
    pub(crate) multi_turn: bool,
    /// Whether it was examined for the store.
    pub(crate) offered_to_store: bool,
    /// Whether warm-up saved it and no prompt has used it.
    pub(crate) from_warmup: bool,
}

impl PrefixEntry {
    /// Whether a prompt led to it. Warm-up entries are guesses and do not change the class of
    /// others.
    pub(crate) fn is_from_prompt(&self) -> bool {
        !self.from_warmup
    }
}

/// What the caller of a save knows about the entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SaveInfo<'a> {
    /// Whether it ends the system prefix.
    pub(crate) system_prefix: bool,
    /// The session of the prompt.
    pub(crate) session: Option<&'a Arc<str>>,
    /// Whether warm-up saves it.
    pub(crate) from_warmup: bool,
}

/// The result of a restore.
pub(crate) enum Restored {
    /// The sequence holds this many tokens of the prompt.
    At(usize),
    /// No entry fits; the sequence is unchanged.
    NotFound,
    /// The device failed midway. The sequence's content is unknown, so it must be closed.
    Broken,
}
