//! Access to layer outputs and states, for conformance tests only.

use contract::inspect::Inspect;
use contract::protocol::invalid_call;
use contract::quant::{dequantize_row, hadamard, tq3};
use contract::{DeviceError, LoadConfig, LoadProgress, Runner, SeqId, TokenId};

use crate::backend::CudaBackend;
use crate::runner::CudaRunner;
use crate::snapshot::{append_neutral, neutral_bytes, neutral_states, runs};
use crate::state::{KvArray, KvGroup, LayerState};

/// A runner with inspection.
pub trait InspectedRunner: Runner + Inspect {}

impl InspectedRunner for CudaRunner {}

impl CudaBackend {
    /// As [`Backend::open`](contract::Backend::open), with inspection.
    pub fn open_inspected(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn InspectedRunner>, DeviceError> {
        Ok(Box::new(self.open_runner(config, progress)?))
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]]))
        .collect()
}

impl CudaRunner {
    /// Slot and position of a sequence, after a check of `layer`.
    fn place(&self, seq: SeqId, layer: usize) -> Result<(usize, usize), DeviceError> {
        let sequence = self.sequence(seq)?;
        let n_layers = self.engine.state().n_layers();
        if layer >= n_layers {
            return Err(invalid_call(
                "inspect",
                format!("layer {layer} of {n_layers}"),
            ));
        }
        Ok((sequence.slot, sequence.position))
    }

    /// One KV array dequantized to f32, `[position, n_kv_heads, head_dim]`.
    fn rows(
        &self,
        (group, index): (&KvGroup, usize),
        array: &KvArray,
        (places, position): (&[usize], usize),
    ) -> Result<Vec<f32>, DeviceError> {
        let mut stored = Vec::with_capacity(neutral_bytes(group, array, position));
        for (page, within) in runs(0..position, usize::MAX) {
            let plane = |base: u64, row_bytes: usize| {
                let page_bytes = group.page_rows() * row_bytes;
                let at = index * group.layer_bytes(row_bytes) + places[page] * page_bytes;
                match page_bytes {
                    0 => Ok(Vec::new()),
                    bytes => self.engine.read(base + at as u64, bytes),
                }
            };
            let values = plane(array.values, array.value_bytes)?;
            let scales = plane(array.scales, array.scale_bytes)?;
            append_neutral((group, array), within, (&values, &scales), &mut stored);
        }
        let dim = group.head_dim;
        let mut out = vec![0.0; position * group.n_kv_heads * dim];
        match array.format.block_type() {
            Some(ty) => dequantize_row(ty, &stored, &mut out),
            None => tq3::dequantize(&stored, &mut out),
        }
        if array.format.is_quantized() {
            out.chunks_exact_mut(dim).for_each(hadamard::rotate_inverse);
        }
        Ok(out)
    }
}

impl Inspect for CudaRunner {
    fn hidden_states(&mut self, tokens: &[TokenId]) -> Result<Vec<Vec<f32>>, DeviceError> {
        let seq = self.open(tokens.len())?;
        self.engine.watch_layers(true);
        let mut layers = vec![Vec::new(); self.engine.spec().layers.len()];
        let result = self.prefill_with(seq, tokens, &[], &mut |engine, _| {
            for (all, seen) in layers.iter_mut().zip(engine.take_layers()) {
                all.extend(floats(&seen));
            }
            Ok(())
        });
        self.engine.watch_layers(false);
        self.close(seq);
        result.map(|_| layers)
    }

    fn delta_state(&mut self, seq: SeqId, layer: usize) -> Result<Vec<f32>, DeviceError> {
        let (slot, _) = self.place(seq, layer)?;
        let LayerState::Delta(group, index) = self.engine.state().layer(layer) else {
            return Ok(Vec::new());
        };
        let bytes = group.state_bytes;
        let at = group.states + (slot * group.slot_bytes(bytes) + index * bytes) as u64;
        Ok(floats(&neutral_states(
            group,
            &self.engine.read(at, bytes)?,
        )))
    }

    fn conv_window(&mut self, seq: SeqId, layer: usize) -> Result<Vec<f32>, DeviceError> {
        let (slot, _) = self.place(seq, layer)?;
        let LayerState::Delta(group, index) = self.engine.state().layer(layer) else {
            return Ok(Vec::new());
        };
        let bytes = group.window_bytes;
        let at = group.windows + (slot * group.slot_bytes(bytes) + index * bytes) as u64;
        Ok(floats(&self.engine.read(at, bytes)?))
    }

    fn kv_rows(&mut self, seq: SeqId, layer: usize) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
        let (_, position) = self.place(seq, layer)?;
        let page_indices = self.page_indices(self.sequence(seq)?);
        let place = (&page_indices[..], position);
        let LayerState::Kv(group, index) = self.engine.state().layer(layer) else {
            return Ok((Vec::new(), Vec::new()));
        };
        Ok((
            self.rows((group, index), &group.k, place)?,
            self.rows((group, index), &group.v, place)?,
        ))
    }
}
