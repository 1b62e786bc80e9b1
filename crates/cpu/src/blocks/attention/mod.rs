//! The attention mixer: projections, q/k norm, rotation, the cache, softmax attention, gate, output
//! projection.

use std::ops::Range;

use contract::quant::hadamard;
use contract::{AttentionSpec, AttentionWindow, KvFormat, NodeIdx, OutputGate};

use crate::blocks::softmax::{BLOCK, Running};
use crate::kernels::Kernels;
use crate::kv_shape::KvShape;
use crate::linear::apply_all;
use crate::pass::{ExecContext, LayerSegment, PassBuffers, RopeTable, SegmentKind, angles_of};
use crate::reference::kv::{self, Codec};
use crate::reference::rope;
use crate::scratch::take;
use crate::state::KvCache;
use crate::weights::Attention;

use super::delta_chunked::transpose;
use super::tree_attention::{self, Nodes, attend_nodes};

/// Query rows that share one reading of the cached keys in prefill.
const TILE: usize = 32;

/// Reads `arena.y`, writes `arena.update`, and stores each row's key and value after the committed
/// ones.
pub(crate) fn mix(
    compute: ExecContext<'_>,
    weights: &Attention,
    arena: &mut PassBuffers,
    shares: &mut [LayerSegment<'_, KvCache>],
) {
    let spec = &weights.spec;
    let n_rows: usize = shares.iter().map(|s| s.n_rows).sum();
    let (q_width, kv_width) = (weights.q.rows(), weights.k.rows());
    let (parts, angles) = arena.split();
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
    let rows = Projected {
        angles: angles_of(angles, spec.rope),
        q: &mut *q,
        k,
        v,
    };
    store(compute, weights, shares, rows);
    let heads = &mut parts.heads[..n_rows * spec.n_heads * spec.head_dim];
    attend(compute, &weights.spec, shares, q, heads);
    let update = &mut parts.update[..n_rows * weights.o.rows()];
    weights.o.apply(compute.pool, heads, n_rows, update);
}

/// A few rows on their way into the cache.
struct StoreItem<'a> {
    first_row: usize,
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a [f32],
    keys: &'a mut [u8],
    values: &'a mut [u8],
    shape: KvShape,
}

/// The projections of all rows of a pass, and what is to be done to them.
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
    shares: &mut [LayerSegment<'_, KvCache>],
    rows: Projected<'_>,
) {
    let Projected {
        angles,
        mut q,
        mut k,
        mut v,
    } = rows;
    let spec = &weights.spec;
    let grain = compute.grain(v.len() / weights.k.rows());
    let mut items = Vec::new();
    for share in shares {
        let (n, position, cache) = (share.n_rows, share.position, &mut *share.state);
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
                first_row: share.first_row + i * grain,
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
                rope::rotate(head, &angles.cos[at..][..half], &angles.sin[at..][..half]);
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

/// Output heads that one parallel item computes.
enum AttentionItem<'a> {
    Node(Node<'a>),
    Nodes(Nodes<'a>),
    Tile(Tile<'a>),
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
struct Tile<'a> {
    cache: &'a KvCache,
    first_position: usize,
    q: &'a [f32],
    out: &'a mut [f32],
}

/// `out[n, n_heads, head_dim]` from the prepared queries and the caches, gate included.
fn attend(
    compute: ExecContext<'_>,
    spec: &AttentionSpec,
    shares: &[LayerSegment<'_, KvCache>],
    q: &[f32],
    mut out: &mut [f32],
) {
    let q_width = spec.n_heads * q_stride(spec);
    let out_width = spec.n_heads * spec.head_dim;
    let mut items = Vec::new();
    for share in shares {
        let cache = &*share.state;
        let q = &q[share.first_row * q_width..][..share.n_rows * q_width];
        let out = take(&mut out, share.n_rows * out_width);
        match share.work {
            SegmentKind::Tree(plan) if share.n_rows < compute.pool.threads() => {
                let group = spec.n_heads / spec.n_kv_heads;
                // Heads of a group share the reading of keys, unless that leaves threads without
                // work.
                let heads = if share.n_rows * spec.n_kv_heads < compute.pool.threads() {
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
                        committed: share.position,
                        path: plan.path(node),
                        window: plan.tree.window(),
                    };
                    items.push(AttentionItem::Node(Node { keys, q, out }));
                }
            }
            SegmentKind::Tree(plan) => {
                let grain = share.n_rows.div_ceil(compute.pool.threads()).min(TILE);
                let out = out.chunks_mut(grain * out_width);
                for (i, (q, out)) in q.chunks(grain * q_width).zip(out).enumerate() {
                    items.push(AttentionItem::Nodes(Nodes {
                        cache,
                        committed: share.position,
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
                    items.push(AttentionItem::Tile(Tile {
                        cache,
                        first_position: share.position + i * TILE,
                        q,
                        out,
                    }));
                }
            }
        }
    }
    // The longest come last; begun first, they do not leave one thread working alone.
    let items = items.into_iter().rev();
    compute.pool.for_each_item(items, |item| match item {
        AttentionItem::Node(node) => attend_node(compute, spec, node),
        AttentionItem::Nodes(nodes) => attend_nodes(compute, spec, nodes),
        AttentionItem::Tile(tile) => attend_tile(compute, spec, tile),
    });
}

/// The stored rows of one key head.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) cache: &'a KvCache,
    pub(super) kv_head: usize,
    /// Committed positions, which are stored in order.
    pub(super) committed: usize,
    /// Nodes after them, each stored as many slots after the committed ones as its index says.
    pub(super) path: &'a [NodeIdx],
    /// What of the committed ones the last node of the path sees.
    pub(super) window: AttentionWindow,
}

impl<'a> Keys<'a> {
    /// How many keys there are.
    pub(super) fn n(&self) -> usize {
        self.committed + self.path.len()
    }

    /// Positions whose keys the last of them does not see, all of them committed.
    pub(super) fn hidden(&self) -> Range<usize> {
        self.window.masked(self.n().saturating_sub(1))
    }

    /// Where the key of position `at` is stored.
    pub(super) fn slot(&self, at: usize) -> usize {
        match at.checked_sub(self.committed) {
            None => at,
            Some(depth) => self.committed + self.path[depth].index(),
        }
    }

    pub(super) fn key(&self, slot: usize) -> &'a [u8] {
        let KvShape {
            k,
            n_kv_heads,
            head_dim,
            ..
        } = self.cache.shape;
        let bytes = k.row_bytes(head_dim);
        &self.cache.keys[(slot * n_kv_heads + self.kv_head) * bytes..][..bytes]
    }

    pub(super) fn value(&self, slot: usize) -> &'a [u8] {
        let KvShape {
            v,
            n_kv_heads,
            head_dim,
            ..
        } = self.cache.shape;
        let bytes = v.row_bytes(head_dim);
        &self.cache.values[(slot * n_kv_heads + self.kv_head) * bytes..][..bytes]
    }
}

/// Width of a query head in the projection, gate included.
pub(super) fn q_stride(spec: &AttentionSpec) -> usize {
    match spec.gate {
        OutputGate::None => spec.head_dim,
        OutputGate::SigmoidPerHead => 2 * spec.head_dim,
    }
}

/// Query heads that share a key head, at one node.
///
/// Keys are taken in path order in blocks at absolute positions, so a node's result is that of the
/// same path fed one by one.
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
            if hidden.start <= begin && begin + n <= hidden.end {
                continue;
            }
            let scores = &mut scores[..heads * n];
            let values = &mut values[..n * dim];
            for (i, value) in values.chunks_exact_mut(dim).enumerate() {
                if hidden.contains(&(begin + i)) {
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

/// Floats that one tile of rows is worked in.
pub(crate) fn scratch_floats(spec: &AttentionSpec) -> usize {
    let m = TILE * spec.n_heads / spec.n_kv_heads;
    let tile = m * (2 * spec.head_dim + BLOCK + 2) + 2 * BLOCK * spec.head_dim;
    tile.max(tree_attention::scratch_floats(spec, TILE))
}

/// All heads of up to [`TILE`] consecutive rows, the first at `first_position`.
///
/// Keys are read in blocks at absolute positions and always as whole blocks, so a row's result does
/// not depend on which rows share its tile or on how far the cache is filled.
fn attend_tile(compute: ExecContext<'_>, spec: &AttentionSpec, tile: Tile<'_>) {
    let Tile {
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
            };
            for (i, query) in queries.chunks_exact_mut(dim).enumerate() {
                let at = (i / group) * q_width + (kv_head * group + i % group) * stride;
                query.copy_from_slice(&q[at..][..dim]);
            }
            let mut running = Running::new(sums, outputs);
            for begin in (0..keys.n()).step_by(BLOCK) {
                let n = BLOCK.min(keys.n() - begin);
                for (i, row) in block.chunks_exact_mut(dim).take(n).enumerate() {
                    decode_key(keys.key(begin + i), row);
                }
                block[n * dim..].fill(0.0);
                transpose(block, dim, rotated);
                scores.fill(0.0);
                (kernels.accumulate)(queries, rotated, BLOCK, scores);
                for (i, scores) in scores.chunks_exact_mut(BLOCK).enumerate() {
                    let visible = (first_position + i / group + 1).saturating_sub(begin);
                    let visible = visible.min(BLOCK);
                    for score in &mut scores[..visible] {
                        *score *= spec.scale;
                    }
                    scores[visible..].fill(f32::NEG_INFINITY);
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

/// Turns back what was summed of values that are stored rotated, `[n, head_dim]`.
pub(super) fn rotate_inverse(shape: KvShape, heads: &mut [f32]) {
    if shape.v.is_rotated() {
        let heads = heads.chunks_exact_mut(shape.head_dim);
        heads.for_each(hadamard::rotate_inverse);
    }
}

/// Reads a stored row, rotated if it is stored so.
pub(super) fn decode_of(kernels: &Kernels, codec: Codec) -> fn(&[u8], &mut [f32]) {
    match codec.format() {
        KvFormat::F32 => kv::decode_f32,
        KvFormat::F16 => kernels.decode_f16,
        KvFormat::Q8_0 => kernels.decode_q8_0,
        KvFormat::Q4_0 => kernels.decode_q4_0,
        KvFormat::Bf16 => |bytes, row| kv::decode(KvFormat::Bf16, bytes, row),
        KvFormat::Q5_1 => |bytes, row| kv::decode(KvFormat::Q5_1, bytes, row),
        KvFormat::Q5_0 => |bytes, row| kv::decode(KvFormat::Q5_0, bytes, row),
        KvFormat::Q4_1 => |bytes, row| kv::decode(KvFormat::Q4_1, bytes, row),
        KvFormat::Tq3_0 => |bytes, row| kv::decode(KvFormat::Tq3_0, bytes, row),
    }
}

/// The product of a query and a stored key.
pub(super) fn dot_of(kernels: &Kernels, codec: Codec) -> fn(&[f32], &[u8]) -> f32 {
    match codec.format() {
        KvFormat::F32 => kv::dot_f32,
        KvFormat::F16 => kernels.dot_f16,
        KvFormat::Q8_0 => kernels.dot_q8_0,
        KvFormat::Q4_0 => kernels.dot_q4_0,
        KvFormat::Bf16 => |query, key| kv::dot(KvFormat::Bf16, query, key),
        KvFormat::Q5_1 => |query, key| kv::dot(KvFormat::Q5_1, query, key),
        KvFormat::Q5_0 => |query, key| kv::dot(KvFormat::Q5_0, query, key),
        KvFormat::Q4_1 => |query, key| kv::dot(KvFormat::Q4_1, query, key),
        KvFormat::Tq3_0 => |query, key| kv::dot(KvFormat::Tq3_0, query, key),
    }
}

#[cfg(test)]
mod tests;
