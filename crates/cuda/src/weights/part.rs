//! The part of a model whose weights are laid out.

use contract::{GateActivation, LayerSpec, Mixer, ModelSpec, WeightRef};

/// The table stays on the host if all weights are this many times as large. Host rows arrive one or
/// two microseconds later, which matters in a small model's step.
const HOST_TABLE_RATIO: usize = 16;

/// What of a model is laid out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WeightPart<'a> {
    pub(crate) spec: &'a ModelSpec,
    /// With these, experts lie in host memory and in so many slots of each layer.
    pub(crate) slots: Option<usize>,
    /// Whether the embedding table stays in host memory.
    pub(crate) table_on_host: bool,
    /// The layer above those of a pipeline stage, if its input is projected here.
    pub(crate) above: Option<&'a LayerSpec>,
}

impl<'a> WeightPart<'a> {
    /// A whole model.
    #[cfg(test)]
    pub(crate) fn whole(spec: &'a ModelSpec, slots: Option<usize>) -> WeightPart<'a> {
        WeightPart {
            spec,
            slots,
            table_on_host: table_on_host(spec),
            above: None,
        }
    }
}

/// Whether the embedding table of a model stays in host memory.
pub(crate) fn table_on_host(spec: &ModelSpec) -> bool {
    let all: usize = spec.weights().into_iter().map(WeightRef::bytes).sum();
    HOST_TABLE_RATIO * spec.embedding.bytes() <= all
}

/// The matrices that project the input of a mixer, in its order.
pub(crate) fn mixer_inputs(mixer: &Mixer) -> Vec<&WeightRef> {
    match mixer {
        Mixer::Attention(a) => vec![&a.q, &a.k, &a.v],
        Mixer::GatedDelta(d) => vec![&d.qkv, &d.z, &d.beta, &d.alpha],
    }
}

/// Whether the products of a layer can end in the residual and its gated unit is SwiGLU, as fused
/// launches have it.
pub(crate) fn fuses(layer: &LayerSpec) -> bool {
    layer.post_mixer_norm.is_none()
        && layer.post_ffn_norm.is_none()
        && layer.ffn.activation() == GateActivation::Silu
}
