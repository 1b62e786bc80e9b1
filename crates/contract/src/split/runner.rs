//! The stages of a model as one [`Runner`].

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::Range;

use super::sections::{JoinedSnapshot, StageSections};
use super::stage::Stage;
use crate::snapshot::ReadAt;
use crate::{
    Capacity, CommitItem, DetachedSnapshot, DeviceError, DraftCandidates, DraftItem, DraftLogits,
    LogitsRequest, LogitsRow, MtpDraftItem, Runner, RunnerInfo, SeqId, SnapshotId, SnapshotInfo,
    SnapshotLocation, TokenId, VerifyItem,
};

/// Stages that run a model together, behind a
/// [`CheckedRunner`](crate::checked::CheckedRunner). Dropping it drops all stages.
pub(super) struct SplitRunner {
    info: RunnerInfo,
    /// Bottom to top; at least one.
    stages: Vec<Box<dyn Stage>>,
    /// The layers of each stage, counted over the whole model.
    layers: Vec<Range<usize>>,
    /// Sections of a snapshot of the whole model.
    sections: u32,
    sequences: BTreeMap<SeqId, SplitSequence>,
    snapshots: BTreeMap<SnapshotId, SplitSnapshot>,
    /// The last id of a sequence or snapshot.
    next_id: u64,
    /// The first failure that may have left stages at different positions. Nothing runs after it.
    fault: Option<(&'static str, String)>,
}

/// One open sequence.
struct SplitSequence {
    /// Its id in each stage.
    ids: Vec<SeqId>,
    max_len: usize,
    /// Committed tokens.
    position: usize,
}

/// One snapshot.
struct SplitSnapshot {
    /// Its id in each stage.
    ids: Vec<SnapshotId>,
    position: usize,
}

impl SplitRunner {
    /// A runner over connected stages with these layers; `sections` are those of a snapshot of all.
    pub(super) fn new(
        info: RunnerInfo,
        stages: Vec<Box<dyn Stage>>,
        (layers, sections): (Vec<Range<usize>>, u32),
    ) -> SplitRunner {
        SplitRunner {
            info,
            stages,
            layers,
            sections,
            sequences: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            next_id: 0,
            fault: None,
        }
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Refuses every call once the stages may differ.
    fn require_stages(&self) -> Result<(), DeviceError> {
        match &self.fault {
            None => Ok(()),
            Some((during, detail)) => Err(DeviceError::DeviceLost {
                during,
                detail: detail.clone(),
            }),
        }
    }

    /// Passes on the result of a call that some stages may have executed and others not.
    fn record<T>(
        &mut self,
        during: &'static str,
        result: Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        result.map_err(|error| {
            let (during, detail) = match error {
                DeviceError::DeviceLost { during, detail } => (during, detail),
                other => (during, other.to_string()),
            };
            self.fault = Some((during, detail.clone()));
            DeviceError::DeviceLost { during, detail }
        })
    }

    fn sequence(&self, seq: SeqId) -> Result<&SplitSequence, DeviceError> {
        self.sequences
            .get(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))
    }

    /// A sequence's id in the last stage, which drafts.
    fn id_of_last(&self, seq: SeqId) -> Result<SeqId, DeviceError> {
        let last = self.sequence(seq)?.ids.last().copied();
        last.ok_or(DeviceError::UnknownSequence(seq))
    }

    fn last(&mut self) -> &mut dyn Stage {
        let last = self.stages.last_mut();
        &mut **last.expect("a placement has a device")
    }

    /// Takes pages for the first `rows` positions in every stage before any of them runs.
    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        let sequence = self.sequences.get(&seq);
        let sequence = sequence.ok_or(DeviceError::UnknownSequence(seq))?;
        let mut stages = self.stages.iter_mut().zip(&sequence.ids);
        stages.try_for_each(|(stage, id)| stage.reserve(*id, rows))
    }

    /// Hands over the rows of stage `i - 1` to stage `i`.
    fn hand_over(&mut self, i: usize, rows: usize) -> Result<(), DeviceError> {
        let (below, above) = self.stages.split_at_mut(i);
        match (below.last_mut(), above.first_mut()) {
            (Some(below), Some(stage)) => stage.receive(below.output(), rows),
            _ => Ok(()),
        }
    }

    /// Runs one pass of a prompt through all stages.
    fn prefill_pass(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let ids = self.sequence(seq)?.ids.clone();
        let mut rows = Vec::new();
        for (i, id) in ids.iter().enumerate() {
            self.hand_over(i, tokens.len())?;
            let is_last = i + 1 == ids.len();
            let requests = if is_last { requests } else { &[] };
            rows = self.stages[i].prefill(*id, tokens, requests)?;
        }
        Ok(rows)
    }

    /// Runs trees that fit one pass through all stages.
    fn verify_pass(
        &mut self,
        items: &[VerifyItem<'_>],
    ) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let n_rows = items.iter().map(|item| item.tree.len()).sum();
        let longest = items.iter().map(|item| item.tree.len()).max().unwrap_or(0);
        let none = vec![LogitsRequest::NONE; longest];
        let mut rows = Vec::new();
        for i in 0..self.stages.len() {
            self.hand_over(i, n_rows)?;
            let is_last = i + 1 == self.stages.len();
            let mut own = Vec::with_capacity(items.len());
            for item in items {
                own.push(VerifyItem {
                    seq: self.sequence(item.seq)?.ids[i],
                    tree: item.tree,
                    requests: if is_last {
                        item.requests
                    } else {
                        &none[..item.tree.len()]
                    },
                });
            }
            rows = self.stages[i].verify(&own)?;
        }
        Ok(rows)
    }

    /// Opens a sequence in every stage, or in none.
    fn open_all(&mut self, max_len: usize) -> Result<Vec<SeqId>, DeviceError> {
        let mut ids = Vec::with_capacity(self.stages.len());
        for i in 0..self.stages.len() {
            match self.stages[i].open(max_len) {
                Ok(id) => ids.push(id),
                Err(error) => {
                    self.close_all(&ids);
                    return Err(error);
                }
            }
        }
        Ok(ids)
    }

    fn close_all(&mut self, ids: &[SeqId]) {
        for (stage, id) in self.stages.iter_mut().zip(ids) {
            stage.close(*id);
        }
    }

    fn free_all(&mut self, ids: &[SnapshotId]) {
        for (stage, id) in self.stages.iter_mut().zip(ids) {
            stage.free_snapshot(*id);
        }
    }

    /// Snapshots of all stages as one; if one failed, the others are freed.
    fn keep_snapshot(
        &mut self,
        made: impl Fn(&mut dyn Stage, usize) -> Result<SnapshotInfo, DeviceError>,
    ) -> Result<SnapshotInfo, DeviceError> {
        let (mut ids, mut bytes, mut positions) = (Vec::new(), 0, Vec::new());
        for i in 0..self.stages.len() {
            match made(&mut *self.stages[i], i) {
                Ok(info) => {
                    ids.push(info.id);
                    positions.push(info.position);
                    bytes += info.bytes;
                }
                Err(error) => {
                    self.free_all(&ids);
                    return Err(error);
                }
            }
        }
        let position = positions.first().copied().unwrap_or(0);
        if positions.iter().any(|other| *other != position) {
            self.free_all(&ids);
            let detail = format!("its stages are at the positions {positions:?}");
            return Err(DeviceError::InvalidSnapshot { detail });
        }
        let id = SnapshotId(self.take_id());
        self.snapshots.insert(id, SplitSnapshot { ids, position });
        Ok(SnapshotInfo {
            id,
            position,
            bytes,
        })
    }
}

impl Drop for SplitRunner {
    /// From the top, since a stage may still read rows of the stage below.
    fn drop(&mut self) {
        while let Some(stage) = self.stages.pop() {
            drop(stage);
        }
    }
}

impl Runner for SplitRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    /// The least of all stages; snapshots hold pages of every stage.
    fn capacity(&self) -> Capacity {
        let all = self.stages.iter().map(|stage| stage.capacity());
        let least = all.reduce(|a, b| {
            let tokens = a.tokens.min(b.tokens);
            Capacity {
                sequences: a.sequences.min(b.sequences),
                tokens,
                evictable_tokens: a.evictable_tokens.max(b.evictable_tokens).min(tokens),
                snapshot_bytes: a.snapshot_bytes + b.snapshot_bytes,
            }
        });
        least.expect("a placement has a device")
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.require_stages()?;
        let sequence = SplitSequence {
            ids: self.open_all(max_len)?,
            max_len,
            position: 0,
        };
        let id = SeqId(self.take_id());
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        if let Some(sequence) = self.sequences.remove(&seq) {
            self.close_all(&sequence.ids);
        }
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.require_stages()?;
        let position = self.sequence(seq)?.position;
        self.reserve(seq, position + tokens.len())?;
        let each = self.stages.iter().map(|s| s.passes(position, tokens.len()));
        let mut rows = Vec::with_capacity(requests.len());
        for pass in common_passes(each) {
            let within = requests.iter().filter(|(at, _)| pass.contains(at));
            let asked: Vec<(usize, LogitsRequest)> = within
                .map(|(at, request)| (at - pass.start, request.clone()))
                .collect();
            let done = self.prefill_pass(seq, &tokens[pass.clone()], &asked);
            rows.append(&mut self.record("prefill", done)?);
            if let Some(sequence) = self.sequences.get_mut(&seq) {
                sequence.position += pass.len();
            }
        }
        Ok(rows)
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.require_stages()?;
        let own = items.iter().map(|item| {
            Ok(DraftItem {
                seq: self.id_of_last(item.seq)?,
                ..*item
            })
        });
        let own = own.collect::<Result<Vec<DraftItem>, DeviceError>>()?;
        self.last().draft(&own, depth, k)
    }

    fn draft_logits(&mut self, item: DraftItem) -> Result<DraftLogits, DeviceError> {
        self.require_stages()?;
        let seq = self.id_of_last(item.seq)?;
        self.last().draft_logits(DraftItem { seq, ..item })
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.require_stages()?;
        let own = items.iter().map(|item| {
            Ok(MtpDraftItem {
                seq: self.id_of_last(item.seq)?,
                ..*item
            })
        });
        let own = own.collect::<Result<Vec<MtpDraftItem>, DeviceError>>()?;
        self.last().draft_mtp(&own, k)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.require_stages()?;
        for item in items {
            let position = self.sequence(item.seq)?.position;
            self.reserve(item.seq, position + item.tree.len())?;
        }
        let nodes: Vec<usize> = items.iter().map(|item| item.tree.len()).collect();
        let mut rows = Vec::with_capacity(items.len());
        let mut begin = 0;
        while begin < items.len() {
            let each = self
                .stages
                .iter()
                .map(|s| s.items_per_pass(&nodes[begin..]));
            let end = begin + each.min().unwrap_or(1).clamp(1, items.len() - begin);
            let done = self.verify_pass(&items[begin..end]);
            rows.append(&mut self.record("verify", done)?);
            begin = end;
        }
        Ok(rows)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        self.require_stages()?;
        for i in 0..self.stages.len() {
            let mut own = Vec::with_capacity(items.len());
            for item in items {
                own.push(CommitItem {
                    seq: self.sequence(item.seq)?.ids[i],
                    path: item.path,
                });
            }
            let done = self.stages[i].commit(&own);
            self.record("commit", done)?;
        }
        for item in items {
            if let Some(sequence) = self.sequences.get_mut(&item.seq) {
                sequence.position += item.path.len();
            }
        }
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.require_stages()?;
        let ids = self.sequence(seq)?.ids.clone();
        let mut stages = self.stages.iter_mut().zip(ids);
        let done = stages.try_for_each(|(stage, id)| stage.discard(id));
        self.record("discard", done)
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        self.require_stages()?;
        let ids = self.sequence(seq)?.ids.clone();
        self.keep_snapshot(|stage, i| stage.snapshot(ids[i], location))
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        self.require_stages()?;
        let saved = self.snapshots.get(&snapshot);
        let saved = saved.ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let (snapshots, position) = (saved.ids.clone(), saved.position);
        let SplitSequence { ids, max_len, .. } = self.sequence(seq)?;
        let (ids, max_len) = (ids.clone(), *max_len);
        let mut all = self.stages.iter_mut().zip(ids.iter().zip(&snapshots));
        let restored = all.try_for_each(|(stage, (id, saved))| stage.restore(*id, *saved));
        if let Err(error) = restored {
            // Some stages may have the state: all begin anew.
            self.close_all(&ids);
            let opened = self.open_all(max_len);
            let ids = self.record("restore", opened)?;
            if let Some(sequence) = self.sequences.get_mut(&seq) {
                (sequence.ids, sequence.position) = (ids, 0);
            }
            return Err(error);
        }
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.position = position;
        }
        Ok(())
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        if let Some(saved) = self.snapshots.remove(&snapshot) {
            self.free_all(&saved.ids);
        }
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        self.detach(snapshot)?.write(sink)
    }

    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        self.require_stages()?;
        let saved = self.snapshots.get(&snapshot);
        let saved = saved.ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let all = self.stages.iter_mut().zip(&saved.ids);
        let parts = all.map(|(stage, id)| stage.detach(*id));
        let parts = parts.collect::<Result<Vec<Box<dyn DetachedSnapshot>>, DeviceError>>()?;
        Ok(Box::new(JoinedSnapshot::new(parts, self.sections)))
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes)?;
        self.import_at(&bytes)
    }

    fn import_at(&mut self, source: &dyn ReadAt) -> Result<SnapshotInfo, DeviceError> {
        self.require_stages()?;
        let parts = StageSections::of(source, &self.layers)?;
        self.keep_snapshot(|stage, i| stage.import_at(&parts[i]))
    }
}

/// The passes that end wherever a pass of some stage ends.
fn common_passes(each: impl Iterator<Item = Vec<Range<usize>>>) -> Vec<Range<usize>> {
    let mut ends: Vec<usize> = each.flatten().map(|pass| pass.end).collect();
    ends.sort_unstable();
    ends.dedup();
    let begins = std::iter::once(0).chain(ends.clone());
    begins.zip(ends).map(|(begin, end)| begin..end).collect()
}
