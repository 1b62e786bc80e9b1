//! Attention of draft blocks: [`crate::reference::draft::attend_block`] over stored context rows,
//! all heads.
//!
//! Rows of a block and query heads of a group share each read of the keys. Keys come in blocks that
//! are counted from the first visible key; the draft block itself is last. A row's result does not
//! depend on other sequences in the call.

use std::ops::Range;

use contract::AttentionSpec;

use crate::draft_cache::DraftRing;
use crate::pass::ExecContext;
use crate::reference::draft::DraftMask;
use crate::scratch::take;

use super::attention::decode_of;
use super::delta_chunked::transpose;
use super::softmax::{BLOCK, Running};

/// Keys are padded to whole vectors of the widest kernels.
const KEYS: usize = 16;

/// One sequence's block at one layer: `q` `[block, n_heads, head_dim]`, `k` and `v`
/// `[block, n_kv_heads, head_dim]`, all prepared.
pub(crate) struct DraftBlock<'a> {
    pub(crate) ring: &'a DraftRing,
    pub(crate) committed: usize,
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
}

/// A layer's attention.
#[derive(Clone, Copy)]
pub(crate) struct DraftAttention<'a> {
    pub(crate) spec: &'a AttentionSpec,
    pub(crate) mask: DraftMask,
    /// `[n_heads]`.
    pub(crate) sinks: Option<&'a [f32]>,
}

/// One key head of one block, for some of its rows.
struct DraftRow<'a> {
    block: &'a DraftBlock<'a>,
    kv_head: usize,
    first_row: usize,
    /// `[rows, n_heads / n_kv_heads, head_dim]`.
    out: Vec<f32>,
}

/// Writes `out` `[blocks, block, n_heads, head_dim]`.
pub(crate) fn attend(
    compute: ExecContext<'_>,
    attention: DraftAttention<'_>,
    blocks: &[DraftBlock<'_>],
    out: &mut [f32],
) {
    let spec = attention.spec;
    let (dim, group) = (spec.head_dim, spec.n_heads / spec.n_kv_heads);
    let width = spec.n_heads * dim;
    let n_rows = out.len() / width / blocks.len().max(1);
    // One item per thread: more items would read the keys more often.
    let wanted = compute
        .pool
        .threads()
        .div_ceil(blocks.len() * spec.n_kv_heads);
    let rows_per_item = n_rows.div_ceil(wanted).max(1);
    let mut items = Vec::new();
    for block in blocks {
        for kv_head in 0..spec.n_kv_heads {
            for first_row in (0..n_rows).step_by(rows_per_item) {
                let rows = rows_per_item.min(n_rows - first_row);
                items.push(DraftRow {
                    block,
                    kv_head,
                    first_row,
                    out: vec![0.0; rows * group * dim],
                });
            }
        }
    }
    compute.pool.for_each_item(items.iter_mut(), |item| {
        attend_item(compute, attention, item);
    });
    let per_block = items.len() / blocks.len().max(1);
    for (i, item) in items.iter().enumerate() {
        let block_out = &mut out[i / per_block * n_rows * width..][..n_rows * width];
        for (row, heads) in item.out.chunks_exact(group * dim).enumerate() {
            let at = (item.first_row + row) * width + item.kv_head * group * dim;
            block_out[at..at + group * dim].copy_from_slice(heads);
        }
    }
}

fn attend_item(compute: ExecContext<'_>, attention: DraftAttention<'_>, item: &mut DraftRow<'_>) {
    let DraftAttention { spec, mask, sinks } = attention;
    let DraftRow {
        block,
        kv_head,
        first_row,
        out,
    } = item;
    let (kv_head, first_row) = (*kv_head, *first_row);
    let (dim, group) = (spec.head_dim, spec.n_heads / spec.n_kv_heads);
    let m = out.len() / dim;
    let (kernels, ring, committed) = (compute.kernels, block.ring, block.committed);
    let kv_width = spec.n_kv_heads * dim;
    let n_block = block.k.len() / kv_width;
    let decode_key = decode_of(kernels, ring.shape.k);
    let decode_value = decode_of(kernels, ring.shape.v);
    let len = m * (dim + BLOCK + 2) + 2 * BLOCK * dim;
    compute.scratch.with(len, |mut scratch| {
        let queries = take(&mut scratch, m * dim);
        let scores = take(&mut scratch, m * BLOCK);
        let sums = take(&mut scratch, 2 * m);
        let rows = take(&mut scratch, BLOCK * dim);
        let rotated = take(&mut scratch, BLOCK * dim);
        for (i, query) in queries.chunks_exact_mut(dim).enumerate() {
            let (row, head) = (first_row + i / group, kv_head * group + i % group);
            query.copy_from_slice(&block.q[(row * spec.n_heads + head) * dim..][..dim]);
        }
        let mut running = Running::new(sums, out);
        let mut absorb = |rows: &mut [f32],
                          read: &dyn Fn(bool, usize, &mut [f32]),
                          n: usize,
                          seen: &dyn Fn(usize) -> Range<usize>| {
            // Whole vectors of keys; padding keys are zero and masked.
            let width = n.next_multiple_of(KEYS).min(BLOCK);
            let (rows, rotated) = (&mut rows[..width * dim], &mut rotated[..width * dim]);
            let scores = &mut scores[..m * width];
            for (i, row) in rows.chunks_exact_mut(dim).take(n).enumerate() {
                read(true, i, row);
            }
            rows[n * dim..].fill(0.0);
            transpose(rows, dim, rotated);
            scores.fill(0.0);
            (kernels.accumulate)(queries, rotated, width, scores);
            for (i, scores) in scores.chunks_exact_mut(width).enumerate() {
                let seen = seen(first_row + i / group);
                scores[..seen.start].fill(f32::NEG_INFINITY);
                scores[seen.end..].fill(f32::NEG_INFINITY);
                for score in &mut scores[seen] {
                    *score *= spec.scale;
                }
            }
            for (i, row) in rows.chunks_exact_mut(dim).take(n).enumerate() {
                read(false, i, row);
            }
            running.absorb(kernels, scores, rows, width);
        };
        let mut begin = mask.first(committed).max(ring.held(committed).start);
        while begin < committed {
            let n = BLOCK.min(committed - begin);
            let read = |key: bool, i: usize, row: &mut [f32]| {
                if key {
                    decode_key(ring.key(begin + i, kv_head), row)
                } else {
                    decode_value(ring.value(begin + i, kv_head), row)
                }
            };
            let seen = |row: usize| {
                let first = (committed + row + 1).saturating_sub(mask.window);
                first.saturating_sub(begin).min(n)..n
            };
            absorb(rows, &read, n, &seen);
            begin += n;
        }
        // A block has at most as many rows as a tree has nodes: one block of keys.
        let read = |key: bool, i: usize, row: &mut [f32]| {
            let from = if key { block.k } else { block.v };
            row.copy_from_slice(&from[i * kv_width + kv_head * dim..][..dim]);
        };
        let seen = |row: usize| if mask.causal { 0..row + 1 } else { 0..n_block };
        absorb(rows, &read, n_block, &seen);
        if let Some(sinks) = sinks {
            running.absorb_sinks(|i| sinks[kv_head * group + i % group]);
        }
        running.finish();
    });
}

/// Scratch floats of one item.
pub(crate) fn scratch_floats(spec: &AttentionSpec, block: usize) -> usize {
    let m = block * spec.n_heads / spec.n_kv_heads;
    m * (spec.head_dim + BLOCK + 2) + 2 * BLOCK * spec.head_dim
}
