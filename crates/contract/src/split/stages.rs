//! The stages of a runner, bottom to top, and the first fault of any of them.

use super::stage::{SplitMode, Stage};
use crate::{DeviceError, SeqId, SnapshotId};

/// Stages that run one model. Dropping them drops all, from the top, since a stage may still read
/// rows of the stage below.
pub(super) struct Stages {
    all: Vec<Box<dyn Stage>>,
    /// The device and the part of each, for messages.
    names: Vec<String>,
    /// The first loss of a device. Nothing runs after it.
    fault: Option<(&'static str, String)>,
    mode: SplitMode,
}

/// A pass that ended early.
pub(super) struct StoppedPass {
    /// The stage that failed; those below have executed the pass.
    pub(super) stage: usize,
    pub(super) error: DeviceError,
}

impl Stages {
    /// No stages yet.
    pub(super) fn new(mode: SplitMode) -> Stages {
        Stages {
            all: Vec::new(),
            names: Vec::new(),
            fault: None,
            mode,
        }
    }

    /// Whether each stage is a shard of all layers.
    pub(super) fn are_shards(&self) -> bool {
        self.mode == SplitMode::Tensor
    }

    /// The error of a pass that a stage has stopped. Where other shards have begun it, they wait
    /// for sums that never come, so all devices are lost.
    pub(super) fn stopped(&mut self, StoppedPass { stage, error }: StoppedPass) -> StoppedPass {
        if !self.are_shards() || stage == 0 {
            return StoppedPass { stage, error };
        }
        if self.fault.is_none() {
            let detail = format!("{}: {error}", self.names[stage]);
            self.fault = Some(("a pass of a tensor split", detail));
        }
        let error = self.require().err().unwrap_or(error);
        StoppedPass { stage, error }
    }

    /// Adds a stage above the others.
    ///
    /// # Errors
    /// If it cannot receive rows from the stage below.
    pub(super) fn push(
        &mut self,
        name: String,
        mut stage: Box<dyn Stage>,
    ) -> Result<(), DeviceError> {
        if let Some(below) = self.all.last_mut() {
            stage
                .connect(below.output())
                .map_err(|error| error.at_open(&name))?;
        }
        self.all.push(stage);
        self.names.push(name);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &dyn Stage> {
        self.all.iter().map(|stage| &**stage)
    }

    /// Refuses every call once a device is lost.
    pub(super) fn require(&self) -> Result<(), DeviceError> {
        match &self.fault {
            None => Ok(()),
            Some((during, detail)) => Err(DeviceError::DeviceLost {
                during,
                detail: detail.clone(),
            }),
        }
    }

    /// Calls stage `i`.
    pub(super) fn call<T>(
        &mut self,
        i: usize,
        of: impl FnOnce(&mut dyn Stage) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let result = of(&mut *self.all[i]);
        self.record(i, result)
    }

    /// Passes on the result of stage `i`, and keeps the loss of its device.
    fn record<T>(&mut self, i: usize, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        result.map_err(|error| {
            let error = error.named(&self.names[i]);
            if let DeviceError::DeviceLost { during, detail } = &error {
                self.fault.get_or_insert_with(|| (*during, detail.clone()));
            }
            error
        })
    }

    /// The name of stage `i`.
    pub(super) fn name(&self, i: usize) -> &str {
        &self.names[i]
    }

    /// Hands over the rows of stage `i - 1` to stage `i`; the first and all shards look up their
    /// own.
    pub(super) fn hand_over(&mut self, i: usize, rows: usize) -> Result<(), DeviceError> {
        if self.are_shards() {
            return Ok(());
        }
        let (below, above) = self.all.split_at_mut(i);
        match (below.last_mut(), above.first_mut()) {
            (Some(below), Some(stage)) => {
                let received = stage.receive(below.output(), rows);
                self.record(i, received)
            }
            _ => Ok(()),
        }
    }

    /// Runs a pass of `rows` rows of a prompt in every stage, bottom to top; returns the result of
    /// each.
    pub(super) fn pass<T>(
        &mut self,
        rows: usize,
        mut of: impl FnMut(&mut dyn Stage, usize) -> Result<T, DeviceError>,
    ) -> Result<Vec<T>, StoppedPass> {
        let mut all = Vec::with_capacity(self.len());
        for i in 0..self.len() {
            let done = self
                .hand_over(i, rows)
                .and_then(|()| self.call(i, |stage| of(stage, i)));
            let done = done.map_err(|error| self.stopped(StoppedPass { stage: i, error }));
            all.push(done?);
        }
        Ok(all)
    }

    /// Opens a sequence in every stage, or in none.
    pub(super) fn open(&mut self, max_len: usize) -> Result<Vec<SeqId>, DeviceError> {
        let mut ids = Vec::with_capacity(self.len());
        for i in 0..self.len() {
            match self.call(i, |stage| stage.open(max_len)) {
                Ok(id) => ids.push(id),
                Err(error) => {
                    self.close(&ids);
                    return Err(error);
                }
            }
        }
        Ok(ids)
    }

    /// Closes a sequence in the stages that have it. After a fault no stage is called any more: a
    /// shard may wait for the sums of another.
    pub(super) fn close(&mut self, ids: &[SeqId]) {
        if self.fault.is_some() {
            return;
        }
        for (stage, id) in self.all.iter_mut().zip(ids) {
            stage.close(*id);
        }
    }

    /// Frees a snapshot in the stages that have it, unless there was a fault.
    pub(super) fn free(&mut self, ids: &[SnapshotId]) {
        if self.fault.is_some() {
            return;
        }
        for (stage, id) in self.all.iter_mut().zip(ids) {
            stage.free_snapshot(*id);
        }
    }
}

impl Drop for Stages {
    fn drop(&mut self) {
        while let Some(stage) = self.all.pop() {
            drop(stage);
        }
    }
}
