//! The recurrent form over trees: node by node, with the bits of single-row steps.

use super::conv_args;
use super::{DIM, Shape, TreeLaunch, TreeStep, dfs_schedule, dim, launch, slot_args};
use crate::gpu_props::GpuProps;
use crate::launch::{CompileUnit, Launch};

/// Blocks per head and tree.
const BLOCKS_PER_HEAD: usize = 8;
/// Threads that share the states of a block's columns of [`RecurrentTiling::heads_per_warp`] heads.
const STATE_THREADS: usize = 128;
/// Blocks of a cluster, which share the convolution of a key head. With larger clusters an H200
/// cannot hold all clusters of a tree at once.
const CLUSTER: usize = 2;
/// The most value heads that a block of a tree has columns of.
const MAX_HEADS: usize = 4;

/// Blocks of the recurrent launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RecurrentTiling {
    /// Rows of the bucket, padded to a multiple of 8.
    nodes: usize,
    /// Value heads of a key head that a block has columns of.
    heads: usize,
    /// Heads of which a warp has state columns.
    heads_per_warp: usize,
    /// States of a tree that may be spilled at once, beyond registers.
    spills: usize,
    /// Those of them that are spilled to shared memory; the others go to the scratch.
    shared_spills: usize,
    /// Warps of a block; all compute the convolution.
    warps: usize,
    /// Blocks per multiprocessor. One tree has one block on each; a second block would halve the
    /// speed of both.
    blocks: usize,
}

impl RecurrentTiling {
    fn of(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> RecurrentTiling {
        let nodes = rows.next_multiple_of(8);
        let heads_per_key = shape.n_v_heads / shape.n_k_heads;
        let fits = |n: &usize| heads_per_key.is_multiple_of(*n);
        let heads = (1..=MAX_HEADS).rev().find(fits).unwrap_or(1);
        // Twelve warps process three heads in turn, four warps at once.
        let few = heads.div_ceil(3);
        let (heads_per_warp, warps, blocks) = match (trees, rows) {
            (1, _) => (few, 12, 1),
            _ if heads == MAX_HEADS => (few, 8, 2),
            // All blocks of that many small trees are resident at once. A step of 9 to 24 rows is
            // usually one tree.
            (3.., ..=8 | 25..=40) => (heads, 4, 4),
            _ => (heads, 8, 2),
        };
        let mut tiling = RecurrentTiling {
            nodes,
            heads,
            heads_per_warp,
            // A block that has a multiprocessor to itself has registers for one spilled state.
            spills: dfs_schedule::max_spilled_states(nodes) - usize::from(blocks == 1),
            shared_spills: 0,
            warps,
            blocks,
        };
        let room = (gpu.shared_bytes / blocks).saturating_sub(1024 + tiling.storage_bytes());
        tiling.shared_spills = (room / tiling.spill_bytes()).min(tiling.spills);
        tiling
    }

    /// Bytes of a block's part of a spilled state.
    fn spill_bytes(self) -> usize {
        block_spill_bytes(self.heads)
    }

    fn storage_bytes(self) -> usize {
        recurrent_storage_bytes(self.nodes, self.heads, self.shared_spills)
    }

    /// Dynamic shared memory of a block, in bytes.
    fn shared(self, gpu: GpuProps) -> usize {
        match self.blocks {
            // More than half of it, so that the block has the multiprocessor to itself.
            1 => self.storage_bytes().max(gpu.shared_bytes / 2 + 1024),
            _ => self.storage_bytes(),
        }
    }

    fn unit(self, shape: Shape) -> CompileUnit {
        shape
            .unit("gated_delta/decode_recurrent.cu")
            .define("NODES", self.nodes)
            .define("HEADS_PER_BLOCK", self.heads)
            .define("HEADS_PER_WARP", self.heads_per_warp)
            .define("SPILLED_STATES", self.spills)
            .define("SHARED_SPILLS", self.shared_spills)
            .define("CLUSTER", CLUSTER)
            .define("WARPS", self.warps)
            .define("BLOCKS_PER_SM", self.blocks)
    }
}

/// Bytes of a spilled state of a block with columns of `heads` heads.
fn block_spill_bytes(heads: usize) -> usize {
    4 * 16 * STATE_THREADS * heads
}

/// Bytes of `SharedStorage` in `kernels/gated_delta/decode_recurrent.cu` for `nodes` nodes and
/// columns of `heads` value heads, where it spills `shared_spills` states.
pub(in crate::launch) fn recurrent_storage_bytes(
    nodes: usize,
    heads: usize,
    shared_spills: usize,
) -> usize {
    let columns = DIM / BLOCKS_PER_HEAD * heads;
    // Keys, queries, v, gates and their product, to whole 16 bytes.
    let node = 4 * (2 * DIM + columns + (2 * heads + 1).next_multiple_of(4));
    let bytes = (node + 20) * nodes + 16 * columns + 12;
    bytes.next_multiple_of(16) + shared_spills * block_spill_bytes(heads)
}

/// Bytes of the states that [`recurrent_tree`] spills beyond shared memory. Need not be zeroed.
pub fn spill_bytes(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> usize {
    let tiling = RecurrentTiling::of(gpu, shape, rows, trees);
    trees * (tiling.spills - tiling.shared_spills) * shape.state_bytes()
}

/// The unit of [`recurrent_tree`] for a bucket of `rows` rows of up to `trees` trees.
pub fn recurrent_unit(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> CompileUnit {
    RecurrentTiling::of(gpu, shape, rows, trees).unit(shape)
}

/// Convolution, gates, u and o of all nodes of a tree in DFS order, the state in registers.
///
/// Leaves k, u, g and x of each node in the factors. `o` is the address of `[rows][n_v_heads *
/// 128]`, `spilled` that of [`spill_bytes`] bytes for spilled states.
pub fn recurrent_tree(tree: &TreeLaunch<'_>, o: u64, spilled: u64) -> Launch {
    let TreeLaunch {
        gpu,
        shape,
        size: TreeStep { rows, trees },
        step,
        layer,
        inputs,
    } = *tree;
    let tiling = RecurrentTiling::of(gpu, shape, rows, trees);
    let args = conv_args(step, layer, inputs);
    let args = slot_args(slot_args(args, layer.state), layer.factors);
    let args = args.ptr(o).ptr(spilled);
    let grid = [BLOCKS_PER_HEAD * shape.n_v_heads / tiling.heads, 1, trees];
    let mut launch = launch(
        "gated_delta_recurrent_tree",
        tiling.unit(shape),
        grid,
        dim(32 * tiling.warps),
        args,
    );
    launch.shared = dim(tiling.shared(gpu));
    launch
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::gated_delta::decode::tests::{LARGE, SHAPE, SMALL};

    #[test]
    fn states_wait_in_the_scratch_where_shared_memory_has_no_room() {
        let bytes = |gpu, rows, trees| spill_bytes(gpu, SHAPE, rows, trees);
        assert_eq!(bytes(LARGE, 64, 1), 0);
        assert_eq!(bytes(SMALL, 64, 1), 3 * SHAPE.state_bytes());
        assert_eq!(bytes(SMALL, 16, 1), 0);
        assert!(bytes(LARGE, 64, 4) >= 4 * SHAPE.state_bytes());
    }

    #[test]
    fn shared_memory_of_a_tree_fits_every_card() {
        for gpu in [SMALL, LARGE] {
            for (n_v_heads, heads) in [(2, 1), (4, 2), (6, 3), (8, 4), (10, 1), (12, 3), (16, 4)] {
                let shape = Shape { n_v_heads, ..SHAPE };
                for rows in [1, 8, 16, 24, 32, 48, 64] {
                    for trees in [1, 2, 4] {
                        let tiling = RecurrentTiling::of(gpu, shape, rows, trees);
                        let bytes = tiling.shared(gpu);
                        assert!(bytes <= gpu.shared_bytes, "{rows} rows: {tiling:?}");
                        assert_eq!(tiling.heads, heads);
                    }
                }
            }
        }
        let spills = |gpu| RecurrentTiling::of(gpu, SHAPE, 64, 1).shared_spills;
        assert_eq!([SMALL, LARGE].map(spills), [0, 3]);
    }
}
