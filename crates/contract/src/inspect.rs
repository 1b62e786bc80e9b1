//! Access to a runner's internal state, for tests: it shows which layer diverged.

use crate::{DeviceError, SeqId, TokenId};

/// Committed state of a sequence that tests can read, as f32.
pub trait Inspect {
    /// Runs `tokens` `[n]` on a fresh sequence and gives the residual stream after each layer,
    /// `[n_layers][n, hidden]`.
    fn hidden_states(&mut self, tokens: &[TokenId]) -> Result<Vec<Vec<f32>>, DeviceError>;

    /// Delta state of layer `layer`, `[n_v_heads, k_dim, v_dim]`; empty for an attention layer.
    fn delta_state(&mut self, seq: SeqId, layer: usize) -> Result<Vec<f32>, DeviceError>;

    /// Convolution window of layer `layer`, `[conv_taps - 1, channels]`, oldest first, before the
    /// SiLU.
    fn conv_window(&mut self, seq: SeqId, layer: usize) -> Result<Vec<f32>, DeviceError>;

    /// Cached keys and values of layer `layer` (behind the trunk's last: that of the
    /// multi-token-prediction head), dequantized: each `[position, n_kv_heads,
    /// head_dim]`.
    fn kv_rows(&mut self, seq: SeqId, layer: usize) -> Result<(Vec<f32>, Vec<f32>), DeviceError>;
}
