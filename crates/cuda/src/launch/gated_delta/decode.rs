//! Decode steps over trees, which read the states, and commits, which update them.

use super::gated_norm::{GatedDeltaRows, GatedNormOutput, gated_norm};
use super::recurrent::{recurrent_tree, spill_bytes};
use super::wy_tree_sm90;
use super::{
    DIM, Group, Shape, StridedRows, TreeLaunch, TreeStep, conv_args, dim, launch, slot_args,
};
use crate::gpu_props::GpuProps;
use crate::launch::{Args, CompileUnit, Launch};
use crate::step::TREES;

/// Value columns of a block of the commit launch.
const COMMIT_COLUMNS: usize = 64;
/// Threads of a block of the commit launch.
const COMMIT_THREADS: usize = 256;

/// Bytes of `o` in the scratch; spilled states follow.
fn o_bytes(shape: Shape, rows: usize) -> usize {
    (4 * rows * shape.values()).next_multiple_of(256)
}

/// A kernel of the gated delta rule over the trees of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatedDeltaKernel {
    /// `decode_row_fused.cu`: one row, the output norm included; the bits of
    /// [`GatedDeltaKernel::RecurrentTree`].
    RowFused,
    /// `decode_recurrent.cu`: node by node, states carried from parent to child; the bits of one
    /// node a step.
    RecurrentTree,
    /// `decode_wy_tree.cu`: the WY form, all nodes at once from one read of the state; rounds
    /// differently.
    WyTree,
    /// `decode_wy_tree_sm90.cu`: the same by wgmma, for one tree.
    WyTreeSm90,
    /// The same with the output norm in the launch.
    WyTreeNormSm90,
}

impl GatedDeltaKernel {
    /// The source file.
    pub fn file(self) -> &'static str {
        match self {
            GatedDeltaKernel::RowFused => "gated_delta/decode_row_fused.cu",
            GatedDeltaKernel::RecurrentTree => "gated_delta/decode_recurrent.cu",
            GatedDeltaKernel::WyTree => "gated_delta/decode_wy_tree.cu",
            GatedDeltaKernel::WyTreeSm90 | GatedDeltaKernel::WyTreeNormSm90 => {
                "gated_delta/decode_wy_tree_sm90.cu"
            }
        }
    }
}

/// Bytes that [`verify`] works in; layers of a step may share them, and they need not be zeroed.
pub fn verify_scratch_bytes(
    gpu: GpuProps,
    shape: Shape,
    rows: usize,
    trees: usize,
    kernel: GatedDeltaKernel,
) -> usize {
    let spilled = match kernel {
        GatedDeltaKernel::RecurrentTree => spill_bytes(gpu, shape, rows, trees),
        _ => 0,
    };
    o_bytes(shape, rows) + spilled
}

/// One layer of a decode step: convolution, delta rule, output norm.
///
/// The state and the window are only read; the factors of every node are written. `scratch` is the
/// address of [`verify_scratch_bytes`] bytes.
///
/// # Panics
/// If `out` wants panels from a kernel that includes the output norm.
pub fn verify(
    kernel: GatedDeltaKernel,
    tree: &TreeLaunch<'_>,
    scratch: u64,
    out: &GatedNormOutput,
) -> Vec<Launch> {
    let TreeLaunch {
        shape,
        size: TreeStep { rows, trees },
        step,
        layer,
        inputs,
        ..
    } = *tree;
    assert!(
        (1..=64).contains(&rows) && (1..=TREES).contains(&trees),
        "a step has 1 to 64 rows and 1 to {TREES} trees, not {rows} and {trees}"
    );
    let o = StridedRows {
        at: scratch,
        stride: shape.values(),
    };
    let nodes = match kernel {
        GatedDeltaKernel::RowFused => {
            assert_eq!(rows, 1, "the fused row kernel takes one row");
            return vec![row(tree, out)];
        }
        GatedDeltaKernel::WyTreeNormSm90 => {
            return vec![wy_tree_sm90::tree_and_norm(tree, out)];
        }
        GatedDeltaKernel::WyTree | GatedDeltaKernel::WyTreeSm90 => wy_tree(kernel, tree, o.at),
        GatedDeltaKernel::RecurrentTree => {
            recurrent_tree(tree, o.at, scratch + o_bytes(shape, rows) as u64)
        }
    };
    let source = GatedDeltaRows::Step(step);
    let norm = gated_norm(shape, rows, source, layer, [o, inputs.z], out);
    vec![nodes, norm]
}

/// A step of one row, from the projections to the output norm: the bits of [`recurrent_tree`] and
/// [`gated_norm`] one after the other.
///
/// # Panics
/// If `out` wants panels, whose chunks take more than a head at once.
pub fn row(tree: &TreeLaunch<'_>, out: &GatedNormOutput) -> Launch {
    let TreeLaunch {
        shape,
        step,
        layer,
        inputs,
        ..
    } = *tree;
    assert!(
        out.panels.is_none(),
        "one head at a time cannot be written as {out:?}"
    );
    let args = Args::new().ptr(step).ptr(inputs.qkv.at);
    let args = args.ptr(inputs.alpha.at).ptr(inputs.beta.at);
    let args = slot_args(args, layer.window);
    let args = args.ptr(layer.conv).ptr(layer.a).ptr(layer.dt);
    let args = slot_args(slot_args(args, layer.state), layer.factors);
    let args = args.ptr(inputs.z.at).ptr(layer.norm).f32(layer.eps);
    let args = args.words(&out.activations.words());
    let unit = out.activations.define(
        shape.unit("gated_delta/decode_row_fused.cu"),
        shape.values(),
        1,
    );
    launch(
        "gated_delta_row_fused",
        unit,
        [shape.n_v_heads, 1, 1],
        256,
        args,
    )
}

/// Blocks of the WY tree launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WyTiling {
    /// Rows of the bucket, padded to tiles of 8.
    nodes: usize,
    /// Value columns of a block: as many as fit shared memory beside the nodes.
    columns: usize,
    /// Fewer where several trees share the launch, so that two blocks share a multiprocessor.
    warps: usize,
    /// Neighbouring blocks that convolve the queries and keys of their key head together, where the
    /// GPU has clusters.
    cluster: usize,
}

impl WyTiling {
    fn of(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> WyTiling {
        let nodes = rows.next_multiple_of(8);
        let (columns, warps) = match (rows, trees) {
            (33.., 1) if shared(nodes, 64) <= gpu.shared_bytes => (64, 16),
            (33.., _) => (32, 8),
            (..=8, _) | (_, 2..) => (64, 8),
            _ => (64, 16),
        };
        let slices = DIM / columns;
        let sharing = shape.n_v_heads / shape.n_k_heads * slices;
        let fits = |n: &usize| sharing.is_multiple_of(*n) && n.is_multiple_of(slices);
        WyTiling {
            nodes,
            columns,
            warps,
            // Eight blocks are what every GPU with clusters takes.
            cluster: (1..=8).rev().find(fits).unwrap_or(1),
        }
    }

    fn unit(self, shape: Shape) -> CompileUnit {
        shape
            .unit("gated_delta/decode_wy_tree.cu")
            .define("NODES", self.nodes)
            .define("COLUMNS", self.columns)
            .define("WARPS", self.warps)
            .define("CLUSTER", self.cluster)
    }
}

/// Bytes of `SharedStorage` in `kernels/gated_delta/decode_wy_tree.cu`.
fn shared(nodes: usize, columns: usize) -> usize {
    let rows = 2 * nodes * 4 * DIM;
    let before = columns * 4 * DIM + 16 * (2 * DIM + columns) + 16 * nodes;
    let after = 4 * nodes * columns + 4 * nodes * (nodes + 4);
    let small = 28 * nodes + 4 * columns + 8;
    rows + before.max(after) + 4 * nodes * columns + small
}

/// The unit of the WY kernel `kernel` for a bucket of `rows` rows of up to `trees` trees, without
/// the output norm.
pub fn wy_tree_unit(
    kernel: GatedDeltaKernel,
    gpu: GpuProps,
    shape: Shape,
    rows: usize,
    trees: usize,
) -> CompileUnit {
    if kernel == GatedDeltaKernel::WyTreeSm90 {
        wy_tree_sm90::tree_unit(shape, rows)
    } else {
        WyTiling::of(gpu, shape, rows, trees).unit(shape)
    }
}

/// The WY form: convolution, gates, u and o of all nodes of a tree from one read of its state.
///
/// Leaves k, u, g and x of each node in the factors; `o` is the address of `[rows][n_v_heads *
/// 128]`.
pub fn wy_tree(kernel: GatedDeltaKernel, tree: &TreeLaunch<'_>, o: u64) -> Launch {
    if kernel == GatedDeltaKernel::WyTreeSm90 {
        return wy_tree_sm90::tree(tree, o);
    }
    let TreeLaunch {
        gpu,
        shape,
        size: TreeStep { rows, trees },
        step,
        layer,
        inputs,
    } = *tree;
    let tiling = WyTiling::of(gpu, shape, rows, trees);
    let args = conv_args(step, layer, inputs);
    let args = slot_args(slot_args(args, layer.state), layer.factors).ptr(o);
    let grid = [shape.n_v_heads * DIM / tiling.columns, 1, trees];
    let mut launch = launch(
        "gated_delta_wy_tree",
        tiling.unit(shape),
        grid,
        dim(32 * tiling.warps),
        args,
    );
    launch.shared = dim(shared(tiling.nodes, tiling.columns));
    launch
}

/// Brings the states and windows of all layers of a group past up to `paths` accepted paths.
///
/// `commit` is the address of the `Commit`. Nodes are folded one by one, in path order.
pub fn commit(shape: Shape, group: &Group, paths: usize, commit: u64) -> Launch {
    assert!(
        (1..=TREES).contains(&paths) && group.layers > 0,
        "a commit has 1 to {TREES} paths and a group at least a layer, not {paths} and {}",
        group.layers
    );
    let args = slot_args(Args::new().ptr(commit), group.state);
    let args = args.u64(group.layer_strides[0]);
    let args = slot_args(args, group.window).u64(group.layer_strides[1]);
    let args = slot_args(args, group.factors).u64(group.layer_strides[2]);
    let states = shape.n_v_heads * (DIM / COMMIT_COLUMNS);
    let windows = (shape.channels() / 4).div_ceil(COMMIT_THREADS);
    let grid = [states + windows, group.layers, paths];
    let mut launch = launch(
        "gated_delta_commit",
        shape.unit("gated_delta/commit.cu"),
        grid,
        dim(COMMIT_THREADS),
        args,
    );
    launch.overlap = false;
    launch
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::launch::gated_delta::{GatedDeltaInputs, Layer, Slots};
    use contract::HeadMap;

    pub(crate) const SHAPE: Shape = Shape {
        n_k_heads: 2,
        n_v_heads: 6,
        head_map: HeadMap::Tiled,
    };

    pub(crate) const SMALL: GpuProps = GpuProps {
        sm_count: 82,
        shared_bytes: 99 << 10,
        has_wgmma: false,
        launches_overlap: false,
    };

    pub(crate) const LARGE: GpuProps = GpuProps {
        sm_count: 132,
        shared_bytes: 227 << 10,
        has_wgmma: true,
        launches_overlap: true,
    };

    /// Entries of a layer's launches.
    fn entries(kernel: GatedDeltaKernel, rows: usize) -> Vec<&'static str> {
        let slots = Slots { at: 0, stride: 0 };
        let layer = Layer {
            state: slots,
            window: slots,
            factors: slots,
            conv: 0,
            a: 0,
            dt: 0,
            norm: 0,
            eps: 1e-6,
        };
        let none = StridedRows { at: 0, stride: 0 };
        let inputs = GatedDeltaInputs {
            qkv: none,
            z: none,
            alpha: none,
            beta: none,
        };
        let tree = TreeLaunch {
            gpu: LARGE,
            shape: SHAPE,
            size: TreeStep { rows, trees: 1 },
            step: 0,
            layer: &layer,
            inputs: &inputs,
        };
        let launches = verify(kernel, &tree, 0, &GatedNormOutput::default());
        launches.iter().map(|launch| launch.entry).collect()
    }

    #[test]
    fn fused_kernels_are_one_launch_and_others_two() {
        use GatedDeltaKernel::{RecurrentTree, RowFused, WyTree, WyTreeNormSm90, WyTreeSm90};
        for (kernel, rows, expected) in [
            (RowFused, 1, &["gated_delta_row_fused"][..]),
            (
                RecurrentTree,
                24,
                &["gated_delta_recurrent_tree", "gated_delta_norm"],
            ),
            (WyTree, 24, &["gated_delta_wy_tree", "gated_delta_norm"]),
            (
                WyTreeSm90,
                24,
                &["gated_delta_wy_tree_sm90", "gated_delta_norm"],
            ),
            (WyTreeNormSm90, 24, &["gated_delta_wy_tree_sm90"]),
        ] {
            assert_eq!(entries(kernel, rows), expected);
        }
    }

    #[test]
    fn shared_memory_of_a_tree_fits_every_card() {
        for gpu in [SMALL, LARGE] {
            for rows in [1, 8, 16, 24, 32, 40, 48, 64] {
                for trees in [1, 4] {
                    let tiling = WyTiling::of(gpu, SHAPE, rows, trees);
                    let bytes = shared(tiling.nodes, tiling.columns);
                    assert!(bytes <= gpu.shared_bytes, "{rows} rows take {bytes} bytes");
                }
            }
        }
        let columns = |gpu| WyTiling::of(gpu, SHAPE, 64, 1).columns;
        assert_eq!([SMALL, LARGE].map(columns), [32, 64]);
    }

    #[test]
    fn a_cluster_is_of_one_key_head_and_of_whole_heads() {
        let of = |n_k_heads, n_v_heads, rows| {
            let shape = Shape {
                n_k_heads,
                n_v_heads,
                ..SHAPE
            };
            WyTiling::of(SMALL, shape, rows, 1).cluster
        };
        assert_eq!([of(16, 48, 24), of(16, 16, 24), of(16, 64, 24)], [6, 2, 8]);
        assert_eq!([of(16, 48, 64), of(16, 16, 64), of(1, 5, 64)], [4, 4, 4]);
    }
}
