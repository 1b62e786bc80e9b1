//! Shapes and addresses of a layer, as its launches take them.

use contract::{AttentionSpec, LoadConfig, OutputGate};

use super::PlanContext;
use crate::launch::Launch;
use crate::launch::all_reduce::{self, ExchangeShape};
use crate::launch::attention::{Cache, Mask, Shape};
use crate::launch::gated_delta::{self, Layer, Slots};
use crate::launch::norm::{self, Residual, RmsShape, RowSource};
use crate::state::{DeltaGroup, KvGroup};
use crate::weights::DeltaWeights;

/// The shape of a layer for the attention kernels.
pub(super) fn shape(a: &AttentionSpec, load_config: &LoadConfig, eps: f32) -> Shape {
    Shape {
        n_heads: a.n_heads,
        n_kv_heads: a.n_kv_heads,
        head_dim: a.head_dim,
        rope: a.rope,
        gate: a.gate == OutputGate::SigmoidPerHead,
        normed: a.q_norm.is_some(),
        values_normed: false,
        k: load_config.kv.k,
        v: load_config.kv.v,
        rotated: true,
        eps,
        scale: a.scale,
        window: a.window.unwrap_or(0),
        mask: Mask::Ancestors,
        ring_pages: 0,
    }
}

/// The launch of a norm behind a block: `x += rms(update) * weight`, with f32 rows at `update`.
pub(super) fn norm_behind(
    context: &PlanContext<'_>,
    (rows, source): (usize, RowSource),
    update: u64,
    weight: u64,
) -> Launch {
    let rms = RmsShape {
        width: context.spec.hidden,
        eps: context.spec.norm_eps,
    };
    let to = Residual {
        rows: context.addresses.residual,
        update,
    };
    norm::add_normed(rms, rows, source, to, weight)
}

/// The launches of an all-reduce: `x += sum of the shards' products`, with this shard's at
/// `update`, through the norm `post_norm` if it is not 0.
pub(super) fn sum_of_shards(
    context: &PlanContext<'_>,
    shape: ExchangeShape,
    (rows, source): (usize, RowSource),
    (update, post_norm): (u64, u64),
) -> Vec<Launch> {
    let exchange = context.addresses.exchange;
    if post_norm != 0 {
        let sum = all_reduce::sum(shape, rows, source, update, exchange);
        return vec![sum, norm_behind(context, (rows, source), update, post_norm)];
    }
    let to = Residual {
        rows: context.addresses.residual,
        update,
    };
    vec![all_reduce::add(shape, rows, source, to, exchange)]
}

/// Addresses of a layer's KV cache.
pub(super) fn cache(context: &PlanContext<'_>, group: &KvGroup, index: usize) -> Cache {
    let at = |base: u64, row_bytes: usize| match row_bytes {
        0 => 0,
        bytes => base + (index * group.layer_bytes(bytes)) as u64,
    };
    Cache {
        k: at(group.k.values, group.k.value_bytes),
        k_scale: at(group.k.scales, group.k.scale_bytes),
        v: at(group.v.values, group.v.value_bytes),
        v_scale: at(group.v.scales, group.v.scale_bytes),
        page_table: context.state.page_table,
        max_pages: context.state.slots.pages_per_sequence,
    }
}

/// Addresses of a delta layer's states and vectors.
pub(super) fn delta_layer(
    context: &PlanContext<'_>,
    group: &DeltaGroup,
    index: usize,
    weights: &DeltaWeights,
) -> Layer {
    let slots = |base: u64, layer_bytes: usize| Slots {
        at: base + (index * layer_bytes) as u64,
        stride: group.slot_bytes(layer_bytes) as u64,
    };
    Layer {
        state: slots(group.states, group.state_bytes),
        window: slots(group.windows, group.window_bytes),
        factors: slots(group.factors, group.factor_bytes),
        conv: weights.conv,
        a: weights.a,
        dt: weights.dt,
        norm: weights.norm,
        eps: context.spec.norm_eps,
    }
}

/// The outputs of a delta layer's projections, in the order `qkv`, `z`, `beta`, `alpha`.
pub(super) fn delta_inputs(w: &DeltaWeights, projected: &[u64]) -> gated_delta::GatedDeltaInputs {
    let input_projections = [w.qkv, w.z, w.beta, w.alpha];
    let rows = |i: usize| gated_delta::StridedRows {
        at: projected[i],
        stride: input_projections[i].rows,
    };
    gated_delta::GatedDeltaInputs {
        qkv: rows(0),
        z: rows(1),
        beta: rows(2),
        alpha: rows(3),
    }
}
