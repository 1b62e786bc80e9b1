//! The dense feed-forward: `update = down · (silu(gate · y) * (up · y))`.

use crate::forward::{Arena, Compute};
use crate::linear::apply_all;
use crate::weights::Layer;

/// Reads `arena.y`, writes `arena.update`; the projections go through the wide buffers.
pub(crate) fn apply(compute: Compute<'_>, layer: &Layer, arena: &mut Arena, n_rows: usize) {
    let (hidden, width) = (layer.gate.cols(), layer.gate.rows());
    let (parts, _) = arena.split();
    let (gate, up) = (
        &mut parts.a[..n_rows * width],
        &mut parts.b[..n_rows * width],
    );
    let mixed = &mut parts.c[..n_rows * width];
    apply_all(
        compute.pool,
        &parts.y[..n_rows * hidden],
        n_rows,
        &mut [(&layer.gate, &mut *gate), (&layer.up, &mut *up)],
    );
    let size = compute.grain(n_rows) * width;
    let rows = gate.chunks(size).zip(up.chunks(size));
    let rows = rows.zip(mixed.chunks_mut(size));
    compute.pool.for_each_item(rows, |((gate, up), mixed)| {
        (compute.kernels.swiglu)(gate, up, mixed);
    });
    let update = &mut parts.update[..n_rows * hidden];
    layer.down.apply(compute.pool, mixed, n_rows, update);
}
