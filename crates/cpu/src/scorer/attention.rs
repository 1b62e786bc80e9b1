//! Block-sparse attention of query blocks, heads in parallel.

use contract::{AttentionSpec, BlockSparsity, OutputGate};

use crate::blocks::softmax::Running;
use crate::pass::ExecContext;
use crate::reference::score::kept_blocks;
use crate::scorer::keys::LayerKeys;

const BLOCK: usize = BlockSparsity::BLOCK;

/// Width of a query head in the projection, gate included.
pub(super) fn q_stride(spec: &AttentionSpec) -> usize {
    match spec.gate {
        OutputGate::None => spec.head_dim,
        OutputGate::SigmoidPerHead => 2 * spec.head_dim,
    }
}

/// Writes `out` `[n, n_heads, head_dim]`, gate included, for prepared queries
/// `[n, n_heads, head and gate]` from row `first` on, which begins a block.
pub(super) fn attend(
    compute: ExecContext<'_>,
    (spec, sparsity): (&AttentionSpec, BlockSparsity),
    keys: &LayerKeys,
    (first, q): (usize, &[f32]),
    out: &mut [f32],
) {
    let (dim, stride, n_heads) = (spec.head_dim, q_stride(spec), spec.n_heads);
    let n_rows = q.len() / (n_heads * stride);
    let n_blocks = n_rows.div_ceil(BLOCK);
    // `[block, head, row, head_dim]`, so that each item writes a part of its own.
    let mut by_head = vec![0.0; n_blocks * n_heads * BLOCK * dim];
    let items = by_head.chunks_exact_mut(BLOCK * dim).enumerate();
    // The last blocks take longest. They start first, so that no thread ends alone with them.
    compute.pool.for_each_item(items.rev(), |(item, out)| {
        let (block, head) = (item / n_heads, item % n_heads);
        let rows = block * BLOCK..n_rows.min((block + 1) * BLOCK);
        let mut queries = vec![0.0; rows.len() * dim];
        for (row, query) in rows.clone().zip(queries.chunks_exact_mut(dim)) {
            let at = (row * n_heads + head) * stride;
            query.copy_from_slice(&q[at..][..dim]);
        }
        let head_block = HeadBlock {
            head,
            block: first / BLOCK + block,
            queries: &queries,
        };
        let out = &mut out[..rows.len() * dim];
        attend_block(compute, (spec, sparsity), keys, head_block, out);
    });
    let width = n_heads * dim;
    let rows = out.chunks_exact_mut(width).enumerate();
    compute.pool.for_each_item(rows, |(row, out)| {
        for (head, out) in out.chunks_exact_mut(dim).enumerate() {
            let at = ((row / BLOCK * n_heads + head) * BLOCK + row % BLOCK) * dim;
            out.copy_from_slice(&by_head[at..][..dim]);
            if spec.gate == OutputGate::SigmoidPerHead {
                let gate = &q[(row * n_heads + head) * stride + dim..][..dim];
                (compute.kernels.sigmoid_gate)(out, gate);
            }
        }
    });
}

/// The queries of one head in one block.
struct HeadBlock<'a> {
    head: usize,
    block: usize,
    /// `[n, head_dim]`.
    queries: &'a [f32],
}

/// Writes `out` `[n, head_dim]`.
fn attend_block(
    compute: ExecContext<'_>,
    (spec, sparsity): (&AttentionSpec, BlockSparsity),
    keys: &LayerKeys,
    of: HeadBlock<'_>,
    out: &mut [f32],
) {
    let HeadBlock {
        head,
        block,
        queries,
    } = of;
    let kernels = compute.kernels;
    let kv_head = head / (spec.n_heads / spec.n_kv_heads);
    let n = queries.len() / spec.head_dim;
    let kept = if sparsity.alpha > 0.0 {
        let lse = keys.block_lse(kernels, (kv_head, block), queries, spec.scale);
        kept_blocks(&lse, keys.n_blocks(), sparsity)
    } else {
        vec![true; block + 1]
    };
    let mut stats = vec![0.0; 2 * n];
    let mut running = Running::new(&mut stats, out);
    let mut scores = vec![0.0; n * BLOCK];
    for other in (0..=block).filter(|other| kept[*other]) {
        let (keys, values) = keys.block(kv_head, other);
        scores.fill(0.0);
        (kernels.accumulate)(queries, keys, BLOCK, &mut scores);
        for (i, scores) in scores.chunks_exact_mut(BLOCK).enumerate() {
            let position = block * BLOCK + i;
            let visible = visible(spec, position, other);
            scores[..visible.start].fill(f32::NEG_INFINITY);
            scores[visible.end..].fill(f32::NEG_INFINITY);
            scores[visible].iter_mut().for_each(|s| *s *= spec.scale);
        }
        running.absorb(kernels, &mut scores, values, BLOCK);
    }
    running.finish();
}

/// The keys of block `other` that a row at `position` sees.
fn visible(spec: &AttentionSpec, position: usize, other: usize) -> std::ops::Range<usize> {
    let begin = other * BLOCK;
    let end = (position + 1).saturating_sub(begin).min(BLOCK);
    let first = spec
        .window
        .map_or(0, |window| (position + 1).saturating_sub(window));
    first.saturating_sub(begin).min(end)..end
}
