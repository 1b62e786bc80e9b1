//! The seam: one [`Backend`] per kind of device, one [`Runner`] per loaded set.
//!
//! The calling protocol, asserted by [`Checked`](crate::checked::Checked) in tests and debug builds:
//!
//! - After `verify`, exactly one of `commit` or `discard` must come before any other call on that sequence
//!   except `close`.
//! - There is no rewind. An earlier position is reached by `restore`, or by feeding again.
//! - Calls that return data wait for the device; others may return early. A late fault is reported by the
//!   next call and is sticky.
//! - Optional ability is a field of [`RunnerInfo`], never a method that says no.

use std::io::{Read, Write};

use crate::snapshot::{ReadAt, SequentialReader};
use crate::{
    DeviceError, DeviceInfo, LoadProgress, LogitsRequest, LogitsRow, MemoryPlan, OpenPlan,
    RunnerInfo, SeqId, SnapshotId, TokenId, Tree, TreePath,
};

/// A kind of device, before anything is loaded on it.
pub trait Backend {
    /// What the device is and how much memory it has free.
    fn probe(&self) -> Result<DeviceInfo, DeviceError>;

    /// What opening `plan` would take. Refuses what the device cannot run, by name.
    fn estimate(&self, plan: &OpenPlan) -> Result<MemoryPlan, DeviceError>;

    /// Loads the plan. Must be called on the thread that will own the runner.
    fn open(
        &self,
        plan: OpenPlan,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError>;
}

/// One loaded target, with its draft if the plan has one. All calls come from one thread.
pub trait Runner {
    /// What was opened.
    fn info(&self) -> &RunnerInfo;

    /// What is still free.
    fn capacity(&self) -> Capacity;

    /// A new sequence at position 0 that may grow to `max_len` committed tokens, as far as the pool has pages when it
    /// does: nothing is set aside for it. `prefill`, `verify` and `restore` answer [`DeviceError::OutOfMemory`] of [`PAGES`]
    /// where it has none, and have changed nothing then, but that a sequence being restored may be left empty.
    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError>;

    /// Ends a sequence and drops anything pending on it. Never fails; an unknown id is ignored.
    fn close(&mut self, seq: SeqId);

    /// Commits `tokens` `[n]` after what is committed, and gives a row for each ask.
    ///
    /// `asks` holds `(index into tokens, ask)` in rising order; rows come in the same order.
    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError>;

    /// Drafts `depth` positions after each item's root, with `k` candidates a position. The context is what is
    /// committed. `k` may be anything up to the vocabulary; the whole of it is asked for by people who check.
    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError>;

    /// Runs a tree on each item's sequence without committing anything; the sequence becomes pending.
    ///
    /// Gives, per item, one row per node (an empty one where nothing was asked).
    /// A tree of one node is ordinary decoding; a chain is chain verify.
    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError>;

    /// Keeps the path of each pending sequence: it advances by `path.len()`.
    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError>;

    /// Forgets what is pending on a sequence.
    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError>;

    /// Copies the committed state of a sequence.
    fn snapshot(
        &mut self,
        seq: SeqId,
        place: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError>;

    /// Puts a sequence, whatever it held, into a snapshot's state. Bit for bit what was saved.
    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError>;

    /// Frees a snapshot. An unknown id is ignored.
    fn free_snapshot(&mut self, snapshot: SnapshotId);

    /// Writes a snapshot in the device-neutral layout of [`crate::snapshot`].
    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError>;

    /// The same for another thread to write, whatever becomes of the snapshot and its sequence meanwhile.
    ///
    /// A device whose snapshots can be read from elsewhere gives a [`DetachedSnapshot`] at once; others export it here.
    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        let mut bytes = Vec::new();
        self.export(snapshot, &mut bytes)?;
        Ok(Box::new(bytes))
    }

    /// Reads what `export` wrote; refuses another model, other formats, and damaged bytes.
    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError>;

    /// The same of bytes that may be read at any place: a device may bring several sections in at once.
    fn import_at(&mut self, source: &dyn ReadAt) -> Result<SnapshotInfo, DeviceError> {
        self.import(&mut SequentialReader::new(source))
    }
}

/// An exported snapshot that may not have left its device yet. A runner waits at its end until every parcel is gone.
pub trait DetachedSnapshot: Send {
    /// Bytes that [`DetachedSnapshot::write`] writes.
    fn bytes(&self) -> u64;

    /// Writes what [`Runner::export`] would have.
    fn write(&mut self, sink: &mut dyn Write) -> Result<(), DeviceError>;
}

impl DetachedSnapshot for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn write(&mut self, sink: &mut dyn Write) -> Result<(), DeviceError> {
        Ok(sink.write_all(self)?)
    }
}

/// What a runner has left, and what is kept on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences that can still be opened.
    pub sequences: usize,
    /// Tokens that sequences can still grow by: positions of pages that none of them holds.
    pub tokens: usize,
    /// Of these, positions of pages that snapshots hold, which move elsewhere when a sequence needs their place.
    pub evictable_tokens: usize,
    /// Bytes that all snapshots hold together; what several of them share is counted once.
    pub snapshot_bytes: u64,
}

/// One sequence of a draft call.
#[derive(Debug, Clone, Copy)]
pub struct DraftItem {
    /// The sequence; it must have nothing pending.
    pub seq: SeqId,
    /// The token sampled but not yet cached.
    pub root: TokenId,
}

/// Draft candidates of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftCandidates {
    /// `[depth, k]`, best first in each position.
    pub ids: Vec<TokenId>,
    /// Log-probabilities over the whole vocabulary, as `ids`.
    pub log_probs: Vec<f32>,
    /// `[depth]`: log-sum-exp of each position's logits; added to a log-probability it gives the logit.
    pub lse: Vec<f32>,
    /// DraftCandidates per position.
    pub k: usize,
}

/// One sequence of a verify call.
#[derive(Debug, Clone, Copy)]
pub struct VerifyItem<'a> {
    /// The sequence; it must have nothing pending. A sequence may stand in a call once.
    pub seq: SeqId,
    /// The tree, its root being the token sampled but not yet cached.
    pub tree: &'a Tree,
    /// `[n_nodes]`.
    pub requests: &'a [LogitsRequest],
}

/// One sequence of a commit call.
#[derive(Debug, Clone, Copy)]
pub struct CommitItem<'a> {
    /// The sequence; it must be pending.
    pub seq: SeqId,
    /// A path of the tree it is pending on.
    pub path: &'a TreePath,
}

/// Where a snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotLocation {
    /// In the device's own memory: fast to restore.
    Device,
    /// In host memory: cheap to keep.
    Host,
}

/// A snapshot that was made or imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its id.
    pub id: SnapshotId,
    /// The position it restores to: committed tokens.
    pub position: usize,
    /// Bytes it holds.
    pub bytes: u64,
}
