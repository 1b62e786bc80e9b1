//! The runner as a pipeline stage.

use std::ops::Range;

use contract::protocol::PrefillChunks;
use contract::{DeviceError, SeqId, Shard, Stage, StageOutput};

use super::CpuRunner;
use crate::exchange::{self, ExchangeEnd};
use crate::pass::CHUNK;

impl Stage for CpuRunner {
    fn passes(&self, position: usize, n: usize) -> Vec<Range<usize>> {
        self.chunks().split(position, n)
    }

    fn items_per_pass(&self, nodes: &[usize]) -> usize {
        let mut sum = 0;
        let fits = nodes.iter().take_while(|nodes| {
            sum += **nodes;
            sum <= self.max_rows
        });
        fits.count().max(1)
    }

    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        self.give_pages(seq, rows)
    }

    fn connect(&mut self, below: &mut dyn StageOutput) -> Result<(), DeviceError> {
        if let Some(shard) = self.which_shard() {
            let end = exchange::end_beside(below, shard)?;
            self.exchange_through(end);
        }
        Ok(())
    }

    fn receive(&mut self, below: &mut dyn StageOutput, rows: usize) -> Result<(), DeviceError> {
        self.stage.receive(below, rows)
    }

    fn output(&mut self) -> &mut dyn StageOutput {
        &mut self.stage
    }
}

impl CpuRunner {
    /// Which shard of a tensor split it runs.
    pub(crate) fn which_shard(&self) -> Option<Shard> {
        self.stage.shard()
    }

    /// Adds partial sums up through this end of an exchange.
    pub(crate) fn exchange_through(&mut self, end: ExchangeEnd) {
        self.exchange = Some(end);
    }

    /// Ends the passes of the other shards, after an error of this one's.
    pub(crate) fn fail_exchange(&self, error: &DeviceError) {
        if let Some(exchange) = &self.exchange {
            exchange.fail(error);
        }
    }

    /// How prompts are cut into passes.
    pub(super) fn chunks(&self) -> PrefillChunks {
        PrefillChunks {
            max_tokens: self.max_rows,
            align: CHUNK,
        }
    }
}
