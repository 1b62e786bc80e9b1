//! The runner as a pipeline stage. All stages are driven by one thread, so each call makes its GPU
//! the current one.

use std::ops::Range;
use std::time::Duration;

use contract::protocol::{PrefillChunks, invalid_call};
use contract::{Capacity, DeviceError, Runner, RunnerInfo, SeqId, Stage, StageOutput};

use super::CudaRunner;
use crate::exec::{Boundary, PeerAccess};
use crate::step;

/// One stage on one GPU.
pub(crate) struct CudaStage {
    runner: CudaRunner,
    peer_access: PeerAccess,
    /// How long a shard waits for the other's sums at most.
    watchdog: Duration,
}

impl CudaStage {
    pub(crate) fn new(
        runner: CudaRunner,
        peer_access: PeerAccess,
        watchdog: Duration,
    ) -> CudaStage {
        CudaStage {
            runner,
            peer_access,
            watchdog,
        }
    }

    /// The runner, with its GPU as the thread's current one.
    fn current(&mut self) -> &mut CudaRunner {
        let entered = self.runner.engine.gpu().make_current();
        // The call reports a fault.
        let _ = self.runner.record_fault(entered);
        &mut self.runner
    }
}

impl Runner for CudaStage {
    fn info(&self) -> &RunnerInfo {
        self.runner.info()
    }

    fn capacity(&self) -> Capacity {
        self.runner.capacity()
    }

    contract::forward_runner!(self => self.current(); open, close, prefill, draft, draft_logits,
        draft_mtp, verify, begin_verify, finish_verify, commit, discard, snapshot, restore,
        free_snapshot, detach, export, import, import_at);
}

impl Stage for CudaStage {
    fn passes(&self, position: usize, n: usize) -> Vec<Range<usize>> {
        let engine = &self.runner.engine;
        let chunks = PrefillChunks {
            max_tokens: engine.chunk_rows(),
            align: self.runner.info.prefill_align,
        };
        engine.passes(chunks, position, n)
    }

    fn items_per_pass(&self, nodes: &[usize]) -> usize {
        let mut sum = 0;
        let fits = nodes.iter().take(step::TREES).take_while(|nodes| {
            sum += **nodes;
            sum <= step::ROWS
        });
        fits.count().max(1)
    }

    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        let runner = self.current();
        runner.require_device()?;
        runner.ensure_pages(seq, rows)
    }

    fn connect(&mut self, below: &mut dyn StageOutput) -> Result<(), DeviceError> {
        let (peer_access, watchdog) = (self.peer_access, self.watchdog);
        let below = boundary_of(below)?;
        let engine = &mut self.current().engine;
        if engine.is_shard() {
            return engine.connect_shards(below, watchdog);
        }
        engine.connect(below, peer_access)
    }

    fn receive(&mut self, below: &mut dyn StageOutput, rows: usize) -> Result<(), DeviceError> {
        let below = boundary_of(below)?;
        let runner = self.current();
        let received = runner.engine.receive(below, rows);
        runner.record_fault(received)
    }

    fn output(&mut self) -> &mut dyn StageOutput {
        let boundary = self.runner.engine.boundary();
        boundary.expect("an engine of a stage below another has boundaries")
    }
}

fn boundary_of(below: &mut dyn StageOutput) -> Result<&mut Boundary, DeviceError> {
    let detail = || "the layers below are not on a GPU".to_owned();
    let below = below.as_any().downcast_mut::<Boundary>();
    below.ok_or_else(|| invalid_call("connect", detail()))
}
