//! The factor form of one tree on Hopper: products by warpgroups, and the output norm in the same
//! launch.

use super::conv_args;
use super::gated_norm::GatedNormOutput;
use super::{DIM, Shape, TreeLaunch, TreeStep, dim, row_args, slot_args};
use crate::gpu_props::GpuProps;
use crate::launch::{CompileUnit, Launch};

/// Nodes of the largest tree, which are a column of a product each.
const MAX_NODES: usize = 32;
/// Value columns of a block, which are the rows of a warpgroup's product.
const COLUMNS: usize = 64;
const THREADS: u32 = 512;
/// Blocks that every GPU with clusters takes.
const MAX_CLUSTER: usize = 8;

/// Whether a GPU has the shared memory, and the heads are whole clusters.
pub fn wy_tree_sm90_fits(gpu: GpuProps, shape: Shape) -> bool {
    shared(MAX_NODES) <= gpu.shared_bytes && cluster(shape).is_some()
}

/// Neighbouring blocks that convolve the queries and keys of their key head together: whole heads,
/// as the norm wants.
fn cluster(shape: Shape) -> Option<usize> {
    let slices = DIM / COLUMNS;
    let sharing = shape.n_v_heads / shape.n_k_heads * slices;
    let fits = |n: &usize| sharing.is_multiple_of(*n) && n.is_multiple_of(slices);
    (1..=MAX_CLUSTER).rev().find(fits)
}

/// Bytes of `SharedStorage` in `kernels/gated_delta/decode_wy_tree_sm90.cu`.
fn shared(nodes: usize) -> usize {
    let (most, pairs, diagonal) = (MAX_NODES, 80, 12);
    let operands = (2 * most + COLUMNS) * 4 * DIM;
    let convolution = 16 * (2 * DIM + COLUMNS) + 4 * most + 4 * most * COLUMNS;
    let system = 2048 * nodes.div_ceil(8) + 4 * most * (2 * pairs + diagonal);
    let norm = 4 * most * (COLUMNS + 4) + 4 * 4 * most;
    let small = most * (8 + 8 + 8) + 4 * COLUMNS + 3 * 8;
    (operands + convolution + system + norm + small).next_multiple_of(16)
}

fn unit(shape: Shape, rows: usize) -> CompileUnit {
    let nodes = rows.next_multiple_of(8);
    shape
        .unit("gated_delta/decode_wy_tree_sm90.cu")
        .define("NODES", nodes)
        .define("CLUSTER", cluster(shape).unwrap_or(1))
        .define("SMEM_BYTES", shared(nodes))
}

/// The unit of [`tree`] for a bucket of `rows` rows.
pub(super) fn tree_unit(shape: Shape, rows: usize) -> CompileUnit {
    unit(shape, rows).define("NORM", 0)
}

fn launch(unit: CompileUnit, shape: Shape, rows: usize, args: crate::launch::Args) -> Launch {
    let grid = [shape.n_v_heads * DIM / COLUMNS, 1, 1];
    let mut launch = super::launch("gated_delta_wy_tree_sm90", unit, grid, THREADS, args);
    launch.shared = dim(shared(rows.next_multiple_of(8)));
    launch
}

/// As [`super::decode::tree`].
pub(super) fn tree(tree: &TreeLaunch<'_>, o: u64) -> Launch {
    let TreeLaunch {
        shape,
        size: TreeStep { rows, .. },
        step,
        layer,
        inputs,
        ..
    } = *tree;
    let args = conv_args(step, layer, inputs);
    let args = slot_args(slot_args(args, layer.state), layer.factors).ptr(o);
    launch(tree_unit(shape, rows), shape, rows, args)
}

/// The same with the output norm behind it.
///
/// # Panics
/// If `out` wants panels, or the heads are odd: pairs of heads are written whole.
pub(super) fn tree_and_norm(tree: &TreeLaunch<'_>, out: &GatedNormOutput) -> Launch {
    let TreeLaunch {
        shape,
        size: TreeStep { rows, .. },
        step,
        layer,
        inputs,
        ..
    } = *tree;
    assert!(
        out.panels.is_none() && shape.n_v_heads.is_multiple_of(2),
        "{} heads into {out:?} by one launch",
        shape.n_v_heads
    );
    let args = conv_args(step, layer, inputs);
    let args = slot_args(slot_args(args, layer.state), layer.factors);
    let args = row_args(args, inputs.z).ptr(layer.norm).f32(layer.eps);
    let args = args.words(&out.activations.words());
    let unit = unit(shape, rows).define("NORM", 1);
    let unit = out.activations.define(unit, shape.values(), rows);
    launch(unit, shape, rows, args)
}

#[cfg(test)]
mod tests {
    use super::super::decode::tests::SHAPE;
    use super::*;

    #[test]
    fn a_cluster_is_of_whole_heads() {
        let of = |n_v_heads| {
            let shape = Shape {
                n_k_heads: 16,
                n_v_heads,
                ..SHAPE
            };
            cluster(shape)
        };
        assert_eq!([16, 32, 48, 64].map(of), [2, 4, 6, 8].map(Some));
    }
}
