//! Faults of one device among several, at start, in a hand-over and in any call, and the time that
//! its steps take beside those of other devices.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::{
    Backend, DeviceError, DeviceInfo, DraftCandidates, DraftItem, LoadConfig, LoadProgress,
    LogitsRow, MemoryPlan, Runner, SeqId, SplitMode, Stage, StageConfig, StageOutput, VerifyItem,
    forward_runner,
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
    /// Whether it is a GPU that reaches no other's memory.
    pub is_without_peers: bool,
    /// Whether its steps are reported as begun and never run, as those of a GPU that stands still.
    pub skips_steps: bool,
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
    /// Microseconds of a draft by its sequences.
    pub draft_us: fn(usize) -> u64,
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
            is_without_peers: false,
            skips_steps: false,
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

    fn gpu_ordinal(&self) -> Option<u32> {
        if self.is_without_peers {
            Some(0)
        } else {
            self.device.gpu_ordinal()
        }
    }

    fn require_peer_access(&self, below: u32, mode: SplitMode) -> Result<(), DeviceError> {
        if self.is_without_peers {
            return Err(FaultKind::Refused.error("peer access"));
        }
        self.device.require_peer_access(below, mode)
    }

    fn stage_format(&self, stage: &StageConfig) -> Result<String, DeviceError> {
        self.device.stage_format(stage)
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
        // A draft of its own has no layers.
        let time = self.time.clone().map(|cost| StepCost {
            us: if stage.layers.is_empty() {
                |_: usize| 0
            } else {
                cost.us
            },
            ..cost
        });
        Ok(Box::new(FaultyStage {
            stage: self.device.open_stage(stage, progress)?,
            faults: self.faults.clone(),
            skips_steps: self.skips_steps,
            time,
            at,
            received_us: 0,
        }))
    }
}

/// A stage whose calls may fail before they reach it.
struct FaultyStage {
    stage: Box<dyn Stage>,
    faults: FakeHandle,
    skips_steps: bool,
    time: Option<StepCost>,
    /// Its index among the stages, and whether the host waits for its steps.
    at: (usize, bool),
    /// When the rows of the next step are there.
    received_us: u64,
}

impl FaultyStage {
    /// The stage, unless this call of it fails. Faults that name sequences never occur.
    fn entered(&mut self, call: RunnerMethod) -> Result<&mut dyn Stage, DeviceError> {
        self.faults.enter(call, &[])?;
        Ok(&mut *self.stage)
    }

    /// Takes virtual time for a pass that begins at `after_us` at the earliest, and for which the
    /// host may wait.
    fn take(&self, us: u64, after_us: u64, host_waits: bool) {
        let Some(StepCost { time, .. }) = &self.time else {
            return;
        };
        let mut times = time.lock();
        let begin = times.host.max(times.ends[self.at.0]).max(after_us);
        times.ends[self.at.0] = begin + us;
        if host_waits {
            times.host = begin + us;
        }
    }
}

impl Runner for FaultyStage {
    forward_runner!(self => self.stage; info, capacity, close, draft_logits, free_snapshot, detach,
        export, import, import_at);
    forward_runner!(self => self.entered(RunnerMethod::Open)?; open);
    forward_runner!(self => self.entered(RunnerMethod::Prefill)?; prefill);
    forward_runner!(self => self.entered(RunnerMethod::Draft)?; draft_mtp);
    forward_runner!(self => self.entered(RunnerMethod::Commit)?; commit);
    forward_runner!(self => self.entered(RunnerMethod::Discard)?; discard);
    forward_runner!(self => self.entered(RunnerMethod::Snapshot)?; snapshot);
    forward_runner!(self => self.entered(RunnerMethod::Restore)?; restore);

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.faults.enter(RunnerMethod::Verify, &[])?;
        if self.skips_steps {
            return Ok(vec![Vec::new(); items.len()]);
        }
        if let Some(StepCost { us, .. }) = &self.time {
            let us = us(items.iter().map(|item| item.tree.len()).sum());
            self.take(us, self.received_us, self.at.1);
        }
        self.stage.verify(items)
    }

    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        self.faults.enter(RunnerMethod::Verify, &[])?;
        if let Some(StepCost { us, .. }) = &self.time {
            let us = us(items.iter().map(|item| item.tree.len()).sum());
            self.take(us, self.received_us, false);
        }
        self.stage.begin_verify(items)
    }

    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        if let Some(StepCost { time, .. }) = &self.time {
            let mut times = time.lock();
            times.host = times.host.max(times.ends[self.at.0]);
        }
        self.stage.finish_verify()
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        if let Some(StepCost { draft_us, .. }) = &self.time {
            self.take(draft_us(items.len()), 0, true);
        }
        self.entered(RunnerMethod::Draft)?.draft(items, depth, k)
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
