//! The attention mixer: projections, q/k norm, rotary embedding, KV cache, softmax attention,
//! gate, output projection.

use contract::quant::hadamard;
use contract::{AttentionSpec, AttentionWindow, OutputGate};

use crate::blocks::softmax::{BLOCK, Running};
use crate::kv_shape::KvShape;
use crate::linear::apply_all;
use crate::pass::{ExecContext, LayerSegment, PassBuffers, RopeTable, SegmentKind, angles_of};
use crate::reference::kv::{self, Codec};
use crate::reference::rope;
use crate::scratch::take;
use crate::state::KvCache;
use crate::weights::Attention;

use super::delta_chunked::transpose;

mod keys;
mod path_rows;
mod tree;

pub(super) use keys::decode_of;
use keys::{Keys, dot_of, first_visible, q_stride, rotate_inverse};
pub(crate) use path_rows::{Angles, KvSpan, PathRow, attend_paths, prepare_queries, store_kv};
use tree::{Nodes, attend_nodes};

/// Query rows that share each read of the cached keys in prefill.
const TILE: usize = 32;

/// Reads `buffers.y`, writes `buffers.update`, and stores each row's key and value after the
/// committed ones.
pub(crate) fn mix(
    compute: ExecContext<'_>,
    weights: &Attention,
    buffers: &mut PassBuffers,
    segments: &mut [LayerSegment<'_, KvCache>],
) {
    let spec = &weights.spec;
    let n_rows: usize = segments.iter().map(|s| s.n_rows).sum();
    let (q_width, kv_width) = (weights.q.rows(), weights.k.rows());
    let (parts, angles) = buffers.split();
    let q = &mut parts.a[..n_rows * q_width];
    let k = &mut parts.b[..n_rows * kv_width];
    let v = &mut parts.c[..n_rows * kv_width];
    apply_all(
        compute.pool,
        &parts.y[..n_rows * weights.q.cols()],
        n_rows,
        &mut [
            (&weights.q, &mut *q),
            (&weights.k, &mut *k),
            (&weights.v, &mut *v),
        ],
    );
    compute.add_bias(q, weights.q_bias.as_deref());
    compute.add_bias(k, weights.k_bias.as_deref());
    compute.add_bias(v, weights.v_bias.as_deref());
    let rows = Projected {
        angles: angles_of(angles, &weights.inverse_frequencies),
        q: &mut *q,
        k,
        v,
    };
    store(compute, weights, segments, rows);
    let heads = &mut parts.heads[..n_rows * spec.n_heads * spec.head_dim];
    attend(compute, &weights.spec, segments, q, heads);
    let update = &mut parts.update[..n_rows * weights.o.rows()];
    weights.o.apply(compute.pool, heads, n_rows, update);
    compute.add_bias(update, weights.o_bias.as_deref());
}

/// A few rows to be stored in the cache.
struct StoreItem<'a> {
    first_row: usize,
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a [f32],
    keys: &'a mut [u8],
    values: &'a mut [u8],
    shape: KvShape,
}

/// The projections of all rows of a pass, before normalisation and rotation.
struct Projected<'a> {
    angles: &'a RopeTable,
    /// `[n, n_heads, head_dim]`, each head followed by its gate where there is one.
    q: &'a mut [f32],
    /// `[n, n_kv_heads, head_dim]`.
    k: &'a mut [f32],
    /// `[n, n_kv_heads, head_dim]`.
    v: &'a [f32],
}

/// Normalises and rotates queries and keys in place, and encodes keys and values into their slots.
fn store(
    compute: ExecContext<'_>,
    weights: &Attention,
    segments: &mut [LayerSegment<'_, KvCache>],
    rows: Projected<'_>,
) {
    let Projected {
        angles,
        mut q,
        mut k,
        mut v,
    } = rows;
    let spec = &weights.spec;
    let rotate = rope::rotation(spec.rope.pairs);
    let grain = compute.grain(v.len() / weights.k.rows());
    let mut items = Vec::new();
    for segment in segments {
        let (n, position, cache) = (segment.n_rows, segment.position, &mut *segment.state);
        let shape = cache.shape;
        let slots = |bytes: usize| position * bytes..(position + n) * bytes;
        let keys = &mut cache.keys[slots(shape.k_bytes())];
        let values = &mut cache.values[slots(shape.v_bytes())];
        let (own_v, rest) = v.split_at(n * weights.v.rows());
        v = rest;
        let rows = take(&mut q, n * weights.q.rows())
            .chunks_mut(grain * weights.q.rows())
            .zip(take(&mut k, n * weights.k.rows()).chunks_mut(grain * weights.k.rows()))
            .zip(own_v.chunks(grain * weights.v.rows()))
            .zip(keys.chunks_mut(grain * shape.k_bytes()))
            .zip(values.chunks_mut(grain * shape.v_bytes()));
        for (i, ((((q, k), v), keys), values)) in rows.enumerate() {
            items.push(StoreItem {
                first_row: segment.first_row + i * grain,
                q,
                k,
                v,
                keys,
                values,
                shape,
            });
        }
    }
    compute.pool.for_each_item(items.into_iter(), |item| {
        let (dim, half) = (spec.head_dim, spec.rope.dims / 2);
        let prepare = |heads: &mut [f32], stride: usize, per_row: usize, norm: Option<&[f32]>| {
            for (i, head) in heads.chunks_exact_mut(stride).enumerate() {
                let head = &mut head[..dim];
                if let Some(norm) = norm {
                    (compute.kernels.rms_in_place)(head, norm, compute.norm_eps);
                }
                let at = (item.first_row + i / per_row) * half;
                rotate(head, &angles.cos[at..][..half], &angles.sin[at..][..half]);
            }
        };
        prepare(
            item.q,
            q_stride(spec),
            spec.n_heads,
            weights.q_norm.as_deref(),
        );
        if item.shape.k.is_rotated() {
            let heads = item.q.chunks_exact_mut(q_stride(spec));
            heads.for_each(|head| hadamard::rotate(&mut head[..dim]));
        }
        prepare(item.k, dim, spec.n_kv_heads, weights.k_norm.as_deref());
        encode_rows(item.shape.k, dim, item.k, item.keys);
        encode_rows(item.shape.v, dim, item.v, item.values);
    });
}

fn encode_rows(codec: Codec, dim: usize, rows: &[f32], bytes: &mut [u8]) {
    let stored = bytes.chunks_exact_mut(codec.row_bytes(dim));
    for (row, bytes) in rows.chunks_exact(dim).zip(stored) {
        kv::encode(codec, row, bytes);
    }
}

/// A parallel item: the output heads that it computes.
enum AttentionItem<'a> {
    Node(Node<'a>),
    Nodes(Nodes<'a>),
    Rows(RowTile<'a>),
}

/// Query heads of one key head at one node of a tree.
struct Node<'a> {
    keys: Keys<'a>,
    /// The heads' part of the node's projection.
    q: &'a [f32],
    /// `[heads, head_dim]`.
    out: &'a mut [f32],
}

/// All heads of up to [`TILE`] consecutive rows.
struct RowTile<'a> {
    cache: &'a KvCache,
    first_position: usize,
    q: &'a [f32],
    out: &'a mut [f32],
}

/// Writes `out[n, n_heads, head_dim]` from the prepared queries and the caches, gate included.
fn attend(
    compute: ExecContext<'_>,
    spec: &AttentionSpec,
    segments: &[LayerSegment<'_, KvCache>],
    q: &[f32],
    mut out: &mut [f32],
) {
    let q_width = spec.n_heads * q_stride(spec);
    let out_width = spec.n_heads * spec.head_dim;
    let mut items = Vec::new();
    for segment in segments {
        let cache = &*segment.state;
        let q = &q[segment.first_row * q_width..][..segment.n_rows * q_width];
        let out = take(&mut out, segment.n_rows * out_width);
        match segment.work {
            SegmentKind::Tree(plan) if segment.n_rows < compute.pool.threads() => {
                let group = spec.n_heads / spec.n_kv_heads;
                // Heads of a group share each read of the keys, unless that leaves threads without
                // work.
                let heads = if segment.n_rows * spec.n_kv_heads < compute.pool.threads() {
                    1
                } else {
                    group
                };
                let q = q.chunks_exact(heads * q_stride(spec));
                let out = out.chunks_exact_mut(heads * spec.head_dim);
                for (i, (q, out)) in q.zip(out).enumerate() {
                    let (node, head) = (i * heads / spec.n_heads, i * heads % spec.n_heads);
                    let keys = Keys {
                        cache,
                        kv_head: head / group,
                        committed: segment.position,
                        path: plan.path(node),
                        window: plan.tree.window(),
                        layer_window: spec.window,
                    };
                    items.push(AttentionItem::Node(Node { keys, q, out }));
                }
            }
            SegmentKind::Tree(plan) => {
                let grain = segment.n_rows.div_ceil(compute.pool.threads()).min(TILE);
                let out = out.chunks_mut(grain * out_width);
                for (i, (q, out)) in q.chunks(grain * q_width).zip(out).enumerate() {
                    items.push(AttentionItem::Nodes(Nodes {
                        cache,
                        committed: segment.position,
                        plan,
                        first_node: i * grain,
                        q,
                        out,
                    }));
                }
            }
            SegmentKind::Chunk => {
                let tiles = out.chunks_mut(TILE * out_width);
                for (i, (out, q)) in tiles.zip(q.chunks(TILE * q_width)).enumerate() {
                    items.push(AttentionItem::Rows(RowTile {
                        cache,
                        first_position: segment.position + i * TILE,
                        q,
                        out,
                    }));
                }
            }
        }
    }
    // The longest items come last. They start first, so that no thread ends alone with a long item.
    let items = items.into_iter().rev();
    compute.pool.for_each_item(items, |item| match item {
        AttentionItem::Node(node) => attend_node(compute, spec, node),
        AttentionItem::Nodes(nodes) => attend_nodes(compute, spec, nodes),
        AttentionItem::Rows(tile) => attend_tile(compute, spec, tile),
    });
}

/// Query heads that share a key head, at one node.
///
/// Keys are read in path order in blocks at absolute positions. A node's result therefore equals
/// the result of decoding its path token by token.
fn attend_node(compute: ExecContext<'_>, spec: &AttentionSpec, node: Node<'_>) {
    let Node { keys, q, out } = node;
    let (dim, stride) = (spec.head_dim, q_stride(spec));
    let heads = out.len() / dim;
    let kernels = compute.kernels;
    let shape = keys.cache.shape;
    let dot = dot_of(kernels, shape.k);
    let decode = decode_of(kernels, shape.v);
    let len = BLOCK * dim + heads * (BLOCK + 2);
    compute.scratch.with(len, |mut scratch| {
        let values = take(&mut scratch, BLOCK * dim);
        let scores = take(&mut scratch, heads * BLOCK);
        let mut running = Running::new(take(&mut scratch, 2 * heads), out);
        let hidden = keys.hidden();
        for begin in (0..keys.n()).step_by(BLOCK) {
            let n = BLOCK.min(keys.n() - begin);
            if hidden.covers(begin..begin + n) {
                continue;
            }
            let scores = &mut scores[..heads * n];
            let values = &mut values[..n * dim];
            for (i, value) in values.chunks_exact_mut(dim).enumerate() {
                if hidden.contains(begin + i) {
                    value.fill(0.0);
                    (0..heads).for_each(|head| scores[head * n + i] = f32::NEG_INFINITY);
                    continue;
                }
                let slot = keys.slot(begin + i);
                let key = keys.key(slot);
                for (head, q) in q.chunks_exact(stride).enumerate() {
                    scores[head * n + i] = dot(&q[..dim], key) * spec.scale;
                }
                decode(keys.value(slot), value);
            }
            running.absorb(kernels, scores, values, n);
        }
        running.finish();
    });
    rotate_inverse(shape, out);
    if spec.gate == OutputGate::SigmoidPerHead {
        for (out, q) in out.chunks_exact_mut(dim).zip(q.chunks_exact(stride)) {
            (kernels.sigmoid_gate)(out, &q[dim..]);
        }
    }
}

/// Scratch floats of one tile of rows.
pub(crate) fn scratch_floats(spec: &AttentionSpec) -> usize {
    let m = TILE * spec.n_heads / spec.n_kv_heads;
    let tile = m * (2 * spec.head_dim + BLOCK + 2) + 2 * BLOCK * spec.head_dim;
    tile.max(tree::scratch_floats(spec, TILE))
}

/// All heads of up to [`TILE`] consecutive rows, the first at `first_position`.
///
/// Keys are read in whole blocks at absolute positions. A row's result therefore depends neither on
/// the other rows of its tile nor on the number of cached keys.
fn attend_tile(compute: ExecContext<'_>, spec: &AttentionSpec, tile: RowTile<'_>) {
    let RowTile {
        cache,
        first_position,
        q,
        out,
    } = tile;
    let (dim, stride) = (spec.head_dim, q_stride(spec));
    let (q_width, out_width) = (spec.n_heads * stride, spec.n_heads * dim);
    let group = spec.n_heads / spec.n_kv_heads;
    let n_rows = q.len() / q_width;
    let m = n_rows * group;
    let kernels = compute.kernels;
    let decode_key = decode_of(kernels, cache.shape.k);
    let decode_value = decode_of(kernels, cache.shape.v);
    compute.scratch.with(scratch_floats(spec), |mut scratch| {
        let queries = take(&mut scratch, m * dim);
        let outputs = take(&mut scratch, m * dim);
        let scores = take(&mut scratch, m * BLOCK);
        let sums = take(&mut scratch, 2 * m);
        let block = take(&mut scratch, BLOCK * dim);
        let rotated = take(&mut scratch, BLOCK * dim);
        for kv_head in 0..spec.n_kv_heads {
            let keys = Keys {
                cache,
                kv_head,
                committed: first_position + n_rows,
                path: &[],
                window: AttentionWindow::FULL,
                layer_window: None,
            };
            for (i, query) in queries.chunks_exact_mut(dim).enumerate() {
                let at = (i / group) * q_width + (kv_head * group + i % group) * stride;
                query.copy_from_slice(&q[at..][..dim]);
            }
            let mut running = Running::new(sums, outputs);
            // The first row sees the earliest keys.
            let first = first_visible(spec.window, first_position) / BLOCK * BLOCK;
            for begin in (first..keys.n()).step_by(BLOCK) {
                let n = BLOCK.min(keys.n() - begin);
                for (i, row) in block.chunks_exact_mut(dim).take(n).enumerate() {
                    decode_key(keys.key(begin + i), row);
                }
                block[n * dim..].fill(0.0);
                transpose(block, dim, rotated);
                scores.fill(0.0);
                (kernels.accumulate)(queries, rotated, BLOCK, scores);
                for (i, scores) in scores.chunks_exact_mut(BLOCK).enumerate() {
                    let position = first_position + i / group;
                    let end = (position + 1).saturating_sub(begin).min(BLOCK);
                    let start = first_visible(spec.window, position);
                    let start = start.saturating_sub(begin).min(end);
                    scores[..start].fill(f32::NEG_INFINITY);
                    for score in &mut scores[start..end] {
                        *score *= spec.scale;
                    }
                    scores[end..].fill(f32::NEG_INFINITY);
                }
                for (i, row) in block.chunks_exact_mut(dim).take(n).enumerate() {
                    decode_value(keys.value(begin + i), row);
                }
                running.absorb(kernels, scores, block, BLOCK);
            }
            running.finish();
            rotate_inverse(cache.shape, outputs);
            for (i, head) in outputs.chunks_exact(dim).enumerate() {
                let (row, h) = (i / group, kv_head * group + i % group);
                let out = &mut out[row * out_width + h * dim..][..dim];
                out.copy_from_slice(head);
                if spec.gate == OutputGate::SigmoidPerHead {
                    let gate = &q[row * q_width + h * stride + dim..][..dim];
                    (kernels.sigmoid_gate)(out, gate);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
