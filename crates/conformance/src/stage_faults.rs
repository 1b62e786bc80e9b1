//! Faults of one device among several, at start, in a hand-over and in any call, and the time that
//! its steps take beside those of other devices.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// What its steps take.
    pub time: Option<StepCost>,
}

/// What a device's steps take.
#[derive(Debug, Clone)]
pub struct StepCost {
    /// The time that all devices share.
    pub time: VirtualTime,
    /// Microseconds of a step by its rows.
    pub us: fn(usize) -> u64,
}

/// Virtual time of the host and of stages that work on their own, in microseconds.
#[derive(Debug, Clone, Default)]
pub struct VirtualTime {
    shared: Arc<Mutex<Times>>,
}

#[derive(Debug, Default)]
struct Times {
    host: u64,
    /// When the last step of each stage ends.
    ends: Vec<u64>,
}

impl VirtualTime {
    /// When the host returned from the last call.
    pub fn host_us(&self) -> u64 {
        self.lock().host
    }

    fn lock(&self) -> MutexGuard<'_, Times> {
        // A test that panicked while holding it has already failed.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FaultyDevice {
    /// A device without faults so far.
    pub fn new(device: impl Backend + 'static) -> FaultyDevice {
        FaultyDevice {
            device: Box::new(device),
            faults: FakeHandle::default(),
            at_start: None,
            time: None,
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
        let has_head = stage.has_head();
        let opened = self.time.as_ref().map_or(0, |cost| {
            let mut times = cost.time.lock();
            times.ends.push(0);
            times.ends.len() - 1
        });
        let at = (opened, has_head);
        Ok(Box::new(FaultyStage {
            stage: self.device.open_stage(stage, progress)?,
            faults: self.faults.clone(),
            time: self.time.clone(),
            at,
            received_us: 0,
        }))
    }
}

/// A stage whose calls may fail before they reach it.
struct FaultyStage {
    stage: Box<dyn Stage>,
    faults: FakeHandle,
    time: Option<StepCost>,
    /// Its index among the stages, and whether the host waits for its steps.
    at: (usize, bool),
    /// When the rows of the next step are there.
    received_us: u64,
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
        if let Some(StepCost { time, us }) = &self.time {
            let (i, has_head) = self.at;
            let mut times = time.lock();
            let begin = times.host.max(times.ends[i]).max(self.received_us);
            let end = begin + us(items.iter().map(|item| item.tree.len()).sum());
            times.ends[i] = end;
            if has_head {
                times.host = end;
            }
        }
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
        if let Some(cost) = &self.time {
            self.received_us = cost.time.lock().ends[self.at.0 - 1];
        }
        self.stage.receive(below, rows)
    }

    fn output(&mut self) -> &mut dyn StageOutput {
        self.stage.output()
    }
}
