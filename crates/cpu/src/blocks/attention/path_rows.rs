//! Attention of rows that each follow a path of uncommitted rows, with prepared projections.
//!
//! Row `i` of a sequence is stored in slot `committed + i`. A row gets the bits of
//! [`super::attend_node`], so it does not depend on the other rows of the call.

use contract::quant::hadamard;
use contract::{AttentionSpec, AttentionWindow, NodeIdx};

use super::keys::{Keys, q_stride};
use super::{Node, attend_node, encode_rows};
use crate::pass::ExecContext;
use crate::reference::rope;
use crate::state::KvCache;
use crate::weights::Attention;

/// One row to attend: it sees the committed positions and its path, itself included.
pub(crate) struct PathRow<'a> {
    pub(crate) cache: &'a KvCache,
    pub(crate) committed: usize,
    pub(crate) path: &'a [NodeIdx],
}

/// Adjacent slots of one cache that adjacent rows of a pass are stored in.
pub(crate) struct KvSpan<'a> {
    pub(crate) cache: &'a mut KvCache,
    pub(crate) first_slot: usize,
    pub(crate) n: usize,
}

/// Cosines and sines of the rows of a pass, `[n, rope dims / 2]` each.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
}

/// Normalises and rotates keys `[n, n_kv_heads, head_dim]` in place, and encodes keys and values
/// into their slots. `spans` cover the rows in order.
pub(crate) fn store_kv(
    compute: ExecContext<'_>,
    weights: &Attention,
    angles: Angles<'_>,
    (k, v): (&mut [f32], &[f32]),
    spans: &mut [KvSpan<'_>],
) {
    let spec = &weights.spec;
    let dim = spec.head_dim;
    prepare(
        compute,
        weights,
        (weights.k_norm.as_deref(), dim),
        k,
        angles,
    );
    let width = weights.k.rows();
    let mut rows = k.chunks_exact(width).zip(v.chunks_exact(width));
    let mut items = Vec::with_capacity(rows.len());
    for span in spans {
        let shape = span.cache.shape;
        let slots = |bytes: usize| span.first_slot * bytes..(span.first_slot + span.n) * bytes;
        let keys = &mut span.cache.keys[slots(shape.k_bytes())];
        let values = &mut span.cache.values[slots(shape.v_bytes())];
        let slots = keys.chunks_exact_mut(shape.k_bytes());
        let slots = slots.zip(values.chunks_exact_mut(shape.v_bytes()));
        for ((keys, values), (k, v)) in slots.zip(rows.by_ref()) {
            items.push((shape, keys, values, k, v));
        }
    }
    let items = items.into_iter();
    compute
        .pool
        .for_each_item(items, |(shape, keys, values, k, v)| {
            encode_rows(shape.k, dim, k, keys);
            encode_rows(shape.v, dim, v, values);
        });
}

/// Normalises and rotates queries `[n, n_heads, head and gate]` in place. `hadamard_keys` says
/// whether keys are stored rotated.
pub(crate) fn prepare_queries(
    compute: ExecContext<'_>,
    weights: &Attention,
    angles: Angles<'_>,
    q: &mut [f32],
    hadamard_keys: bool,
) {
    let stride = q_stride(&weights.spec);
    let norm = weights.q_norm.as_deref();
    prepare(compute, weights, (norm, stride), q, angles);
    if hadamard_keys {
        let dim = weights.spec.head_dim;
        let heads = q.chunks_exact_mut(stride);
        heads.for_each(|head| hadamard::rotate(&mut head[..dim]));
    }
}

fn prepare(
    compute: ExecContext<'_>,
    weights: &Attention,
    (norm, stride): (Option<&[f32]>, usize),
    rows: &mut [f32],
    angles: Angles<'_>,
) {
    let (dim, half) = (weights.spec.head_dim, weights.spec.rope.dims / 2);
    let rotate = rope::rotation(weights.spec.rope.pairs);
    let n = angles.cos.len() / half;
    let width = rows.len() / n;
    let items = rows.chunks_exact_mut(width).enumerate();
    compute.pool.for_each_item(items, |(row, heads)| {
        let (cos, sin) = (
            &angles.cos[row * half..][..half],
            &angles.sin[row * half..][..half],
        );
        for head in heads.chunks_exact_mut(stride) {
            let head = &mut head[..dim];
            if let Some(norm) = norm {
                (compute.kernels.rms_in_place)(head, norm, compute.norm_eps);
            }
            rotate(head, cos, sin);
        }
    });
}

/// Writes `out` `[n, n_heads, head_dim]` from prepared queries, gate included.
pub(crate) fn attend_paths(
    compute: ExecContext<'_>,
    spec: &AttentionSpec,
    rows: &[PathRow<'_>],
    q: &[f32],
    out: &mut [f32],
) {
    let group = spec.n_heads / spec.n_kv_heads;
    // Heads of a group share each read of the keys, unless that leaves threads without work.
    let heads = if rows.len() * spec.n_kv_heads < compute.pool.threads() {
        1
    } else {
        group
    };
    let q = q.chunks_exact(heads * q_stride(spec));
    let out = out.chunks_exact_mut(heads * spec.head_dim);
    let mut items = Vec::with_capacity(q.len());
    for (i, (q, out)) in q.zip(out).enumerate() {
        let (row, head) = (&rows[i * heads / spec.n_heads], i * heads % spec.n_heads);
        let keys = Keys {
            cache: row.cache,
            kv_head: head / group,
            committed: row.committed,
            path: row.path,
            window: AttentionWindow::FULL,
            layer_window: spec.window,
        };
        items.push(Node { keys, q, out });
    }
    let items = items.into_iter();
    compute
        .pool
        .for_each_item(items, |node| attend_node(compute, spec, node));
}
