//! The rows that a pipeline stage receives from the stage below and hands over to the stage above.

use std::any::Any;

use contract::protocol::invalid_call;
use contract::{DeviceError, LogitsRequest, LogitsSelection, Shard, StageConfig, StageOutput};

use crate::draft::HiddenStateCapture;

/// Rows of the passes of a stage. A whole model is a stage that receives and hands over nothing.
pub(crate) struct StageRows {
    /// The stage's first layer in the whole model.
    first_layer: usize,
    /// Its share of its layers, in a tensor split.
    shard: Option<Shard>,
    is_first: bool,
    has_head: bool,
    is_last: bool,
    hidden: usize,
    /// Layers whose captured hidden states come with the input.
    received: Vec<usize>,
    /// Layers whose captured hidden states go with the output.
    handed_over: Vec<usize>,
    /// Input of the next pass, `[1 + received, n, hidden]`; empty once the pass has taken it.
    input: Vec<f32>,
    /// Output of the last pass, `[1 + handed_over, n, hidden]`.
    output: Vec<f32>,
    /// Rows of the last pass.
    n_rows: usize,
}

impl StageRows {
    pub(crate) fn of(stage: &StageConfig) -> StageRows {
        StageRows {
            first_layer: stage.layers.start,
            shard: stage.which_shard(),
            is_first: stage.is_first(),
            has_head: stage.has_head(),
            is_last: stage.is_last(),
            hidden: stage.model.target.hidden,
            received: stage.received_layers(),
            handed_over: stage.handed_over_layers(),
            input: Vec::new(),
            output: Vec::new(),
            n_rows: 0,
        }
    }

    /// The stage's first layer in the whole model.
    pub(crate) fn first_layer(&self) -> usize {
        self.first_layer
    }

    /// Which share of its layers the stage has, in a tensor split.
    pub(crate) fn shard(&self) -> Option<Shard> {
        self.shard
    }

    /// Whether the stage looks up the embeddings of its rows.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Refuses logits where there is no LM head.
    pub(crate) fn require_head<'a>(
        &self,
        call: &'static str,
        mut requests: impl Iterator<Item = &'a LogitsRequest>,
    ) -> Result<(), DeviceError> {
        if self.has_head || requests.all(|ask| ask.selection == LogitsSelection::None) {
            return Ok(());
        }
        let detail = "logits of a stage without the LM head".to_owned();
        Err(invalid_call(call, detail))
    }

    /// Receives the `rows` rows that `below` has left.
    pub(crate) fn receive(
        &mut self,
        below: &mut dyn StageOutput,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let parts = 1 + self.received.len();
        self.input.resize(parts * rows * self.hidden, 0.0);
        below.read(rows, &mut self.input)
    }

    /// Begins a pass of `n` rows: fills the residual stream `x` `[n, hidden]` in all stages but
    /// the first, and passes on what the layers below have captured.
    pub(crate) fn begin(
        &mut self,
        n: usize,
        x: &mut [f32],
        capture: &mut HiddenStateCapture<'_>,
    ) -> Result<(), DeviceError> {
        self.n_rows = n;
        if !self.is_last {
            let parts = 1 + self.handed_over.len();
            self.output.resize(parts * n * self.hidden, 0.0);
        }
        if self.is_first {
            return Ok(());
        }
        let mut input = std::mem::take(&mut self.input);
        if input.len() != (1 + self.received.len()) * n * self.hidden {
            let detail = format!("{n} rows, but the stage below handed over others");
            return Err(invalid_call("a pass of a stage", detail));
        }
        let mut parts = input.chunks_exact(n * self.hidden);
        if let Some(residual) = parts.next() {
            x.copy_from_slice(residual);
        }
        for (i, rows) in parts.enumerate() {
            let layer = self.received[i];
            capture.take(layer, rows);
            self.keep(layer, rows);
        }
        // The allocation serves the next pass.
        input.clear();
        self.input = input;
        Ok(())
    }

    /// Notes the rows `[n, hidden]` after a layer of the whole model.
    pub(crate) fn keep(&mut self, layer: usize, x: &[f32]) {
        let Some(part) = self.handed_over.iter().position(|kept| *kept == layer) else {
            return;
        };
        self.output[(1 + part) * x.len()..][..x.len()].copy_from_slice(x);
    }

    /// Ends a pass that leaves the residual stream `x` `[n, hidden]`.
    pub(crate) fn end(&mut self, x: &[f32]) {
        if !self.is_last {
            self.output[..x.len()].copy_from_slice(x);
        }
    }
}

impl StageOutput for StageRows {
    fn read(&mut self, rows: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        if rows != self.n_rows || out.len() != self.output.len() {
            let detail = format!("{rows} rows, but the last pass had {}", self.n_rows);
            return Err(invalid_call("reading the rows of a stage", detail));
        }
        out.copy_from_slice(&self.output);
        Ok(())
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}
