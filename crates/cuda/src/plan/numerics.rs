//! Which numerics the decode steps of a model have: the one place that decides it.
//!
//! GEMMs, norms and the LM head give a row the same bits whatever shares the step, so this concerns
//! attention and the delta rule. Draft layers and the ends of prompts always use the fastest
//! kernels. A draft is verified, and a prompt is prefilled in the same way whatever follows it.

use contract::LoadConfig;

use super::layer_arguments::shape;
use super::select::uses_f16_queries;
use crate::gpu_props::GpuProps;
use crate::launch::attention::AttentionConfig;
use crate::numerics::Numerics;

/// The numerics with which a model is opened: those that its configuration requires, else those
/// `requested`. Without either, batch-invariant kernels where they cost little.
pub(crate) fn numerics_of(
    load_config: &LoadConfig,
    gpu: GpuProps,
    requested: Option<Numerics>,
) -> Numerics {
    if load_config.batch_invariant {
        return Numerics::BatchInvariant;
    }
    let default = if has_fast_invariant_kernels(load_config, gpu) {
        Numerics::BatchInvariant
    } else {
        Numerics::Fastest
    };
    requested.unwrap_or(default)
}

/// Whether all layers have batch-invariant kernels that cost little more than the fastest: heads
/// and KV types that attention with fixed KV splits supports
/// (`kernels/attention/fixed_splits.cuh`).
fn has_fast_invariant_kernels(load_config: &LoadConfig, gpu: GpuProps) -> bool {
    let config = attention_config(gpu, Numerics::BatchInvariant, false);
    let eps = load_config.target.norm_eps;
    let mut layers = load_config.target.attention_layers();
    layers.all(|a| uses_f16_queries(&shape(a, load_config, eps), config))
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
