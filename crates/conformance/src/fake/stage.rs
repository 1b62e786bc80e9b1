//! The fake runner as a pipeline stage. Every stage knows the whole language; the rows between two
//! stages are only counted.

use std::any::Any;
use std::ops::Range;

use contract::protocol::{PrefillChunks, invalid_call};
use contract::{
    DeviceError, LogitsRequest, LogitsRow, Runner, SeqId, Stage, StageOutput, TokenId, Tree,
    VerifyItem,
};

use super::FakeRunner;

/// A stage over a fake runner.
pub(super) struct FakeStage {
    runner: FakeRunner,
    is_first: bool,
    /// Rows received for the next pass.
    received: Option<usize>,
    output: FakeRows,
    /// The rows of the verify that has begun.
    begun: Option<Vec<Vec<LogitsRow>>>,
}

/// Rows of the last pass.
struct FakeRows(usize);

impl FakeStage {
    pub(super) fn new(runner: FakeRunner, is_first: bool) -> FakeStage {
        FakeStage {
            runner,
            is_first,
            received: None,
            output: FakeRows(0),
            begun: None,
        }
    }

    /// Begins a pass of `rows` rows.
    fn begin(&mut self, rows: usize) -> Result<(), DeviceError> {
        let received = self.received.take();
        if !self.is_first && received != Some(rows) {
            let detail = format!("{rows} rows, but {received:?} were received");
            return Err(invalid_call("a pass of a stage", detail));
        }
        self.output.0 = rows;
        Ok(())
    }
}

impl Runner for FakeStage {
    contract::forward_runner!(self => self.runner; info, capacity, open, close, draft,
        draft_logits, draft_mtp, commit, discard, snapshot, restore, free_snapshot, detach, export,
        import, import_at);

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.begin(tokens.len())?;
        self.runner.prefill(seq, tokens, requests)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.begin(items.iter().map(|item| item.tree.len()).sum())?;
        self.runner.verify(items)
    }

    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        self.begun = Some(self.verify(items)?);
        Ok(())
    }

    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let detail = || "nothing has begun".to_owned();
        let begun = self.begun.take();
        begun.ok_or_else(|| invalid_call("finish_verify", detail()))
    }
}

impl Stage for FakeStage {
    fn passes(&self, position: usize, n: usize) -> Vec<Range<usize>> {
        let info = self.runner.info();
        let chunks = PrefillChunks {
            max_tokens: info.limits.prefill_chunk,
            align: info.prefill_align,
        };
        chunks.split(position, n)
    }

    fn items_per_pass(&self, nodes: &[usize]) -> usize {
        let mut sum = 0;
        let fits = nodes.iter().take_while(|nodes| {
            sum += **nodes;
            sum <= Tree::MAX_NODES
        });
        fits.count().max(1)
    }

    fn reserve(&mut self, seq: SeqId, rows: usize) -> Result<(), DeviceError> {
        self.runner.give_pages(seq, rows)
    }

    fn connect(&mut self, _below: &mut dyn StageOutput) -> Result<(), DeviceError> {
        Ok(())
    }

    fn receive(&mut self, below: &mut dyn StageOutput, rows: usize) -> Result<(), DeviceError> {
        below.read(rows, &mut [])?;
        self.received = Some(rows);
        Ok(())
    }

    fn output(&mut self) -> &mut dyn StageOutput {
        &mut self.output
    }
}

impl StageOutput for FakeRows {
    fn read(&mut self, rows: usize, _out: &mut [f32]) -> Result<(), DeviceError> {
        if rows == self.0 {
            return Ok(());
        }
        let detail = format!("{rows} rows, but the last pass had {}", self.0);
        Err(invalid_call("reading the rows of a stage", detail))
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}
