//! The feed-forward of a layer: dense, or a mixture of experts.

use super::{dense, experts};
use crate::layer_buffers::ExpertBuffers;
use crate::pass::{ExecContext, PassBuffers};
use crate::weights::{LayerFfn, LayerWeights};

/// Reads `buffers.y`, writes `buffers.update`; uses the wide buffers for the projections.
pub(crate) fn apply(
    compute: ExecContext<'_>,
    layer: &LayerWeights,
    buffers: &mut PassBuffers,
    n_rows: usize,
) {
    let (parts, _) = buffers.split();
    let wide = n_rows * layer.ffn.dense_width();
    let wide = [
        &mut parts.a[..wide],
        &mut parts.b[..wide],
        &mut parts.c[..wide],
    ];
    let all = n_rows * layer.ffn_norm.len();
    let update = &mut parts.update[..all];
    apply_to(
        compute,
        &layer.ffn,
        &parts.y[..all],
        (wide, parts.experts),
        update,
    );
}

/// The feed-forward of `y` `[n, hidden]` into `out`, through three buffers `[n, dense width]` and
/// those of experts.
pub(crate) fn apply_to(
    compute: ExecContext<'_>,
    weights: &LayerFfn,
    y: &[f32],
    (wide, buffers): ([&mut [f32]; 3], &mut ExpertBuffers),
    out: &mut [f32],
) {
    match weights {
        LayerFfn::Dense(weights) => dense::apply(compute, weights, y, wide, out),
        LayerFfn::Experts(weights) => experts::apply(compute, weights, y, (wide, buffers), out),
    }
}
