//! Access to a runner's internals, for conformance tests only.

use contract::inspect::Inspect;
use contract::quant::hadamard;
use contract::{DeviceError, LoadConfig, LoadProgress, Runner, SeqId, TokenId};

use crate::device::CpuBackend;
use crate::reference::kv;
use crate::runner::CpuRunner;
use crate::state::LayerState;

/// A runner with inspection.
pub trait InspectedRunner: Runner + Inspect {}

impl InspectedRunner for CpuRunner {}

impl CpuBackend {
    /// Opens a model like [`Backend::open`](contract::Backend::open), with inspection.
    pub fn open_inspected(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn InspectedRunner>, DeviceError> {
        Ok(Box::new(self.open_runner(config, progress)?))
    }
}

impl CpuRunner {
    /// The up-to-date state of a layer.
    fn layer(&mut self, seq: SeqId, layer: usize) -> Result<(usize, &LayerState), DeviceError> {
        let sequence = self
            .sequences
            .get_mut(&seq)
            .ok_or(DeviceError::UnknownSequence(seq))?;
        if sequence.pending.is_none() {
            sequence.apply_deferred(&self.pool, &self.kernels);
        }
        let n_layers = sequence.layers.len();
        let state = sequence.layers.get(layer).ok_or_else(|| {
            contract::protocol::invalid_call("inspect", format!("layer {layer} of {n_layers}"))
        })?;
        Ok((sequence.position, state))
    }
}

impl Inspect for CpuRunner {
    fn hidden_states(&mut self, tokens: &[TokenId]) -> Result<Vec<Vec<f32>>, DeviceError> {
        let seq = self.open(tokens.len())?;
        let mut layers = vec![Vec::new(); self.weights.spec.layers.len()];
        let result = self.prefill_seen(seq, tokens, &[], &mut |layer, x| {
            layers[layer].extend_from_slice(x);
        });
        self.close(seq);
        result.map(|_| layers)
    }

    fn delta_state(&mut self, seq: SeqId, layer: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(match self.layer(seq, layer)?.1 {
            LayerState::Delta(delta) => delta.state.clone(),
            LayerState::Attention(_) => Vec::new(),
        })
    }

    fn conv_window(&mut self, seq: SeqId, layer: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(match self.layer(seq, layer)?.1 {
            LayerState::Delta(delta) => delta.window.clone(),
            LayerState::Attention(_) => Vec::new(),
        })
    }

    fn kv_rows(&mut self, seq: SeqId, layer: usize) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
        let (position, state) = self.layer(seq, layer)?;
        let LayerState::Attention(cache) = state else {
            return Ok((Vec::new(), Vec::new()));
        };
        let shape = cache.shape;
        let values = position * shape.n_kv_heads * shape.head_dim;
        let (mut k, mut v) = (vec![0.0; values], vec![0.0; values]);
        let keys = &cache.keys[..position * shape.k_bytes()];
        let values = &cache.values[..position * shape.v_bytes()];
        for (codec, bytes, rows) in [(shape.k, keys, &mut k), (shape.v, values, &mut v)] {
            kv::decode(codec.format(), bytes, rows);
            if codec.is_rotated() {
                rows.chunks_exact_mut(shape.head_dim)
                    .for_each(hadamard::rotate_inverse);
            }
        }
        Ok((k, v))
    }
}
