//! Buffers of the layers that drafts run: those of a draft model, and that of a
//! multi-token-prediction head.

use contract::MoeSpec;

use crate::reference::router::ChosenExpert;

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
    /// Of a layer with experts.
    pub(crate) experts: ExpertBuffers,
    /// `[n, rope dims / 2]` each.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
}

/// Buffers of the experts of a layer, whose rows are grouped by expert: a row of the pass is there
/// once for each of its experts.
#[derive(Default)]
pub(crate) struct ExpertBuffers {
    /// `[n, n_experts]`.
    pub(crate) logits: Vec<f32>,
    /// `[n]`: factors on the output of the shared expert.
    pub(crate) factors: Vec<f32>,
    /// `[n, n_used]`.
    pub(crate) choices: Vec<ChosenExpert>,
    /// `[n_experts + 1]`: the grouped rows of expert `e` are those from `starts[e]` to
    /// `starts[e + 1]`.
    pub(crate) starts: Vec<usize>,
    /// `[n * n_used]`: the row of the pass that a grouped row is.
    pub(crate) rows: Vec<usize>,
    /// `[n, n_used]`: the grouped row of each choice.
    pub(crate) slots: Vec<usize>,
    /// `[n * n_used, hidden]`: inputs of the experts, then their outputs.
    pub(crate) grouped: Vec<f32>,
    /// `[n * n_used, ffn]` each.
    pub(crate) wide: [Vec<f32>; 3],
}

impl ExpertBuffers {
    /// Floats, or as many bytes of other values, per row of a pass.
    pub(crate) fn floats_per_row(spec: &MoeSpec) -> usize {
        let words = size_of::<ChosenExpert>() + 2 * size_of::<usize>();
        let each = spec.down.rows() + 3 * spec.width() + words / size_of::<f32>();
        spec.n_experts + 1 + spec.n_used * each
    }
}

/// The first `len` values of a buffer, which grows if needed.
pub(crate) fn sized<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
