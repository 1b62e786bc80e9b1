//! The stages of a model as one [`Runner`].

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::ops::Range;
use std::sync::Arc;

use super::begun::BegunVerify;
use super::groups::{GroupTimes, StepGroups};
use super::sections::{JoinedSnapshot, StageSections};
use super::shards::ShardedState;
use super::stage::Stage;
use super::stages::{Stages, StoppedPass};
use crate::snapshot::ReadAt;
use crate::{
    Capacity, CommitItem, DetachedSnapshot, DeviceError, DraftCandidates, DraftItem, DraftLogits,
    LogitsRequest, LogitsRow, ModelSpec, MtpDraftItem, Runner, RunnerInfo, SeqId, SnapshotId,
    SnapshotInfo, SnapshotLocation, TokenId, VerifyItem,
};

/// Stages that run a model together, behind a
/// [`CheckedRunner`](crate::checked::CheckedRunner).
///
/// A call that some stages have executed and another refuses is undone where that is possible.
/// Where it is not, its sequences are lost, and only they; a lost device ends the runner.
pub(super) struct SplitRunner {
    info: RunnerInfo,
    pub(super) stages: Stages,
    /// The layers of each stage, counted over the whole model; none in a draft's own.
    layers: Vec<Range<usize>>,
    /// The stage with the LM head.
    pub(super) head: usize,
    /// Sections of a snapshot of the whole model.
    sections: u32,
    /// How states are cut, if the stages are shards.
    shards: Option<ShardedState>,
    sequences: BTreeMap<SeqId, SplitSequence>,
    snapshots: BTreeMap<SnapshotId, SplitSnapshot>,
    /// The last id of a sequence or snapshot.
    next_id: u64,
    pub(super) times: GroupTimes,
    /// Verify calls that have begun, the earliest first.
    pub(super) begun: VecDeque<BegunVerify>,
    /// Whether the stage with the LM head begins a verify too: it has all layers, and the draft is
    /// elsewhere.
    pub(super) begins_in_head: bool,
}

/// One open sequence.
pub(super) struct SplitSequence {
    /// Its id in each stage.
    pub(super) ids: Vec<SeqId>,
    max_len: usize,
    /// Committed tokens.
    pub(super) position: usize,
    /// The call that left it at different positions in different stages, and why. Only `close`
    /// may follow.
    lost: Option<(&'static str, String)>,
}

/// One snapshot.
struct SplitSnapshot {
    /// Its id in each stage.
    ids: Vec<SnapshotId>,
    position: usize,
}

impl SplitRunner {
    /// A runner over stages with these layers; `sections` are those of a snapshot of all.
    pub(super) fn new(
        info: RunnerInfo,
        stages: Stages,
        (layers, sections): (Vec<Range<usize>>, u32),
        groups: StepGroups,
    ) -> SplitRunner {
        let times = GroupTimes::new(groups, info.batch_invariant);
        let is_single = layers.iter().filter(|of| !of.is_empty()).count() == 1;
        SplitRunner {
            begins_in_head: info.begins_verify && is_single,
            info,
            stages,
            head: layers.iter().rposition(|of| !of.is_empty()).unwrap_or(0),
            layers,
            sections,
            shards: None,
            sequences: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            next_id: 0,
            times,
            begun: VecDeque::new(),
        }
    }

    /// The same with shards of a model as its stages.
    pub(super) fn with_shards(self, model: Arc<ModelSpec>) -> SplitRunner {
        let count = self.stages.len();
        SplitRunner {
            shards: Some(ShardedState { model, count }),
            ..self
        }
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// An open sequence that is not lost, on devices that are not.
    pub(super) fn sequence(&self, seq: SeqId) -> Result<&SplitSequence, DeviceError> {
        self.stages.require()?;
        let sequence = self.sequences.get(&seq);
        let sequence = sequence.ok_or(DeviceError::UnknownSequence(seq))?;
        match &sequence.lost {
            None => Ok(sequence),
            Some((during, detail)) => Err(DeviceError::SequenceLost {
                seq,
                during,
                detail: detail.clone(),
            }),
        }
    }

    /// The error of a call that stage `i` ended when stages were at different positions of `seqs`.
    fn lose(
        &mut self,
        during: &'static str,
        seqs: &[SeqId],
        StoppedPass { stage, error }: StoppedPass,
    ) -> DeviceError {
        if let DeviceError::DeviceLost { .. } = error {
            return error;
        }
        let detail = format!("{}: {error}", self.stages.name(stage));
        for seq in seqs {
            if let Some(sequence) = self.sequences.get_mut(seq) {
                sequence.lost = Some((during, detail.clone()));
            }
        }
        match seqs.first() {
            Some(seq) => DeviceError::SequenceLost {
                seq: *seq,
                during,
                detail,
            },
            None => error,
        }
    }

    /// A sequence's id in the last stage, which drafts.
    fn id_of_last(&self, seq: SeqId) -> Result<SeqId, DeviceError> {
        let last = self.sequence(seq)?.ids.last().copied();
        last.ok_or(DeviceError::UnknownSequence(seq))
    }

    /// Calls the last stage.
    fn call_last<T>(
        &mut self,
        of: impl FnOnce(&mut dyn Stage) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.stages.require()?;
        self.stages.call(self.stages.len() - 1, of)
    }

    /// Takes pages for the first `rows` positions in every stage before any of them runs.
    pub(super) fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        let ids = self.sequence(seq)?.ids.clone();
        let mut stages = ids.into_iter().enumerate();
        stages.try_for_each(|(i, id)| self.stages.call(i, |stage| stage.reserve(id, rows)))
    }

    /// Runs one pass of a prompt through all stages.
    fn prefill_pass(
        &mut self,
        ids: &[SeqId],
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, StoppedPass> {
        let head = self.head;
        let mut rows = self.stages.pass(tokens.len(), |stage, i| {
            let requests = if i == head { requests } else { &[] };
            stage.prefill(ids[i], tokens, requests)
        })?;
        Ok(rows.swap_remove(head))
    }

    /// Drops the pending tree of a sequence in the first `n_stages` stages.
    pub(super) fn discard_in(&mut self, seq: SeqId, n_stages: usize) -> Result<(), DeviceError> {
        let ids = self.sequence(seq)?.ids.clone();
        for (stage, id) in ids.into_iter().enumerate().take(n_stages) {
            let done = self.stages.call(stage, |of| of.discard(id));
            if let Err(error) = done {
                return Err(self.lose("discard", &[seq], StoppedPass { stage, error }));
            }
        }
        Ok(())
    }

    /// Snapshots of all stages as one; if one failed, the others are freed.
    fn keep_snapshot(
        &mut self,
        made: impl Fn(&mut dyn Stage, usize) -> Result<SnapshotInfo, DeviceError>,
    ) -> Result<SnapshotInfo, DeviceError> {
        let (mut ids, mut bytes, mut positions) = (Vec::new(), 0, Vec::new());
        for i in 0..self.stages.len() {
            match self.stages.call(i, |stage| made(stage, i)) {
                Ok(info) => {
                    ids.push(info.id);
                    positions.push(info.position);
                    bytes += info.bytes;
                }
                Err(error) => {
                    self.stages.free(&ids);
                    return Err(error);
                }
            }
        }
        let position = positions.first().copied().unwrap_or(0);
        if positions.iter().any(|other| *other != position) {
            self.stages.free(&ids);
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

impl Runner for SplitRunner {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    /// The least of all stages; snapshots hold pages of every stage. Nothing on lost devices.
    fn capacity(&self) -> Capacity {
        if self.stages.require().is_err() {
            return Capacity::default();
        }
        let all = self.stages.iter().map(Runner::capacity);
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
        self.stages.require()?;
        let sequence = SplitSequence {
            ids: self.stages.open(max_len)?,
            max_len,
            position: 0,
            lost: None,
        };
        let id = SeqId(self.take_id());
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        if let Some(sequence) = self.sequences.remove(&seq) {
            self.stages.close(&sequence.ids);
        }
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let SplitSequence { ids, position, .. } = self.sequence(seq)?;
        let (ids, position) = (ids.clone(), *position);
        self.reserve(seq, position + tokens.len())?;
        let each = self.stages.iter().map(|s| s.passes(position, tokens.len()));
        let mut rows = Vec::with_capacity(requests.len());
        for pass in common_passes(each) {
            let within = requests.iter().filter(|(at, _)| pass.contains(at));
            let asked: Vec<(usize, LogitsRequest)> = within
                .map(|(at, request)| (at - pass.start, request.clone()))
                .collect();
            match self.prefill_pass(&ids, &tokens[pass.clone()], &asked) {
                Ok(mut done) => rows.append(&mut done),
                // The first stage has refused the call; nothing has changed.
                Err(StoppedPass { stage: 0, error }) if pass.start == 0 && error.is_refusal() => {
                    return Err(error);
                }
                Err(stopped) => return Err(self.lose("prefill", &[seq], stopped)),
            }
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
        let own = items.iter().map(|item| {
            Ok(DraftItem {
                seq: self.id_of_last(item.seq)?,
                ..*item
            })
        });
        let own = own.collect::<Result<Vec<DraftItem>, DeviceError>>()?;
        self.call_last(|stage| stage.draft(&own, depth, k))
    }

    fn draft_logits(&mut self, item: DraftItem) -> Result<DraftLogits, DeviceError> {
        let seq = self.id_of_last(item.seq)?;
        self.call_last(|stage| stage.draft_logits(DraftItem { seq, ..item }))
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let own = items.iter().map(|item| {
            Ok(MtpDraftItem {
                seq: self.id_of_last(item.seq)?,
                ..*item
            })
        });
        let own = own.collect::<Result<Vec<MtpDraftItem>, DeviceError>>()?;
        self.call_last(|stage| stage.draft_mtp(&own, k))
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.step(items)
    }

    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        self.begin(items)
    }

    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.finish()
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        let mut ids = Vec::with_capacity(items.len());
        for item in items {
            ids.push(self.sequence(item.seq)?.ids.clone());
        }
        for stage in 0..self.stages.len() {
            let own = items.iter().zip(&ids).map(|(item, ids)| CommitItem {
                seq: ids[stage],
                path: item.path,
            });
            let own: Vec<CommitItem<'_>> = own.collect();
            match self.stages.call(stage, |of| of.commit(&own)) {
                Ok(()) => {}
                // The first stage has refused the call; nothing has changed.
                Err(error) if stage == 0 && error.is_refusal() => return Err(error),
                Err(error) => {
                    let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
                    return Err(self.lose("commit", &seqs, StoppedPass { stage, error }));
                }
            }
        }
        for item in items {
            if let Some(sequence) = self.sequences.get_mut(&item.seq) {
                sequence.position += item.path.len();
            }
        }
        self.begin_in_head();
        Ok(())
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.discard_in(seq, self.stages.len())
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        let ids = self.sequence(seq)?.ids.clone();
        self.keep_snapshot(|stage, i| stage.snapshot(ids[i], location))
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        let SplitSequence { ids, max_len, .. } = self.sequence(seq)?;
        let (ids, max_len) = (ids.clone(), *max_len);
        let saved = self.snapshots.get(&snapshot);
        let saved = saved.ok_or(DeviceError::UnknownSnapshot(snapshot))?;
        let (snapshots, position) = (saved.ids.clone(), saved.position);
        let mut all = ids.iter().zip(snapshots).enumerate();
        let restored =
            all.try_for_each(|(i, (id, saved))| self.stages.call(i, |of| of.restore(*id, saved)));
        if let Err(error) = restored {
            self.stages.require()?;
            // Some stages may have the state: all begin anew.
            self.stages.close(&ids);
            let opened = self.stages.open(max_len);
            let Some(sequence) = self.sequences.get_mut(&seq) else {
                return Err(error);
            };
            sequence.position = 0;
            sequence.ids = opened.unwrap_or_else(|reopening| {
                sequence.lost = Some(("restore", reopening.to_string()));
                Vec::new()
            });
            return Err(error);
        }
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.position = position;
        }
        Ok(())
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        if let Some(saved) = self.snapshots.remove(&snapshot) {
            self.stages.free(&saved.ids);
        }
    }

    fn export(&mut self, snapshot: SnapshotId, sink: &mut dyn Write) -> Result<(), DeviceError> {
        self.detach(snapshot)?.write(sink)
    }

    fn detach(&mut self, snapshot: SnapshotId) -> Result<Box<dyn DetachedSnapshot>, DeviceError> {
        self.stages.require()?;
        let saved = self.snapshots.get(&snapshot);
        let ids = saved
            .ok_or(DeviceError::UnknownSnapshot(snapshot))?
            .ids
            .clone();
        let mut parts = Vec::with_capacity(ids.len());
        for (i, id) in ids.into_iter().enumerate() {
            parts.push(self.stages.call(i, |stage| stage.detach(id))?);
        }
        Ok(match &self.shards {
            Some(shards) => Box::new(shards.join(parts)),
            None => Box::new(JoinedSnapshot::new(parts, self.sections)),
        })
    }

    fn import(&mut self, source: &mut dyn Read) -> Result<SnapshotInfo, DeviceError> {
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes)?;
        self.import_at(&bytes)
    }

    fn import_at(&mut self, source: &dyn ReadAt) -> Result<SnapshotInfo, DeviceError> {
        self.stages.require()?;
        if let Some(shards) = &self.shards {
            let parts = shards.cut(source)?;
            return self.keep_snapshot(|stage, i| stage.import_at(&parts[i]));
        }
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
