//! Buffers of the layers that drafts run: those of a draft model, and that of a
//! multi-token-prediction head.

/// Buffers of a pass. Later passes reuse them and grow them if needed.
#[derive(Default)]
pub(crate) struct LayerBuffers {
    /// `[n, hidden]` each: residual stream, normalised stream, output of a sublayer.
    pub(crate) x: Vec<f32>,
    pub(crate) y: Vec<f32>,
    pub(crate) update: Vec<f32>,
    /// `[n, n_heads, head_dim]`, with the gate of layers that have one.
    pub(crate) q: Vec<f32>,
    /// `[n, n_heads, head_dim]`.
    pub(crate) heads: Vec<f32>,
    /// `[n, n_kv_heads, head_dim]` each for keys and values: of one layer in a pass, of all layers
    /// where committed tokens are projected.
    pub(crate) kv: Vec<f32>,
    /// `[n, ffn]` each.
    pub(crate) wide: [Vec<f32>; 3],
    /// `[n, rope dims / 2]` each.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
}

/// The first `len` values of a buffer, which grows if needed.
pub(crate) fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
