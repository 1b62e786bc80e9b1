//! The device of one scheduler: its runner, the loss of it, and its last out-of-memory error.

use contract::checked::CheckedRunner;
use contract::{Capacity, DeviceError, Runner, RunnerInfo, SeqId, SnapshotId};

use crate::error::JobError;

use super::prefill::chunk_size;

/// Owns the runner. Everything on the device is freed with it.
pub(super) struct Device {
    runner: Box<dyn Runner>,
    /// Size of all prefill chunks, in tokens.
    chunk: usize,
    /// Capacity without any sequence; an idle scheduler must have it back.
    empty: Capacity,
    /// The error that lost the device.
    lost: Option<DeviceError>,
    /// The last out-of-memory error of the current step.
    out_of_memory: Option<JobError>,
    /// Sequences whose verify has begun.
    held: Vec<SeqId>,
    /// Those of them that are closed once it has ended.
    closing: Vec<SeqId>,
}

impl Device {
    /// Takes a freshly opened runner. Debug builds check every call against the protocol.
    pub(super) fn new(runner: Box<dyn Runner>, prefill_chunk: usize) -> Device {
        let runner: Box<dyn Runner> = if cfg!(debug_assertions) {
            Box::new(CheckedRunner::new(runner))
        } else {
            runner
        };
        let info = runner.info();
        let limit = prefill_chunk.min(info.limits.prefill_chunk);
        Device {
            chunk: chunk_size(limit, info.prefill_align),
            empty: runner.capacity(),
            runner,
            lost: None,
            out_of_memory: None,
            held: Vec::new(),
            closing: Vec::new(),
        }
    }

    /// The runner, for calls.
    pub(super) fn runner(&mut self) -> &mut dyn Runner {
        &mut *self.runner
    }

    /// The runner, for queries.
    pub(super) fn as_runner(&self) -> &dyn Runner {
        &*self.runner
    }

    /// The runner's description.
    pub(super) fn info(&self) -> &RunnerInfo {
        self.runner.info()
    }

    /// The free capacity.
    pub(super) fn capacity(&self) -> Capacity {
        self.runner.capacity()
    }

    /// Size of all prefill chunks, in tokens.
    pub(super) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Closes a sequence; one that is held is closed when it is released.
    pub(super) fn close(&mut self, seq: SeqId) {
        if self.held.contains(&seq) {
            self.closing.push(seq);
        } else {
            self.runner.close(seq);
        }
    }

    /// Holds sequences whose verify has begun.
    pub(super) fn hold(&mut self, seqs: impl Iterator<Item = SeqId>) {
        self.held.extend(seqs);
    }

    /// Releases sequences whose verify has ended.
    pub(super) fn release(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        self.held
            .retain(|seq| !seqs.clone().any(|other| other == *seq));
        let closing = std::mem::take(&mut self.closing);
        for seq in closing {
            self.close(seq);
        }
    }

    /// Frees a snapshot.
    pub(super) fn free_snapshot(&mut self, snapshot: SnapshotId) {
        self.runner.free_snapshot(snapshot);
    }

    /// The error that lost the device, if it is lost.
    pub(super) fn lost(&self) -> Option<&DeviceError> {
        self.lost.as_ref()
    }

    /// Records the loss of the device.
    pub(super) fn set_lost(&mut self, error: DeviceError) {
        self.lost = Some(error);
    }

    /// Records an out-of-memory error.
    pub(super) fn set_out_of_memory(&mut self, error: &DeviceError) {
        self.out_of_memory = Some(JobError::from(error));
    }

    /// Whether a call of the current step ran out of memory.
    pub(super) fn ran_out_of_memory(&self) -> bool {
        self.out_of_memory.is_some()
    }

    /// Takes the last out-of-memory error, if there is one.
    pub(super) fn take_out_of_memory(&mut self) -> Option<JobError> {
        self.out_of_memory.take()
    }

    /// Whether an idle scheduler lacks capacity that it had when it was empty. Each leak is
    /// reported once.
    ///
    /// The bytes and pages of saved prefixes are not a leak.
    pub(super) fn has_leaked(&mut self, has_prefixes: bool) -> bool {
        let mut capacity = self.runner.capacity();
        if has_prefixes {
            capacity.snapshot_bytes = self.empty.snapshot_bytes;
            capacity.evictable_tokens = self.empty.evictable_tokens;
        }
        if capacity == self.empty {
            return false;
        }
        tracing::error!(?capacity, empty = ?self.empty, "idle scheduler leaks device capacity");
        self.empty = capacity;
        true
    }
}

/// Whether other sequences hold the KV pool.
pub(super) fn pool_exhausted(error: &DeviceError) -> bool {
    matches!(error, DeviceError::PoolExhausted { .. })
}

/// Whether device memory ran out, rather than pages of the KV pool.
pub(super) fn device_memory_exhausted(error: &DeviceError) -> bool {
    error.is_out_of_memory() && !pool_exhausted(error)
}
