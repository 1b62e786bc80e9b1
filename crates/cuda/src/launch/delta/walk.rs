//! The walk over trees: node by node, with the bits of single steps.

use super::tree::{Card, conv_args};
use super::{DIM, Inputs, Layer, Shape, dim, launch, slot_args};
use crate::launch::{Launch, Unit};

/// Blocks that share a head of a tree.
const SLICES: usize = 8;
/// Threads of a block that walk.
const WALKERS: usize = 128;
/// Blocks that convolve together where the card has clusters: with more of them not all clusters of a tree find room on
/// the multiprocessors of an H200 at once.
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
    /// States of a tree that may have to wait at once.
    saves: usize,
    /// Those of them that wait in shared memory; the others wait in the scratch.
    shared_saves: usize,
    /// Warps of a block: four walk, all prepare.
    warps: usize,
    /// Blocks that share a multiprocessor. One tree has one block for each; a second one beside it would halve its speed
    /// and with it that of the whole launch.
    blocks: usize,
}

impl Cut {
    fn of(card: Card, shape: Shape, rows: usize, trees: usize) -> Cut {
        let nodes = rows.next_multiple_of(8);
        let together = shape.n_v_heads / shape.n_k_heads;
        let fits = |n: &usize| together.is_multiple_of(*n);
        let (warps, blocks) = match trees {
            1 => (12, 1),
            _ => (8, 2),
        };
        let mut cut = Cut {
            warps,
            blocks,
            nodes,
            heads: (1..=MOST_HEADS).rev().find(fits).unwrap_or(1),
            saves: waiting(nodes),
            shared_saves: 0,
        };
        let room = (card.shared_bytes / blocks).saturating_sub(1024 + cut.room());
        cut.shared_saves = (room / cut.save_bytes()).min(cut.saves);
        cut
    }

    /// Bytes of a block's part of a state.
    fn save_bytes(self) -> usize {
        4 * 16 * WALKERS * self.heads
    }

    /// Bytes of `Room` in `kernels/delta/walk.cu`.
    fn room(self) -> usize {
        let columns = DIM / SLICES * self.heads;
        let node = 4 * (2 * DIM + 2 * self.heads + columns) + 52;
        let bytes = node * self.nodes + 16 * (2 * DIM + columns) + 24;
        bytes.next_multiple_of(16) + self.shared_saves * self.save_bytes()
    }

    /// Bytes of shared memory to ask for.
    fn shared(self, card: Card) -> usize {
        match self.blocks {
            // More than half of what there is, so that it has the multiprocessor for itself.
            1 => self.room().max(card.shared_bytes / 2 + 1024),
            _ => self.room(),
        }
    }

    fn unit(self, shape: Shape) -> Unit {
        shape
            .unit("delta/walk.cu")
            .define("NODES", self.nodes)
            .define("HEADS", self.heads)
            .define("SAVES", self.saves)
            .define("SHARED_SAVES", self.shared_saves)
            .define("CLUSTER", CLUSTER)
            .define("WARPS", self.warps)
            .define("BLOCKS", self.blocks)
    }
}

/// How many states wait at once in the worst tree of `nodes` nodes that is walked with the largest child last: one more
/// for every time that its size, with the state before it, doubles.
fn waiting(nodes: usize) -> usize {
    let (mut count, mut least) = (0, 5);
    while nodes + 1 >= least {
        count += 1;
        least = 2 * least + 1;
    }
    count
}

/// Bytes of the states of [`walk`] that shared memory has no room for; they need not be zeroed.
pub fn kept_bytes(card: Card, shape: Shape, rows: usize, trees: usize) -> usize {
    let cut = Cut::of(card, shape, rows, trees);
    trees * (cut.saves - cut.shared_saves) * shape.state_bytes()
}

/// The unit of [`walk`] for a bucket of `rows` rows of up to `trees` trees.
pub fn walk_unit(card: Card, shape: Shape, rows: usize, trees: usize) -> Unit {
    Cut::of(card, shape, rows, trees).unit(shape)
}

/// Convolution, gates, u and o of all nodes of a tree, walked with the state in registers.
///
/// Leaves k, u, g and x of each node in the factors. `o` is the address of `[rows][n_v_heads * 128]`, `kept` that of the
/// states that wait where shared memory has no room for them: [`kept_bytes`].
#[expect(
    clippy::too_many_arguments,
    reason = "as `tree::verify`: shapes first, then addresses"
)]
pub fn walk(
    card: Card,
    shape: Shape,
    rows: usize,
    trees: usize,
    step: u64,
    layer: &Layer,
    inputs: &Inputs,
    [o, kept]: [u64; 2],
) -> Launch {
    let cut = Cut::of(card, shape, rows, trees);
    let args = conv_args(step, layer, inputs);
    let args = slot_args(slot_args(args, layer.state), layer.factors);
    let args = args.ptr(o).ptr(kept);
    let grid = [SLICES * shape.n_v_heads / cut.heads, 1, trees];
    let mut launch = launch("walk", cut.unit(shape), grid, dim(32 * cut.warps), args);
    launch.shared = dim(cut.shared(card));
    launch
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::delta::tree::tests::{LARGE, SHAPE, SMALL};

    /// States that wait at once while this tree is walked, the smallest subtree first.
    fn kept(children: &[Vec<usize>], sizes: &[usize], node: usize) -> usize {
        let mut inner: Vec<usize> = children[node].clone();
        inner.retain(|&child| sizes[child] > 1);
        inner.sort_by_key(|&child| sizes[child]);
        let last = inner.len().saturating_sub(1);
        let of =
            |(i, &child): (usize, &usize)| kept(children, sizes, child) + usize::from(i < last);
        inner.iter().enumerate().map(of).max().unwrap_or(0)
    }

    #[test]
    fn no_tree_keeps_more_states_than_there_is_room_for() {
        let mut x = 1_u64;
        let mut next = |n: usize| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (x >> 33) as usize % n
        };
        for nodes in 1..=64 {
            let mut worst = 0;
            for try_ in 0..200 {
                // Node 0 is the state before the tree. The first try is as full as a tree of two children can be.
                let mut children = vec![Vec::new(); nodes + 1];
                let mut sizes = vec![1; nodes + 1];
                let parents: Vec<usize> = (1..=nodes)
                    .map(|i| if try_ == 0 { (i - 1) / 2 } else { next(i) })
                    .collect();
                for (i, &parent) in parents.iter().enumerate().rev() {
                    sizes[parent] += sizes[i + 1];
                    children[parent].push(i + 1);
                }
                worst = worst.max(kept(&children, &sizes, 0));
            }
            assert!(worst <= waiting(nodes), "{worst} states of {nodes} nodes");
        }
        assert_eq!([8, 16, 24, 32, 64].map(waiting), [1, 2, 3, 3, 4]);
    }

    #[test]
    fn states_wait_in_the_scratch_where_shared_memory_has_no_room() {
        let bytes = |card, rows, trees| kept_bytes(card, SHAPE, rows, trees);
        assert_eq!(bytes(LARGE, 64, 1), 0);
        assert_eq!(bytes(SMALL, 64, 1), 4 * SHAPE.state_bytes());
        assert_eq!(bytes(SMALL, 16, 1), 0);
        assert!(bytes(LARGE, 64, 4) >= 4 * SHAPE.state_bytes());
    }

    #[test]
    fn shared_memory_of_a_tree_fits_every_card() {
        for card in [SMALL, LARGE] {
            for (n_v_heads, heads) in [(2, 1), (4, 2), (6, 3), (8, 4), (10, 1), (12, 3), (16, 4)] {
                let shape = Shape { n_v_heads, ..SHAPE };
                for rows in [1, 8, 16, 24, 32, 48, 64] {
                    for trees in [1, 4] {
                        let cut = Cut::of(card, shape, rows, trees);
                        let bytes = cut.shared(card);
                        assert!(bytes <= card.shared_bytes, "{rows} rows: {cut:?}");
                        assert_eq!(cut.heads, heads);
                    }
                }
            }
        }
        let saves = |card| Cut::of(card, SHAPE, 64, 1).shared_saves;
        assert_eq!([SMALL, LARGE].map(saves), [0, 4]);
    }
}
