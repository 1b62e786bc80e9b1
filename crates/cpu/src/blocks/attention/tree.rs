//! Attention of several nodes of a tree at once. Blocks of keys that all of them see are read once.
//!
//! Each node gets the bits of [`super::attend_node`]: keys come in path order, in blocks at
//! absolute positions.

use contract::{AttentionSpec, KvFormat, OutputGate};

use super::keys::{HiddenKeys, Keys, decode_of, dot_of, q_stride, rotate_inverse};
use crate::blocks::softmax::{BLOCK, Running};
use crate::kernels::Kernels;
use crate::pass::{ExecContext, TreePlan};
use crate::reference::kv::Codec;
use crate::scratch::take;
use crate::state::KvCache;

/// All heads of consecutive nodes.
pub(super) struct Nodes<'a> {
    pub(super) cache: &'a KvCache,
    /// Committed positions.
    pub(super) committed: usize,
    pub(super) plan: &'a TreePlan,
    pub(super) first_node: usize,
    /// `[n, n_heads, head and gate]`.
    pub(super) q: &'a [f32],
    /// `[n, n_heads, head_dim]`.
    pub(super) out: &'a mut [f32],
}

/// Scratch floats of an item of `n_nodes` nodes.
pub(crate) fn scratch_floats(spec: &AttentionSpec, n_nodes: usize) -> usize {
    let group = spec.n_heads / spec.n_kv_heads;
    let m = n_nodes * group;
    m * (2 * spec.head_dim + BLOCK + 3) + 2 * BLOCK * spec.head_dim
}

/// Writes `nodes.out`, gate included.
pub(super) fn attend_nodes(compute: ExecContext<'_>, spec: &AttentionSpec, nodes: Nodes<'_>) {
    let (dim, stride) = (spec.head_dim, q_stride(spec));
    let n_nodes = nodes.q.len() / (spec.n_heads * stride);
    compute
        .scratch
        .with(scratch_floats(spec, n_nodes), |scratch| {
            for kv_head in 0..spec.n_kv_heads {
                attend_group(compute, spec, (&nodes, kv_head), scratch);
                let group = spec.n_heads / spec.n_kv_heads;
                for (i, head) in scratch[..n_nodes * group * dim]
                    .chunks_exact(dim)
                    .enumerate()
                {
                    let at = (i / group) * spec.n_heads + kv_head * group + i % group;
                    nodes.out[at * dim..][..dim].copy_from_slice(head);
                }
            }
        });
    rotate_inverse(nodes.cache.shape, nodes.out);
    if spec.gate == OutputGate::SigmoidPerHead {
        let heads = nodes.out.chunks_exact_mut(dim);
        for (out, q) in heads.zip(nodes.q.chunks_exact(stride)) {
            (compute.kernels.sigmoid_gate)(out, &q[dim..]);
        }
    }
}

/// Query heads of one key head, `[n, group, head_dim]`, into the beginning of `scratch`.
fn attend_group(
    compute: ExecContext<'_>,
    spec: &AttentionSpec,
    (nodes, kv_head): (&Nodes<'_>, usize),
    mut scratch: &mut [f32],
) {
    let (dim, stride) = (spec.head_dim, q_stride(spec));
    let group = spec.n_heads / spec.n_kv_heads;
    let n_nodes = nodes.q.len() / (spec.n_heads * stride);
    let m = n_nodes * group;
    let kernels = compute.kernels;
    let shape = nodes.cache.shape;
    let decode = decode_of(kernels, shape.v);
    let out = take(&mut scratch, m * dim);
    let queries = take(&mut scratch, m * dim);
    let scores = take(&mut scratch, m * BLOCK);
    let dots = take(&mut scratch, m);
    let mut running = Running::new(take(&mut scratch, 2 * m), out);
    let values = take(&mut scratch, BLOCK * dim);
    let last = take(&mut scratch, BLOCK * dim);
    for (i, query) in queries.chunks_exact_mut(dim).enumerate() {
        let at = (i / group) * spec.n_heads + kv_head * group + i % group;
        query.copy_from_slice(&nodes.q[at * stride..][..dim]);
    }
    let keys = |node: usize| Keys {
        cache: nodes.cache,
        kv_head,
        committed: nodes.committed,
        path: nodes.plan.path(nodes.first_node + node),
        window: nodes.plan.tree.window(),
        layer_window: spec.window,
    };
    let committed = keys(0);
    let hidden: Vec<HiddenKeys> = (0..n_nodes).map(|node| keys(node).hidden()).collect();
    // Keys that the root does not see are invisible to every node.
    let always_hidden = HiddenKeys::of(nodes.committed, nodes.plan.tree.window(), spec.window);
    let hide = |scores: &mut [f32], at: usize, i: usize| {
        for (node, hidden) in hidden.iter().enumerate() {
            if hidden.contains(at) {
                let heads = scores.chunks_exact_mut(BLOCK).skip(node * group);
                heads
                    .take(group)
                    .for_each(|scores| scores[i] = f32::NEG_INFINITY);
            }
        }
    };
    let shared = nodes.committed / BLOCK * BLOCK;
    for begin in (0..shared).step_by(BLOCK) {
        if always_hidden.covers(begin..begin + BLOCK) {
            continue;
        }
        for (i, value) in values.chunks_exact_mut(dim).enumerate() {
            dots_of(kernels, shape.k, queries, committed.key(begin + i), dots);
            for (head, dot) in dots.iter().enumerate() {
                scores[head * BLOCK + i] = dot * spec.scale;
            }
            hide(scores, begin + i, i);
            decode(committed.value(begin + i), value);
        }
        running.absorb(kernels, scores, values, BLOCK);
    }
    // The block with the last committed keys and the first nodes: its committed keys are read once
    // for all nodes.
    let tail = nodes.committed - shared;
    for (i, value) in last.chunks_exact_mut(dim).take(tail).enumerate() {
        dots_of(kernels, shape.k, queries, committed.key(shared + i), dots);
        for (head, dot) in dots.iter().enumerate() {
            scores[head * BLOCK + i] = dot * spec.scale;
        }
        hide(scores, shared + i, i);
        decode(committed.value(shared + i), value);
    }
    let mut own = vec![0.0; group];
    let mut weights = vec![0.0; group * BLOCK];
    for (node, hidden) in hidden.iter().enumerate() {
        let keys = keys(node);
        let heads = node * group..(node + 1) * group;
        let queries = &queries[heads.start * dim..heads.end * dim];
        let scores = &scores[heads.start * BLOCK..heads.end * BLOCK];
        let mut running = running.part(heads);
        let mut begin = shared;
        while begin < keys.n() {
            let n = BLOCK.min(keys.n() - begin);
            let known = if begin == shared { tail } else { 0 };
            let values = match known {
                0 => &mut values[..n * dim],
                _ => &mut last[..n * dim],
            };
            let weights = &mut weights[..group * n];
            for (weights, scores) in weights.chunks_exact_mut(n).zip(scores.chunks_exact(BLOCK)) {
                weights[..known].copy_from_slice(&scores[..known]);
            }
            for i in known..n {
                let slot = keys.slot(begin + i);
                dots_of(kernels, shape.k, queries, keys.key(slot), &mut own);
                for (weights, dot) in weights.chunks_exact_mut(n).zip(&own) {
                    weights[i] = if hidden.contains(begin + i) {
                        f32::NEG_INFINITY
                    } else {
                        dot * spec.scale
                    };
                }
                decode(keys.value(slot), &mut values[i * dim..][..dim]);
            }
            running.absorb(kernels, weights, values, n);
            begin += n;
        }
    }
    running.finish();
}

/// The products of queries `[m, dim]` with one key, `[m]`.
fn dots_of(kernels: &Kernels, codec: Codec, queries: &[f32], key: &[u8], dots: &mut [f32]) {
    if codec.format() == KvFormat::F16 {
        return (kernels.dots_f16)(queries, key, dots);
    }
    let dot = dot_of(kernels, codec);
    let dim = queries.len() / dots.len();
    for (query, to) in queries.chunks_exact(dim).zip(dots) {
        *to = dot(query, key);
    }
}
