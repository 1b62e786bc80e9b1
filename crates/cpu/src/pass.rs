//! Data of a forward pass: segments of rows, activation buffers, rotary tables and tree schedules.
//!
//! A row is a token with a position. A [`Segment`] holds the adjacent rows of one sequence. All
//! segments share the matrix products; attention and the recurrence run per segment.

use contract::{FeedForward, ModelSpec, NodeIdx, Tree};

use crate::kernels::Kernels;
use crate::layer_buffers::ExpertBuffers;
use crate::reference::rope;
use crate::scratch::ScratchPool;
use crate::state::CpuSequence;
use crate::thread_pool::ThreadPool;
use crate::weights::{LayerMixer, ModelWeights};

/// Positions of a chunk. Chunks begin at absolute multiples of it, so that the same tokens get the
/// same arithmetic however a prompt is split.
pub(crate) const CHUNK: usize = 64;

/// Maximum number of rows of a prefill or verify pass; longer calls use several passes.
pub(crate) fn rows_per_pass(limits: contract::Limits) -> usize {
    /// Enough rows to amortize reading a weight, few enough to stay in cache.
    const MOST: usize = 512;
    let trees = limits.sequences.saturating_mul(limits.tree_nodes);
    limits
        .prefill_chunk
        .max(trees)
        .min(MOST)
        .next_multiple_of(CHUNK)
}

/// The rows of one sequence in a pass.
pub(crate) struct Segment<'a> {
    pub(crate) seq: &'a mut CpuSequence,
    pub(crate) work: SegmentKind<'a>,
    /// First row within the pass.
    pub(crate) first_row: usize,
    pub(crate) n_rows: usize,
}

/// Relation between the rows of a segment.
#[derive(Clone, Copy)]
pub(crate) enum SegmentKind<'a> {
    /// Consecutive positions; the pass commits them.
    Chunk,
    /// Nodes of a tree; they stay pending.
    Tree(&'a TreePlan),
}

/// The rows of a segment with the state of one layer.
pub(crate) struct LayerSegment<'a, S> {
    pub(crate) state: &'a mut S,
    pub(crate) work: SegmentKind<'a>,
    pub(crate) first_row: usize,
    pub(crate) n_rows: usize,
    /// Committed tokens of the sequence.
    pub(crate) position: usize,
}

/// Execution context of a pass: threads, kernels, scratch and the RMS epsilon.
#[derive(Clone, Copy)]
pub(crate) struct ExecContext<'a> {
    pub(crate) pool: &'a ThreadPool,
    pub(crate) kernels: &'a Kernels,
    pub(crate) scratch: &'a ScratchPool,
    pub(crate) norm_eps: f32,
}

impl<'a> ExecContext<'a> {
    /// The context of a pass of the target.
    pub(crate) fn new(
        pool: &'a ThreadPool,
        kernels: &'a Kernels,
        scratch: &'a ScratchPool,
        spec: &ModelSpec,
    ) -> ExecContext<'a> {
        ExecContext {
            pool,
            kernels,
            scratch,
            norm_eps: spec.norm_eps,
        }
    }
}

/// Activation buffers of a pass, row-major; reused by later passes.
pub(crate) struct PassBuffers {
    /// The residual stream, `[n, hidden]`.
    pub(crate) x: Vec<f32>,
    /// The normalized residual stream, `[n, hidden]`.
    pub(crate) y: Vec<f32>,
    /// Output of a mixer or feed-forward, `[n, hidden]`.
    pub(crate) update: Vec<f32>,
    /// Projections of a block, widest first.
    pub(crate) wide: [Vec<f32>; 3],
    /// Input of a mixer's output projection, head-major and row-major.
    pub(crate) heads: [Vec<f32>; 2],
    /// Two values per value head, `[n, n_v_heads]`.
    pub(crate) gates: [Vec<f32>; 2],
    /// Of layers with experts.
    pub(crate) experts: ExpertBuffers,
    /// Rotary tables of the rows, one per list of frequencies.
    angles: Vec<RopeTable>,
}

/// Cosines and sines of every row, `[n, dims / 2]` each.
pub(crate) struct RopeTable {
    /// `[dims / 2]`.
    inverse_frequencies: Vec<f64>,
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
}

/// Floats per row of the [`PassBuffers`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BufferWidths {
    hidden: usize,
    wide: [usize; 3],
    heads: usize,
    gates: usize,
    /// Of the expert buffers, which are allocated at first use.
    experts: usize,
}

/// Channels of the feed-forward that every row passes: the dense one, or the shared expert.
pub(crate) fn ffn_width(ffn: &FeedForward) -> usize {
    match ffn {
        FeedForward::Dense(dense) => dense.width(),
        FeedForward::Experts(experts) => experts.shared.as_ref().map_or(0, |s| s.ffn.width()),
    }
}

impl BufferWidths {
    /// Widths that the layers of `spec` need.
    pub(crate) fn of(spec: &contract::ModelSpec) -> BufferWidths {
        let mut widths = BufferWidths {
            hidden: spec.hidden,
            ..BufferWidths::default()
        };
        let mut fit = |wide: [usize; 3], heads: usize, gates: usize| {
            for (have, need) in widths.wide.iter_mut().zip(wide) {
                *have = need.max(*have);
            }
            widths.heads = widths.heads.max(heads);
            widths.gates = widths.gates.max(gates);
        };
        for layer in &spec.layers {
            fit([ffn_width(&layer.ffn); 3], 0, 0);
        }
        for a in spec.attention_layers() {
            fit([a.q.rows, a.k.rows, a.v.rows], a.o.cols, 0);
        }
        for d in spec.delta_layers() {
            fit([d.qkv.rows, d.z.rows, d.qkv.rows], d.out.cols, d.n_v_heads);
        }
        let experts = spec.layers.iter().filter_map(|layer| layer.ffn.experts());
        widths.experts = experts
            .map(ExpertBuffers::floats_per_row)
            .max()
            .unwrap_or(0);
        widths
    }

    /// Floats per row in total.
    pub(crate) fn total(&self) -> usize {
        let mixers = 2 * (self.heads + self.gates);
        3 * self.hidden + self.wide.iter().sum::<usize>() + mixers + self.experts
    }
}

impl PassBuffers {
    /// Buffers for up to `n_rows` rows. The system commits the memory at first use.
    pub(crate) fn new(widths: BufferWidths, n_rows: usize) -> PassBuffers {
        let buffer = |width: usize| vec![0.0; width * n_rows];
        PassBuffers {
            x: buffer(widths.hidden),
            y: buffer(widths.hidden),
            update: buffer(widths.hidden),
            wide: widths.wide.map(buffer),
            heads: [buffer(widths.heads), buffer(widths.heads)],
            gates: [buffer(widths.gates), buffer(widths.gates)],
            experts: ExpertBuffers::default(),
            angles: Vec::new(),
        }
    }

    /// Computes the rotary tables of a pass once for all layers.
    pub(crate) fn fill_rope_tables(
        &mut self,
        weights: &ModelWeights,
        segments: &[Segment<'_>],
        n_rows: usize,
    ) {
        for layer in &weights.layers {
            let LayerMixer::Attention(attention) = &layer.mixer else {
                continue;
            };
            let frequencies = &attention.inverse_frequencies;
            if !self
                .angles
                .iter()
                .any(|table| table.inverse_frequencies == *frequencies)
            {
                self.angles.push(RopeTable {
                    inverse_frequencies: frequencies.clone(),
                    cos: Vec::new(),
                    sin: Vec::new(),
                });
            }
        }
        for table in &mut self.angles {
            let RopeTable {
                inverse_frequencies,
                cos,
                sin,
            } = table;
            let half = inverse_frequencies.len();
            cos.resize(n_rows * half, 0.0);
            sin.resize(n_rows * half, 0.0);
            let positions = segments.iter().flat_map(Segment::positions);
            for (row, position) in positions.enumerate() {
                let at = row * half..(row + 1) * half;
                rope::angles_at(
                    position,
                    inverse_frequencies,
                    &mut cos[at.clone()],
                    &mut sin[at],
                );
            }
        }
    }
}

/// The rotary table of these frequencies.
pub(crate) fn angles_of<'a>(all: &'a [RopeTable], frequencies: &[f64]) -> &'a RopeTable {
    all.iter()
        .find(|table| table.inverse_frequencies == frequencies)
        .expect("the pass computed every rotary table of the model")
}

impl Segment<'_> {
    /// The position of each row.
    fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_rows).map(|row| {
            self.seq.position
                + match self.work {
                    SegmentKind::Chunk => row,
                    SegmentKind::Tree(plan) => usize::from(plan.tree.depths()[row]),
                }
        })
    }
}

impl ExecContext<'_> {
    /// Rows per parallel item, for a few items per thread.
    pub(crate) fn grain(&self, n_rows: usize) -> usize {
        (n_rows / (4 * self.pool.threads())).clamp(1, 16)
    }

    /// Rows of `width` cheap values per parallel item: all rows if splitting would take longer than
    /// the work.
    pub(crate) fn light_grain(&self, n_rows: usize, width: usize) -> usize {
        /// Number of cheap values that take as long as starting a parallel region.
        const FEW: usize = 8192;
        if n_rows * width <= FEW {
            n_rows.max(1)
        } else {
            self.grain(n_rows)
        }
    }

    /// `y = rms(x)`, row by row; `x` and `y` are `[n, hidden]`, `weight` `[hidden]`.
    pub(crate) fn norm(&self, x: &[f32], weight: &[f32], y: &mut [f32]) {
        let hidden = weight.len();
        let size = self.light_grain(x.len() / hidden, hidden) * hidden;
        let rows = x.chunks(size).zip(y.chunks_mut(size));
        self.pool.for_each_item(rows, |(x, y)| {
            for (x, y) in x.chunks_exact(hidden).zip(y.chunks_exact_mut(hidden)) {
                (self.kernels.rms)(x, weight, self.norm_eps, y);
            }
        });
    }

    /// `rows = rms(rows)`, each `[hidden]`, if there is a norm.
    pub(crate) fn post_norm(&self, rows: &mut [f32], weight: Option<&[f32]>) {
        let Some(weight) = weight else { return };
        let hidden = weight.len();
        let size = self.light_grain(rows.len() / hidden, hidden) * hidden;
        self.pool.for_each_item(rows.chunks_mut(size), |rows| {
            for row in rows.chunks_exact_mut(hidden) {
                (self.kernels.rms_in_place)(row, weight, self.norm_eps);
            }
        });
    }

    /// Adds a bias to each row, if there is one.
    pub(crate) fn add_bias(&self, rows: &mut [f32], bias: Option<&[f32]>) {
        let Some(bias) = bias else { return };
        let width = bias.len();
        let size = self.light_grain(rows.len() / width, width) * width;
        self.pool.for_each_item(rows.chunks_mut(size), |rows| {
            for row in rows.chunks_exact_mut(width) {
                (self.kernels.add)(row, bias);
            }
        });
    }

    /// `x += update`, then `y = rms(x)`, row by row; all `[n, hidden]`.
    pub(crate) fn add_norm(&self, x: &mut [f32], update: &[f32], weight: &[f32], y: &mut [f32]) {
        let hidden = weight.len();
        let size = self.light_grain(x.len() / hidden, hidden) * hidden;
        let x = x.chunks_mut(size);
        let rows = x.zip(update.chunks(size)).zip(y.chunks_mut(size));
        self.pool.for_each_item(rows, |((x, update), y)| {
            (self.kernels.add)(x, update);
            for (x, y) in x.chunks_exact(hidden).zip(y.chunks_exact_mut(hidden)) {
                (self.kernels.rms)(x, weight, self.norm_eps, y);
            }
        });
    }

    pub(crate) fn add_norm_of(&self, buffers: &mut PassBuffers, n_rows: usize, weight: &[f32]) {
        let all = n_rows * weight.len();
        let PassBuffers { x, y, update, .. } = buffers;
        self.add_norm(&mut x[..all], &update[..all], weight, &mut y[..all]);
    }
}

impl PassBuffers {
    /// The rotary tables and the buffers of a mixer.
    pub(crate) fn split(&mut self) -> (PassBufferParts<'_>, &[RopeTable]) {
        let [a, b, c] = &mut self.wide;
        let [heads, rows] = &mut self.heads;
        let [beta, alpha] = &mut self.gates;
        (
            PassBufferParts {
                y: &mut self.y,
                update: &mut self.update,
                a,
                b,
                c,
                heads,
                rows,
                beta,
                alpha,
                experts: &mut self.experts,
            },
            &self.angles,
        )
    }
}

/// The [`PassBuffers`] that a block uses.
pub(crate) struct PassBufferParts<'a> {
    pub(crate) y: &'a mut [f32],
    pub(crate) update: &'a mut [f32],
    pub(crate) a: &'a mut [f32],
    pub(crate) b: &'a mut [f32],
    pub(crate) c: &'a mut [f32],
    pub(crate) heads: &'a mut [f32],
    pub(crate) rows: &'a mut [f32],
    pub(crate) beta: &'a mut [f32],
    pub(crate) alpha: &'a mut [f32],
    pub(crate) experts: &'a mut ExpertBuffers,
}

/// A tree with precomputed paths and state schedule, built once per verify.
pub(crate) struct TreePlan {
    pub(crate) tree: Tree,
    /// Path of each node from the root: `paths[starts[i]..starts[i + 1]]`.
    paths: Vec<NodeIdx>,
    starts: Vec<usize>,
    /// DFS schedule of the nodes: each parent's state is in a buffer when a child needs it.
    pub(crate) steps: Vec<StateStep>,
    /// State buffers that the schedule uses.
    pub(crate) n_buffers: usize,
}

/// One step of the schedule: the source and destination of a node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateStep {
    pub(crate) node: NodeIdx,
    /// Buffer with the parent's state; `None` for the committed state.
    pub(crate) source: Option<usize>,
    /// Buffer for this node's state; `None` for a leaf.
    pub(crate) target: Option<usize>,
}

impl TreePlan {
    pub(crate) fn new(tree: &Tree) -> TreePlan {
        let mut paths = Vec::with_capacity(tree.len());
        let mut starts = vec![0];
        for node in tree.nodes() {
            paths.extend_from_slice(tree.path_to(node).nodes());
            starts.push(paths.len());
        }
        let mut plan = TreePlan {
            paths,
            starts,
            steps: Vec::with_capacity(tree.len()),
            n_buffers: 0,
            tree: tree.clone(),
        };
        plan.order_states();
        plan
    }

    /// The path from the root to `node`, both included.
    pub(crate) fn path(&self, node: usize) -> &[NodeIdx] {
        &self.paths[self.starts[node]..self.starts[node + 1]]
    }

    /// The parent of each row.
    pub(crate) fn parent(&self, node: usize) -> Option<usize> {
        self.tree.parent(NodeIdx(node as u16)).map(NodeIdx::index)
    }

    /// DFS order, so that a chain needs one buffer and a tree one more per open fork. The last
    /// child reuses its parent's buffer.
    fn order_states(&mut self) {
        // Entries are `(node, source, whether the source is free afterwards, first free buffer)`.
        let mut stack = vec![(NodeIdx::ROOT, None, false, 0)];
        while let Some((node, source, last, free)) = stack.pop() {
            let children: Vec<NodeIdx> = self.tree.children(node).collect();
            let (target, free) = match (children.is_empty(), source) {
                (true, _) => (None, free),
                (false, Some(buffer)) if last => (Some(buffer), free),
                (false, _) => (Some(free), free + 1),
            };
            self.n_buffers = self.n_buffers.max(free);
            self.steps.push(StateStep {
                node,
                source,
                target,
            });
            for (i, &child) in children.iter().enumerate() {
                // Last in, first out: push the first child last.
                stack.push((child, target, i == 0, free));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::TokenId;

    fn plan(parents: &[u16]) -> TreePlan {
        let tokens: Vec<TokenId> = (0..=parents.len() as u32).map(TokenId).collect();
        let parents: Vec<NodeIdx> = parents.iter().copied().map(NodeIdx).collect();
        TreePlan::new(&Tree::new(&tokens, &parents).unwrap())
    }

    /// Runs the schedule with paths instead of states.
    fn check(plan: &TreePlan) {
        let mut buffers: Vec<Vec<NodeIdx>> = vec![Vec::new(); plan.n_buffers];
        let mut seen = Vec::new();
        for step in &plan.steps {
            let mut state = step.source.map_or(Vec::new(), |b| buffers[b].clone());
            state.push(step.node);
            assert_eq!(state, plan.path(step.node.index()));
            seen.push(step.node);
            if let Some(target) = step.target {
                buffers[target] = state;
            }
        }
        seen.sort();
        assert!(seen.into_iter().eq(plan.tree.nodes()));
    }

    #[test]
    fn schedule_provides_each_node_with_its_parent_state() {
        for parents in [
            &[][..],
            &[0, 1, 2, 3],
            &[0, 0, 0, 0],
            &[0, 0, 1, 1, 2, 2, 3, 4, 5, 6],
            &[0, 1, 0, 3, 1, 5, 5, 2],
        ] {
            check(&plan(parents));
        }
    }

    #[test]
    fn chains_need_one_state_buffer_and_single_nodes_none() {
        assert_eq!(plan(&[]).n_buffers, 0);
        assert_eq!(plan(&[0, 1, 2, 3, 4]).n_buffers, 1);
    }
}
