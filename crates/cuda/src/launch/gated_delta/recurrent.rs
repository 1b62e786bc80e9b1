//! The walk over trees: node by node, with the bits of single steps.

use super::conv_args;
use super::{DIM, Inputs, Layer, Shape, dfs_schedule, dim, launch, slot_args};
use crate::gpu_props::GpuProps;
use crate::launch::{Launch, Unit};

/// Blocks that share a head of a tree.
const SLICES: usize = 8;
/// Threads that share the states of a block's columns of [`Cut::turns`] heads.
const WALKERS: usize = 128;
/// Blocks that convolve together where the card has clusters: with more of them not all clusters of
/// a tree find room on the multiprocessors of an H200 at once.
const CLUSTER: usize = 2;
/// The most value heads that a block of a tree has columns of.
const MOST_HEADS: usize = 4;

/// How the launch is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Rows of the bucket, up to whole eights.
    nodes: usize,
    /// Value heads of a key head that a block has columns of.
    heads: usize,
    /// Heads of which a warp that walks has columns.
    turns: usize,
    /// States of a tree that may have to wait at once and have no registers to wait in.
    saves: usize,
    /// Those of them that wait in shared memory; the others wait in the scratch.
    shared_saves: usize,
    /// Warps of a block; all prepare.
    warps: usize,
    /// Blocks that share a multiprocessor, where shared memory holds them. One tree has one block
    /// for each; a second one beside it would halve its speed and with it that of the whole launch.
    blocks: usize,
}

impl Cut {
    fn of(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> Cut {
        let nodes = rows.next_multiple_of(8);
        let together = shape.n_v_heads / shape.n_k_heads;
        let fits = |n: &usize| together.is_multiple_of(*n);
        let heads = (1..=MOST_HEADS).rev().find(fits).unwrap_or(1);
        // Twelve warps walk three heads one by one, four warps as many at once.
        let few = heads.div_ceil(3);
        let (turns, warps, blocks) = match (trees, rows) {
            (1, _) => (few, 12, 1),
            _ if heads == MOST_HEADS => (few, 8, 2),
            // So many trees of few nodes are on the card at once. A step of 9 to 24 rows is one
            // tree as a rule.
            (3.., ..=8 | 25..=40) => (heads, 4, 4),
            _ => (heads, 8, 2),
        };
        let mut cut = Cut {
            nodes,
            heads,
            turns,
            // Where a block has a multiprocessor for itself, there are registers for one.
            saves: dfs_schedule::waiting(nodes) - usize::from(blocks == 1),
            shared_saves: 0,
            warps,
            blocks,
        };
        let room = (gpu.shared_bytes / blocks).saturating_sub(1024 + cut.room());
        cut.shared_saves = (room / cut.save_bytes()).min(cut.saves);
        cut
    }

    /// Value columns that a block has.
    fn columns(self) -> usize {
        DIM / SLICES * self.heads
    }

    /// Bytes of a block's part of a state.
    fn save_bytes(self) -> usize {
        4 * 16 * WALKERS * self.heads
    }

    /// Bytes of `SharedStorage` in `kernels/gated_delta/decode_recurrent.cu`.
    fn room(self) -> usize {
        // Keys, queries, v, gates and their product, to whole 16 bytes.
        let node = 4 * (2 * DIM + self.columns() + (2 * self.heads + 1).next_multiple_of(4));
        let bytes = (node + 20) * self.nodes + 16 * self.columns() + 12;
        bytes.next_multiple_of(16) + self.shared_saves * self.save_bytes()
    }

    /// Bytes of shared memory to ask for.
    fn shared(self, gpu: GpuProps) -> usize {
        match self.blocks {
            // More than half of what there is, so that it has the multiprocessor for itself.
            1 => self.room().max(gpu.shared_bytes / 2 + 1024),
            _ => self.room(),
        }
    }

    fn unit(self, shape: Shape) -> Unit {
        shape
            .unit("gated_delta/decode_recurrent.cu")
            .define("NODES", self.nodes)
            .define("HEADS_PER_BLOCK", self.heads)
            .define("HEADS_PER_WARP", self.turns)
            .define("SPILLED_STATES", self.saves)
            .define("SHARED_SPILLS", self.shared_saves)
            .define("CLUSTER", CLUSTER)
            .define("WARPS", self.warps)
            .define("BLOCKS_PER_SM", self.blocks)
    }
}

/// Bytes of the states of [`walk`] that shared memory has no room for; they need not be zeroed.
pub fn kept_bytes(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> usize {
    let cut = Cut::of(gpu, shape, rows, trees);
    trees * (cut.saves - cut.shared_saves) * shape.state_bytes()
}

/// The unit of [`walk`] for a bucket of `rows` rows of up to `trees` trees.
pub fn walk_unit(gpu: GpuProps, shape: Shape, rows: usize, trees: usize) -> Unit {
    Cut::of(gpu, shape, rows, trees).unit(shape)
}

/// Convolution, gates, u and o of all nodes of a tree, walked with the state in registers.
///
/// Leaves k, u, g and x of each node in the factors. `o` is the address of `[rows][n_v_heads *
/// 128]`, `kept` that of the states that wait where shared memory has no room for them:
/// [`kept_bytes`].
#[expect(
    clippy::too_many_arguments,
    reason = "as `decode::verify`: shapes first, then addresses"
)]
pub fn walk(
    gpu: GpuProps,
    shape: Shape,
    rows: usize,
    trees: usize,
    step: u64,
    layer: &Layer,
    inputs: &Inputs,
    [o, kept]: [u64; 2],
) -> Launch {
    let cut = Cut::of(gpu, shape, rows, trees);
    let args = conv_args(step, layer, inputs);
    let args = slot_args(slot_args(args, layer.state), layer.factors);
    let args = args.ptr(o).ptr(kept);
    let grid = [SLICES * shape.n_v_heads / cut.heads, 1, trees];
    let mut launch = launch(
        "gated_delta_recurrent_tree",
        cut.unit(shape),
        grid,
        dim(32 * cut.warps),
        args,
    );
    launch.shared = dim(cut.shared(gpu));
    launch
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::gated_delta::decode::tests::{LARGE, SHAPE, SMALL};

    #[test]
    fn states_wait_in_the_scratch_where_shared_memory_has_no_room() {
        let bytes = |gpu, rows, trees| kept_bytes(gpu, SHAPE, rows, trees);
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
                        let cut = Cut::of(gpu, shape, rows, trees);
                        let bytes = cut.shared(gpu);
                        assert!(bytes <= gpu.shared_bytes, "{rows} rows: {cut:?}");
                        assert_eq!(cut.heads, heads);
                    }
                }
            }
        }
        let saves = |gpu| Cut::of(gpu, SHAPE, 64, 1).shared_saves;
        assert_eq!([SMALL, LARGE].map(saves), [0, 3]);
    }
}
