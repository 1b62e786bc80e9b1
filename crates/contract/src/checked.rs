//! A wrapper that enforces the calling protocol of [`Runner`].
//!
//! It tracks open sequences, positions and pending trees, and refuses an invalid call with
//! [`DeviceError::InvalidCall`] before the device sees it. All tests and debug builds use it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{Read, Write};

use crate::protocol::{CallValidator, SequenceState, invalid_call, push_mtp_row};
use crate::snapshot::ReadAt;
use crate::{
    CommitItem, DetachedSnapshot, DeviceError, DraftCandidates, DraftItem, DraftLogits,
    LogitsRequest, LogitsRow, MtpDraftItem, Runner, SeqId, SnapshotId, SnapshotInfo,
    SnapshotLocation, TokenId, Tree, VerifyItem,
};

/// A runner that checks every call.
pub struct CheckedRunner<R> {
    inner: R,
    sequences: BTreeMap<SeqId, Slot>,
    snapshots: HashMap<SnapshotId, usize>,
    /// The trees of calls that have begun, the earliest first.
    begun: VecDeque<Vec<(SeqId, Tree)>>,
}

struct Slot {
    position: usize,
    max_len: usize,
    pending: Option<Tree>,
    mtp_depths: Vec<usize>,
}

impl SequenceState for Slot {
    fn max_len(&self) -> usize {
        self.max_len
    }

    fn position(&self) -> usize {
        self.position
    }

    fn pending(&self) -> Option<&Tree> {
        self.pending.as_ref()
    }

    fn mtp_depths(&self) -> &[usize] {
        &self.mtp_depths
    }
}

impl<R: Runner> CheckedRunner<R> {
    /// Wraps a runner that has nothing open yet.
    pub fn new(inner: R) -> CheckedRunner<R> {
        CheckedRunner {
            inner,
            sequences: BTreeMap::new(),
            snapshots: HashMap::new(),
            begun: VecDeque::new(),
        }
    }

    /// Refuses a call on a sequence whose verify has begun.
    fn require_ended(&self, call: &'static str, seq: SeqId) -> Result<(), DeviceError> {
        let mut trees = self.begun.iter().flatten();
        match trees.find(|(begun, _)| *begun == seq) {
            Some(_) => Err(invalid_call(call, format!("the verify of {seq} has begun"))),
            None => Ok(()),
        }
    }

    /// Refuses a pass while a verify has begun.
    fn require_none_begun(&self, call: &'static str) -> Result<(), DeviceError> {
        match self.begun.len() {
            0 => Ok(()),
            n => Err(invalid_call(call, format!("{n} verify calls have begun"))),
        }
    }

    /// The wrapped runner, for tests.
    pub fn inner_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// Committed tokens of an open sequence.
    pub fn position(&self, seq: SeqId) -> Option<usize> {
        self.sequences.get(&seq).map(|slot| slot.position)
    }

    fn validator(&self) -> CallValidator<'_, Slot> {
        CallValidator {
            info: self.inner.info(),
            sequences: &self.sequences,
        }
    }
}

impl<R: Runner> Runner for CheckedRunner<R> {
    crate::forward_runner!(self => self.inner; info, capacity);

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        let seq = self.inner.open(max_len)?;
        let slot = Slot {
            position: 0,
            max_len,
            pending: None,
            mtp_depths: Vec::new(),
        };
        if self.sequences.insert(seq, slot).is_some() {
            return Err(invalid_call(
                "open",
                format!("the runner returned {seq} twice"),
            ));
        }
        Ok(seq)
    }

    fn close(&mut self, seq: SeqId) {
        self.sequences.remove(&seq);
        self.inner.close(seq);
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        const CALL: &str = "prefill";
        self.require_none_begun(CALL)?;
        self.validator().prefill(seq, tokens, requests)?;
        let chunk = self.inner.info().limits.prefill_chunk;
        if tokens.is_empty() || tokens.len() > chunk {
            let detail = format!("{} tokens, 1 to {chunk} allowed", tokens.len());
            return Err(invalid_call(CALL, detail));
        }
        let rows = self.inner.prefill(seq, tokens, requests)?;
        if rows.len() != requests.len() {
            return Err(invalid_call(
                CALL,
                format!("{} rows for {} requests", rows.len(), requests.len()),
            ));
        }
        if let Some(slot) = self.sequences.get_mut(&seq) {
            slot.position += tokens.len();
            slot.mtp_depths.clear();
        }
        Ok(rows)
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.validator().draft(items, depth, k)?;
        let drafted = self.inner.draft(items, depth, k)?;
        let fits = |found: &DraftCandidates| found.k <= k && found.is_well_formed();
        if drafted.len() != items.len() || !drafted.iter().all(fits) {
            let detail = format!(
                "{} results for {} items, or one whose lists do not fit together",
                drafted.len(),
                items.len()
            );
            return Err(invalid_call("draft", detail));
        }
        Ok(drafted)
    }

    fn draft_logits(&mut self, item: DraftItem) -> Result<DraftLogits, DeviceError> {
        let depth = self.inner.info().draft_depth.unwrap_or(0);
        self.validator().draft(&[item], depth, 1)?;
        self.inner.draft_logits(item)
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        const CALL: &str = "draft_mtp";
        self.validator().draft_mtp(items, k)?;
        let rows = self.inner.draft_mtp(items, k)?;
        let complete = |row: &DraftCandidates| {
            (row.k, row.ids.len(), row.log_probs.len(), row.lse.len()) == (k, k, k, 1)
        };
        if rows.len() != items.len() || !rows.iter().all(complete) {
            let detail = format!(
                "{} rows for {} items, or a row without its {k} candidates",
                rows.len(),
                items.len()
            );
            return Err(invalid_call(CALL, detail));
        }
        for item in items {
            if let Some(slot) = self.sequences.get_mut(&item.seq) {
                push_mtp_row(&mut slot.mtp_depths, item.parent);
            }
        }
        Ok(rows)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.require_none_begun("verify")?;
        self.validator().verify(items)?;
        let rows = self.inner.verify(items)?;
        for item in items {
            if let Some(slot) = self.sequences.get_mut(&item.seq) {
                slot.pending = Some(item.tree.clone());
                slot.mtp_depths.clear();
            }
        }
        Ok(rows)
    }

    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        const CALL: &str = "begin_verify";
        self.validator().verify(items)?;
        if !self.inner.info().begins_verify || self.begun.len() > 1 {
            let detail = format!("{} calls have begun, or none may", self.begun.len());
            return Err(invalid_call(CALL, detail));
        }
        self.inner.begin_verify(items)?;
        let trees = items.iter().map(|item| (item.seq, item.tree.clone()));
        self.begun.push_back(trees.collect());
        for item in items {
            if let Some(slot) = self.sequences.get_mut(&item.seq) {
                slot.pending = Some(item.tree.clone());
                slot.mtp_depths.clear();
            }
        }
        Ok(())
    }

    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let Some(trees) = self.begun.pop_front() else {
            return Err(invalid_call(
                "finish_verify",
                "nothing has begun".to_owned(),
            ));
        };
        let rows = self.inner.finish_verify();
        if rows.is_err() {
            for (seq, _) in &trees {
                if let Some(slot) = self.sequences.get_mut(seq) {
                    slot.pending = None;
                }
            }
        }
        rows
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        items
            .iter()
            .try_for_each(|item| self.require_ended("commit", item.seq))?;
        self.validator().commit(items)?;
        self.inner.commit(items)?;
        for item in items {
            if let Some(slot) = self.sequences.get_mut(&item.seq) {
                slot.pending = None;
                slot.position += item.path.len();
            }
        }
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.require_ended("discard", seq)?;
        self.validator().discard(seq)?;
        if let Some(slot) = self.sequences.get_mut(&seq) {
            slot.pending = None;
        }
        self.inner.discard(seq)
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        let position = self.validator().require_idle("snapshot", seq)?.position;
        let info = self.inner.snapshot(seq, location)?;
        if info.position != position {
            let found = info.position;
            return Err(invalid_call(
                "snapshot",
                format!("position {found}, {position} expected"),
            ));
        }
        self.snapshots.insert(info.id, position);
        Ok(info)
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        let position = *self
            .snapshots
            .get(&snapshot)
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        self.validator().restore(seq, position)?;
        self.inner.restore(seq, snapshot)?;
        if let Some(slot) = self.sequences.get_mut(&seq) {
            slot.position = position;
            slot.mtp_depths.clear();
        }
        Ok(())
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshots.remove(&snapshot);
        self.inner.free_snapshot(snapshot);
    }

    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        if !self.snapshots.contains_key(&snapshot) {
            return Err(DeviceError::UnknownSnapshot(snapshot));
        }
        self.inner.detach(snapshot)
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        if !self.snapshots.contains_key(&snapshot) {
            return Err(DeviceError::UnknownSnapshot(snapshot));
        }
        self.inner.export(snapshot, sink)
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let info = self.inner.import(source)?;
        self.snapshots.insert(info.id, info.position);
        Ok(info)
    }

    fn import_at(&mut self, source: &dyn ReadAt) -> Result<SnapshotInfo, DeviceError> {
        let info = self.inner.import_at(source)?;
        self.snapshots.insert(info.id, info.position);
        Ok(info)
    }
}
