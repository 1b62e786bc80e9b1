//! Faults of one device among several: at start, in a hand-over and in any call.

use std::ops::Range;

use contract::{
    Backend, Capacity, CommitItem, DeviceError, DeviceInfo, DraftCandidates, DraftItem, LoadConfig,
    LoadProgress, LogitsRequest, LogitsRow, MemoryPlan, MtpDraftItem, Runner, RunnerInfo, SeqId,
    SnapshotId, SnapshotInfo, SnapshotLocation, Stage, StageConfig, StageOutput, TokenId,
    VerifyItem,
};

use crate::fake::{FakeHandle, FaultKind, RunnerMethod};

/// A device whose stages fail as a handle says.
pub struct FaultyDevice {
    /// The device.
    pub device: Box<dyn Backend>,
    /// Faults of the calls of its stages, and their record.
    pub faults: FakeHandle,
    /// How opening a stage fails, if it does.
    pub at_start: Option<FaultKind>,
}

impl FaultyDevice {
    /// A device without faults so far.
    pub fn new(device: impl Backend + 'static) -> FaultyDevice {
        FaultyDevice {
            device: Box::new(device),
            faults: FakeHandle::default(),
            at_start: None,
        }
    }
}

impl Backend for FaultyDevice {
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        self.device.probe()
    }

    fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
        self.device.estimate(config)
    }

    fn open(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        self.device.open(config, progress)
    }

    fn estimate_stage(&self, stage: &StageConfig) -> Result<MemoryPlan, DeviceError> {
        self.device.estimate_stage(stage)
    }

    fn open_stage(
        &self,
        stage: StageConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Stage>, DeviceError> {
        if let Some(kind) = self.at_start {
            return Err(kind.error("opening a stage"));
        }
        Ok(Box::new(FaultyStage {
            stage: self.device.open_stage(stage, progress)?,
            faults: self.faults.clone(),
        }))
    }
}

/// A stage whose calls may fail before they reach it.
struct FaultyStage {
    stage: Box<dyn Stage>,
    faults: FakeHandle,
}

impl Runner for FaultyStage {
    contract::forward_runner!(self => self.stage; draft_logits, detach, export, import, import_at);

    fn info(&self) -> &RunnerInfo {
        self.stage.info()
    }

    fn capacity(&self) -> Capacity {
        self.stage.capacity()
    }

    fn open(&mut self, max_len: usize) -> Result<SeqId, DeviceError> {
        self.faults.enter(RunnerMethod::Open, &[])?;
        self.stage.open(max_len)
    }

    fn close(&mut self, seq: SeqId) {
        self.stage.close(seq);
    }

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.faults.enter(RunnerMethod::Prefill, &[seq])?;
        self.stage.prefill(seq, tokens, requests)
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.faults.enter(RunnerMethod::Draft, &[])?;
        self.stage.draft(items, depth, k)
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        self.faults.enter(RunnerMethod::Draft, &[])?;
        self.stage.draft_mtp(items, k)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
        self.faults.enter(RunnerMethod::Verify, &seqs)?;
        self.stage.verify(items)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        let seqs: Vec<SeqId> = items.iter().map(|item| item.seq).collect();
        self.faults.enter(RunnerMethod::Commit, &seqs)?;
        self.stage.commit(items)
    }

    fn discard(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        self.faults.enter(RunnerMethod::Discard, &[seq])?;
        self.stage.discard(seq)
    }

    fn snapshot(
        &mut self,
        seq: SeqId,
        location: SnapshotLocation,
    ) -> Result<SnapshotInfo, DeviceError> {
        self.faults.enter(RunnerMethod::Snapshot, &[seq])?;
        self.stage.snapshot(seq, location)
    }

    fn restore(&mut self, seq: SeqId, snapshot: SnapshotId) -> Result<(), DeviceError> {
        self.faults.enter(RunnerMethod::Restore, &[seq])?;
        self.stage.restore(seq, snapshot)
    }

    fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.stage.free_snapshot(snapshot);
    }
}

impl Stage for FaultyStage {
    fn passes(&self, position: usize, n: usize) -> Vec<Range<usize>> {
        self.stage.passes(position, n)
    }

    fn items_per_pass(&self, nodes: &[usize]) -> usize {
        self.stage.items_per_pass(nodes)
    }

    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        self.stage.reserve(seq, rows)
    }

    fn connect(&mut self, below: &mut dyn StageOutput) -> Result<(), DeviceError> {
        self.stage.connect(below)
    }

    fn receive(&mut self, below: &mut dyn StageOutput, rows: usize) -> Result<(), DeviceError> {
        self.faults.enter(RunnerMethod::Receive, &[])?;
        self.stage.receive(below, rows)
    }

    fn output(&mut self) -> &mut dyn StageOutput {
        self.stage.output()
    }
}
