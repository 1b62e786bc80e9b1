//! The device interface for a loaded model: a [`Runner`].
//!
//! [`CheckedRunner`](crate::checked::CheckedRunner) asserts the calling protocol in tests and debug
//! builds:
//!
//! - After `verify`, the next call on that sequence must be `commit`, `discard` or `close`.
//! - A sequence cannot be rewound. To reach an earlier position, call `restore` or prefill again.
//! - Calls that return data wait for the device; others may return early. The next call reports a
//!   late device fault, and every later call repeats it.
//! - Optional abilities are fields of [`RunnerInfo`], never methods that always fail.

use std::io::{Read, Write};

use crate::snapshot::{ReadAt, SequentialReader};
use crate::{
    CandidateLinks, DeviceError, DraftCandidates, DraftLogits, LogitsRequest, LogitsRow, MtpRow,
    RunnerInfo, SeqId, SnapshotId, TokenId, Tree, TreePath,
};

/// One loaded target model, with its draft model if there is one. All calls come from one
/// thread.
pub trait Runner {
    /// Limits and properties of the opened model.
    fn info(&self) -> &RunnerInfo;

    /// Free sequences and KV tokens.
    fn capacity(&self) -> Capacity;

    /// Opens a sequence at position 0 that may grow to `max_len` committed tokens.
    ///
    /// No KV pages are reserved for it. `prefill`, `verify` and `restore` return
    /// [`DeviceError::PoolExhausted`] if the pool lacks pages. They have then changed nothing,
    /// except that a failed `restore` may leave the sequence empty.
    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError>;

    /// Closes a sequence and drops its pending tree. Ignores an unknown id.
    fn close(&mut self, seq: SeqId);

    /// Appends `tokens` `[n]` to the committed tokens and returns one logits row per request.
    ///
    /// `requests` holds `(index into tokens, request)` in ascending order; rows have the same
    /// order.
    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError>;

    /// Drafts `depth` positions after each item's root, with `k <= vocab` candidates per list. The
    /// context is the committed tokens.
    ///
    /// A draft whose candidates depend on the token before may return fewer than `k`; its first
    /// list is given the root. A device may propose from the most frequent tokens only, if `k` is
    /// far below their number. Depths within the reach of a narrow pass
    /// ([`RunnerInfo::narrow_draft`]) are drafted by it.
    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError>;

    /// The draft's logits over the whole vocabulary behind an item's root, at full depth.
    ///
    /// The default suits drafts whose positions are independent. Devices that run other drafts
    /// replace it.
    fn draft_logits(&mut self, item: DraftItem) -> Result<DraftLogits, DeviceError> {
        let (vocab, depth) = (self.info().vocab, self.info().draft_depth.unwrap_or(0));
        let drafted = self.draft(&[item], depth, vocab)?.into_iter().next();
        let whole = |found: &DraftCandidates| {
            found.k == vocab && found.is_well_formed() && found.links == CandidateLinks::ByDepth
        };
        let Some(found) = drafted.filter(whole) else {
            return Err(DeviceError::InvalidCall {
                call: "draft_logits",
                detail: format!("the draft has no candidates for all of {vocab} tokens"),
            });
        };
        let mut logits = vec![f32::NEG_INFINITY; depth * vocab];
        let rows = found.ids.chunks(vocab).zip(found.log_probs.chunks(vocab));
        let rows = rows.zip(&found.lse).zip(logits.chunks_mut(vocab.max(1)));
        for (((ids, log_probs), lse), row) in rows {
            for (id, log_prob) in ids.iter().zip(log_probs) {
                row[id.index()] = log_prob + lse;
            }
        }
        Ok(DraftLogits {
            logits,
            chain: found.chain(),
        })
    }

    /// Drafts one row per item with the model's multi-token-prediction head
    /// ([`MtpSpec`](crate::MtpSpec)), with `k <= vocab` candidates for the token after it.
    ///
    /// Each entry of the result has one position. A sequence may occur several times, for rows of
    /// one depth or of several; a parent must be a row of an earlier call. The row of item `i` gets
    /// the next free [`MtpRow`] of its sequence, in the order of the items.
    ///
    /// A device may propose from the most frequent tokens only, if `k` is far below their number.
    ///
    /// A root row ([`MtpDraftItem::parent`] is `None`) drops the rows drafted before. The next
    /// `prefill`, `verify` or `restore` of the sequence drops all of them.
    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let detail = format!(
            "{} rows of {k} candidates, but the runner has no multi-token-prediction head",
            items.len()
        );
        Err(DeviceError::InvalidCall {
            call: "draft_mtp",
            detail,
        })
    }

    /// Evaluates a draft tree on each item's sequence without committing it; the tree becomes
    /// pending.
    ///
    /// Returns one row per node of each item, empty where the request selects nothing. A tree of
    /// one node is plain decoding; a tree without branches is chain speculation.
    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError>;

    /// Begins a [`Runner::verify`] and returns before it ends; [`Runner::finish_verify`] gives its
    /// rows. Only where [`RunnerInfo::begins_verify`] says so.
    ///
    /// At most two may have begun. Until theirs is finished, no call may name these sequences, and
    /// `prefill` and `verify` may not be called at all.
    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        Err(DeviceError::InvalidCall {
            call: "begin_verify",
            detail: format!("{} trees, but the runner verifies at once", items.len()),
        })
    }

    /// Ends the earliest verify that has begun, and returns what [`Runner::verify`] returns. After
    /// an error none of its trees is pending.
    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        Err(DeviceError::InvalidCall {
            call: "finish_verify",
            detail: "nothing has begun".to_owned(),
        })
    }

    /// Commits one path of each pending tree; the sequence advances by `path.len()`.
    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError>;

    /// Drops the pending tree of a sequence.
    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError>;

    /// Copies the committed state of a sequence.
    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError>;

    /// Replaces a sequence's state by a snapshot, bit-identical to the saved state.
    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError>;

    /// Frees a snapshot. Ignores an unknown id.
    fn free_snapshot(&mut self, snapshot: SnapshotId);

    /// Writes a snapshot in the device-neutral layout of [`crate::snapshot`].
    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError>;

    /// Exports through another thread, independent of the later life of the snapshot and its
    /// sequence.
    ///
    /// A device whose snapshot memory other threads can read returns at once; the default exports
    /// here.
    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        let mut bytes = Vec::new();
        self.export(snapshot, &mut bytes)?;
        Ok(Box::new(bytes))
    }

    /// Reads the bytes of `export`. Refuses another model, other formats and damaged bytes.
    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError>;

    /// Imports from a random-access source, so that a device can read several sections in parallel.
    fn import_at(&mut self, source: &dyn ReadAt) -> Result<SnapshotInfo, DeviceError> {
        self.import(&mut SequentialReader::new(source))
    }
}

/// An exported snapshot whose bytes may still be on the device. Dropping a runner waits for all of
/// them.
pub trait DetachedSnapshot: Send {
    /// Number of bytes that [`DetachedSnapshot::write`] writes.
    fn bytes(&self) -> u64;

    /// Writes the same bytes as [`Runner::export`].
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

/// Free capacity of a runner, and the memory that snapshots hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// Sequences that can still be opened.
    pub sequences: usize,
    /// Tokens that sequences can still grow by: positions of pages that no sequence holds.
    pub tokens: usize,
    /// Of these, positions of pages that snapshots hold. The runner moves them elsewhere on demand.
    pub evictable_tokens: usize,
    /// Bytes of all snapshots; shared pages count once.
    pub snapshot_bytes: u64,
}

/// One sequence of a draft call.
#[derive(Debug, Clone, Copy)]
pub struct DraftItem {
    /// The sequence, without a pending tree.
    pub seq: SeqId,
    /// The sampled token that is not in the KV cache yet.
    pub root: TokenId,
}

/// One row of a draft with the multi-token-prediction head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtpDraftItem {
    /// The sequence, without a pending tree.
    pub seq: SeqId,
    /// The row before: this row attends to the committed positions, to `parent` and to the
    /// ancestors of `parent`, and reads `y` of `parent`. `None` for the root row, which reads the
    /// hidden row of the last committed position.
    pub parent: Option<MtpRow>,
    /// The row's token. At the root row: the sampled token that is not in the KV cache yet.
    pub token: TokenId,
}

/// One sequence of a verify call.
#[derive(Debug, Clone, Copy)]
pub struct VerifyItem<'a> {
    /// The sequence, without a pending tree. It may occur once per call.
    pub seq: SeqId,
    /// The tree; its root is the sampled token that is not in the KV cache yet.
    pub tree: &'a Tree,
    /// One request per node, `[n_nodes]`.
    pub requests: &'a [LogitsRequest],
}

/// One sequence of a commit call.
#[derive(Debug, Clone, Copy)]
pub struct CommitItem<'a> {
    /// The sequence, with a pending tree.
    pub seq: SeqId,
    /// A path of the pending tree.
    pub path: &'a TreePath,
}

/// Memory that holds a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotLocation {
    /// Device memory: fast to restore.
    Device,
    /// Host memory: cheap to keep.
    Host,
}

/// A created or imported snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its id.
    pub id: SnapshotId,
    /// Committed tokens after a restore.
    pub position: usize,
    /// Bytes it holds.
    pub bytes: u64,
}
