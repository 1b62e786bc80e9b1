//! The dense feed-forward: `update = down · (activation(gate · y) * (up · y))`.

use contract::GateActivation;

use crate::linear::apply_all;
use crate::pass::{ExecContext, PassBuffers};
use crate::weights::{Dense, LayerWeights};

/// Reads `buffers.y`, writes `buffers.update`; uses the wide buffers for the projections.
pub(crate) fn apply(
    compute: ExecContext<'_>,
    layer: &LayerWeights,
    buffers: &mut PassBuffers,
    n_rows: usize,
) {
    let (hidden, width) = (layer.ffn.gate.cols(), layer.ffn.gate.rows());
    let (parts, _) = buffers.split();
    let wide = n_rows * width;
    let buffers = [
        &mut parts.a[..wide],
        &mut parts.b[..wide],
        &mut parts.c[..wide],
    ];
    let y = &parts.y[..n_rows * hidden];
    let update = &mut parts.update[..n_rows * hidden];
    dense(compute, &layer.ffn, y, buffers, update);
}

/// The feed-forward of `y` `[n, hidden]` into `out`, through three buffers `[n, ffn]`.
pub(crate) fn dense(
    compute: ExecContext<'_>,
    weights: &Dense,
    y: &[f32],
    [gate, up, mixed]: [&mut [f32]; 3],
    out: &mut [f32],
) {
    let n_rows = y.len() / weights.gate.cols();
    let parts = &mut [(&weights.gate, &mut *gate), (&weights.up, &mut *up)];
    apply_all(compute.pool, y, n_rows, parts);
    let size = compute.grain(n_rows) * weights.gate.rows();
    let rows = gate.chunks(size).zip(up.chunks(size));
    let rows = rows.zip(mixed.chunks_mut(size));
    let gated = match weights.activation {
        GateActivation::Silu => compute.kernels.swiglu,
        GateActivation::GeluTanh => compute.kernels.geglu,
    };
    compute.pool.for_each_item(rows, |((gate, up), mixed)| {
        gated(gate, up, mixed);
    });
    weights.down.apply(compute.pool, mixed, n_rows, out);
}
