//! A cached prefix, and what is known about it.

use std::sync::Arc;

use contract::SnapshotId;

/// A saved state.
#[derive(Debug, Clone)]
pub(crate) struct PrefixEntry {
    /// Freed by the cache when the entry goes.
    pub(crate) snapshot: SnapshotId,
    /// The use_counter of its last use.
    pub(crate) used: u64,
    /// Who has it.
    pub(crate) session: Option<Arc<str>>,
    /// Whether it stands behind the head of a prompt.
    pub(crate) head: bool,
    /// Whether a prompt went on from it.
    pub(crate) resumed: bool,
    /// Whether its conversation has come more than once: a prompt that went on from an earlier turn led to it.
    pub(crate) returned: bool,
    /// Whether it has been looked at for the store.
    pub(crate) offered_to_store: bool,
    /// Whether it was read ahead, and no prompt has used it.
    pub(crate) from_warmup: bool,
}

impl PrefixEntry {
    /// Whether a prompt has led to it. What was read ahead is but a guess, which makes no other state more or less dear.
    pub(crate) fn is_from_prompt(&self) -> bool {
        !self.from_warmup
    }
}

/// What is told of a state when it is saved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SaveInfo<'a> {
    /// Whether it stands behind the head of a prompt.
    pub(crate) head: bool,
    /// Who has it.
    pub(crate) session: Option<&'a Arc<str>>,
    /// Whether it is of a prompt that has not come yet.
    pub(crate) from_warmup: bool,
}

/// What came of a restore.
pub(crate) enum Restored {
    /// The sequence holds so many tokens of the prompt.
    At(usize),
    /// Nothing fitted, and the sequence is as it was.
    NotFound,
    /// The device refused in the middle, and nobody knows what the sequence holds: it must be closed.
    Broken,
}
