//! The dense feed-forward: `update = down · (activation(gate · y) * (up · y))`.

use contract::GateActivation;

use crate::linear::apply_all;
use crate::pass::ExecContext;
use crate::weights::Dense;

/// The feed-forward of `y` `[n, hidden]` into `out`, through three buffers `[n, ffn]`.
pub(crate) fn apply(
    compute: ExecContext<'_>,
    weights: &Dense,
    y: &[f32],
    [gate, up, mixed]: [&mut [f32]; 3],
    out: &mut [f32],
) {
    let n_rows = y.len() / weights.gate.cols();
    let parts = &mut [(&weights.gate, &mut *gate), (&weights.up, &mut *up)];
    apply_all(compute.pool, y, n_rows, parts);
    let rows = (n_rows, weights.gate.rows());
    combine(compute, weights.activation, rows, [gate, up], mixed);
    weights.down.apply(compute.pool, mixed, n_rows, out);
}

/// `mixed = activation(gate) * up`, all `[n, ffn]`.
pub(super) fn combine(
    compute: ExecContext<'_>,
    activation: GateActivation,
    (n_rows, width): (usize, usize),
    [gate, up]: [&[f32]; 2],
    mixed: &mut [f32],
) {
    let size = compute.grain(n_rows) * width;
    let rows = gate.chunks(size).zip(up.chunks(size));
    let rows = rows.zip(mixed.chunks_mut(size));
    let gated = match activation {
        GateActivation::Silu => compute.kernels.swiglu,
        GateActivation::GeluTanh => compute.kernels.geglu,
    };
    compute.pool.for_each_item(rows, |((gate, up), mixed)| {
        gated(gate, up, mixed);
    });
}
