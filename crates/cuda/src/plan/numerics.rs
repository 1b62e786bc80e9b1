//! Which numerics the decode steps of a model have: the one place that decides it.
//!
//! GEMMs, norms and the LM head give a row the same bits whatever shares the step, so this concerns
//! attention and the delta rule. A draft's own layers and the ends of prompts always take the
//! fastest kernels: a draft is verified, and a prompt is prefilled in the same way whatever follows
//! it.

use contract::OpenPlan;

use super::layer_arguments::shape;
use super::select::uses_f16_queries;
use crate::gpu_props::GpuProps;
use crate::launch::attention::AttentionConfig;
use crate::numerics::Numerics;

/// The numerics that a plan is opened with: what the plan requires, else what was `requested`, else
/// the batch-invariant kernels where they exist at little cost.
pub(crate) fn numerics_of(open: &OpenPlan, gpu: GpuProps, requested: Option<Numerics>) -> Numerics {
    if open.batch_invariant {
        return Numerics::BatchInvariant;
    }
    let default = if has_fast_invariant_kernels(open, gpu) {
        Numerics::BatchInvariant
    } else {
        Numerics::Fastest
    };
    requested.unwrap_or(default)
}

/// Whether all layers have batch-invariant kernels that cost little more than the fastest: on
/// compute capability 9.0, for heads and KV types that attention with fixed KV splits supports
/// (`kernels/attention/decode_fixed_splits_sm90.cu`).
fn has_fast_invariant_kernels(open: &OpenPlan, gpu: GpuProps) -> bool {
    let config = attention_config(gpu, Numerics::BatchInvariant, false);
    let eps = open.target.norm_eps;
    let mut layers = open.target.attention_layers();
    gpu.has_wgmma && layers.all(|a| uses_f16_queries(&shape(a, open, eps), config))
}

/// What attention is launched with.
pub(crate) fn attention_config(
    gpu: GpuProps,
    numerics: Numerics,
    tree_windows: bool,
) -> AttentionConfig {
    AttentionConfig {
        gpu,
        numerics,
        tree_windows,
    }
}
