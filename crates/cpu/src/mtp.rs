//! The multi-token-prediction head on this device: committed tokens become keys and values of its
//! layer, drafted rows become candidates. [`contract::MtpSpec`] has the formulas.

use contract::{DeviceError, DraftCandidates, LogitsRequest, TokenId};

use crate::blocks::attention::{Angles, KvSpan, PathRow, attend_paths, prepare_queries, store_kv};
use crate::blocks::ffn;
use crate::blocks::head::{self, AskedRow, HeadBuffers};
use crate::draft::{candidates, fill_rope};
use crate::layer_buffers::{ExpertBuffers, LayerBuffers, sized};
use crate::linear::apply_all;
use crate::pass::{ExecContext, ffn_width};
use crate::state::{CpuSequence, KvCache, LayerState};
use crate::weights::{Attention, LayerMixer, ModelWeights, MtpWeights};

/// Buffers of a pass.
#[derive(Default)]
pub(crate) struct MtpBuffers {
    /// `[n, 2 * hidden]`: normalised embeddings and hidden rows.
    joined: Vec<f32>,
    layer: LayerBuffers,
}

/// Committed tokens whose keys and values are to be stored.
pub(crate) struct Committed<'a> {
    pub(crate) cache: &'a mut KvCache,
    /// Position of the first token.
    pub(crate) position: usize,
    pub(crate) tokens: Vec<TokenId>,
    /// The hidden row before each token, `[hidden]`.
    pub(crate) hidden: Vec<&'a [f32]>,
}

/// A drafted row that its sequence's state already counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftedRow {
    /// Index of its sequence in the call.
    pub(crate) sequence: usize,
    /// Index within the sequence's drafted rows.
    pub(crate) row: usize,
    pub(crate) token: TokenId,
}

/// The cache of the head's layer, which follows the trunk's.
pub(crate) fn cache(layers: &mut [LayerState]) -> Option<&mut KvCache> {
    layers.last_mut().and_then(LayerState::attention)
}

/// Floats per row of the buffers.
pub(crate) fn floats_per_row(spec: &contract::ModelSpec) -> usize {
    let Some(mtp) = &spec.mtp else { return 0 };
    let ffn = &mtp.layer.ffn;
    let experts = ffn.experts().map_or(0, ExpertBuffers::floats_per_row);
    let attention = mtp.attention().map_or(0, |a| {
        a.q.rows + a.o.cols + a.k.rows + a.v.rows + a.rope.dims
    });
    5 * spec.hidden + attention + 3 * ffn_width(ffn) + experts
}

fn attention_of(weights: &MtpWeights) -> &Attention {
    match &weights.layer.mixer {
        LayerMixer::Attention(attention) => attention,
        LayerMixer::Delta(_) => {
            unreachable!("the check of the configuration passed attention only")
        }
    }
}

/// Stores keys and values of committed tokens. Nothing else of the layer is computed.
pub(crate) fn fill(
    compute: ExecContext<'_>,
    weights: &ModelWeights,
    items: &mut [Committed<'_>],
    buffers: &mut MtpBuffers,
) -> Result<(), DeviceError> {
    let Some(mtp) = &weights.mtp else {
        return Ok(());
    };
    let attention = attention_of(mtp);
    let tokens: Vec<TokenId> = items
        .iter()
        .flat_map(|i| i.tokens.iter().copied())
        .collect();
    let n = tokens.len();
    if n == 0 {
        return Ok(());
    }
    let hidden: Vec<&[f32]> = items
        .iter()
        .flat_map(|i| i.hidden.iter().copied())
        .collect();
    join(compute, weights, (&tokens, &hidden), buffers)?;
    let positions: Vec<usize> = items
        .iter()
        .flat_map(|item| item.position..item.position + item.tokens.len())
        .collect();
    fill_rope(
        compute,
        attention,
        &positions,
        (&mut buffers.layer.cos, &mut buffers.layer.sin),
    );
    let LayerBuffers {
        y, kv, cos, sin, ..
    } = &mut buffers.layer;
    let width = attention.k.rows();
    let (k, v) = sized(kv, 2 * n * width).split_at_mut(n * width);
    apply_all(
        compute.pool,
        &y[..n * weights.spec.hidden],
        n,
        &mut [(&attention.k, &mut *k), (&attention.v, &mut *v)],
    );
    let half = n * attention.spec.rope.dims / 2;
    let angles = Angles {
        cos: &cos[..half],
        sin: &sin[..half],
    };
    let mut spans: Vec<KvSpan<'_>> = items
        .iter_mut()
        .map(|item| KvSpan {
            cache: &mut *item.cache,
            first_slot: item.position,
            n: item.tokens.len(),
        })
        .collect();
    store_kv(compute, attention, angles, (k, v), &mut spans);
    Ok(())
}

/// Writes the layer's input to `x` and its mixer's input to `y`.
fn join(
    compute: ExecContext<'_>,
    weights: &ModelWeights,
    (tokens, previous): (&[TokenId], &[&[f32]]),
    buffers: &mut MtpBuffers,
) -> Result<(), DeviceError> {
    let Some(mtp) = &weights.mtp else {
        return Ok(());
    };
    let (n, hidden) = (tokens.len(), weights.spec.hidden);
    let MtpBuffers { joined, layer } = buffers;
    let LayerBuffers { x, y, .. } = layer;
    let (joined, x, y) = (
        sized(joined, 2 * n * hidden),
        sized(x, n * hidden),
        sized(y, n * hidden),
    );
    weights.mtp_embed(tokens, y)?;
    let rows = joined.chunks_exact_mut(2 * hidden);
    let rows = rows.zip(y.chunks_exact(hidden)).zip(previous);
    compute
        .pool
        .for_each_item(rows, |((joined, embedding), previous)| {
            let (first, second) = joined.split_at_mut(hidden);
            let norm = compute.kernels.rms;
            norm(embedding, &mtp.embedding_norm, compute.norm_eps, first);
            norm(previous, &mtp.hidden_norm, compute.norm_eps, second);
        });
    mtp.eh_proj.apply(compute.pool, joined, n, x);
    compute.norm(x, &mtp.layer.mixer_norm, y);
    Ok(())
}

/// Computes drafted rows of several sequences in one pass: `k` candidates after each.
pub(crate) fn draft(
    compute: ExecContext<'_>,
    weights: &ModelWeights,
    (sequences, rows): (&mut [&mut CpuSequence], &[DraftedRow]),
    k: usize,
    (buffers, head_buffers): (&mut MtpBuffers, &mut HeadBuffers),
) -> Result<Vec<DraftCandidates>, DeviceError> {
    let Some(mtp) = &weights.mtp else {
        return Ok(Vec::new());
    };
    let attention = attention_of(mtp);
    let (n, hidden) = (rows.len(), weights.spec.hidden);
    if n == 0 {
        return Ok(Vec::new());
    }
    let tokens: Vec<TokenId> = rows.iter().map(|row| row.token).collect();
    let state = |row: &DraftedRow| sequences[row.sequence].mtp.as_ref();
    let previous: Vec<&[f32]> = rows
        .iter()
        .filter_map(|row| Some(state(row)?.input(row.row)))
        .collect();
    let positions: Vec<usize> = rows
        .iter()
        .filter_map(|row| {
            let depth = state(row)?.depths()[row.row];
            Some(sequences[row.sequence].position + depth)
        })
        .collect();
    join(compute, weights, (&tokens, &previous), buffers)?;
    fill_rope(
        compute,
        attention,
        &positions,
        (&mut buffers.layer.cos, &mut buffers.layer.sin),
    );
    let LayerBuffers {
        x,
        y,
        update,
        q,
        heads,
        kv,
        wide,
        experts,
        cos,
        sin,
    } = &mut buffers.layer;
    let half = n * attention.spec.rope.dims / 2;
    let angles = Angles {
        cos: &cos[..half],
        sin: &sin[..half],
    };
    let all = n * hidden;
    let (x, y, update) = (&mut x[..all], &mut y[..all], sized(update, all));
    let (q_width, kv_width) = (attention.q.rows(), attention.k.rows());
    let q = sized(q, n * q_width);
    let (k_rows, v_rows) = sized(kv, 2 * n * kv_width).split_at_mut(n * kv_width);
    apply_all(
        compute.pool,
        y,
        n,
        &mut [
            (&attention.q, &mut *q),
            (&attention.k, &mut *k_rows),
            (&attention.v, &mut *v_rows),
        ],
    );
    let mut rotated = false;
    for (i, row) in rows.iter().enumerate() {
        let sequence = &mut *sequences[row.sequence];
        let first_slot = sequence.position + row.row;
        if let Some(cache) = cache(&mut sequence.layers) {
            rotated = cache.shape.k.is_rotated();
            let at = i * kv_width..(i + 1) * kv_width;
            let half = attention.spec.rope.dims / 2;
            let angles = Angles {
                cos: &cos[i * half..][..half],
                sin: &sin[i * half..][..half],
            };
            let span = KvSpan {
                cache,
                first_slot,
                n: 1,
            };
            let row = (&mut k_rows[at.clone()], &v_rows[at]);
            store_kv(compute, attention, angles, row, &mut [span]);
        }
    }
    prepare_queries(compute, attention, angles, q, rotated);
    let path_row = |row: &DraftedRow| {
        let sequence = &*sequences[row.sequence];
        let LayerState::Attention(cache) = sequence.layers.last()? else {
            return None;
        };
        Some(PathRow {
            cache,
            committed: sequence.position,
            path: sequence.mtp.as_ref()?.path(row.row),
        })
    };
    let paths: Vec<PathRow<'_>> = rows.iter().filter_map(path_row).collect();
    let heads = sized(heads, n * attention.o.cols());
    attend_paths(compute, &attention.spec, &paths, q, heads);
    attention.o.apply(compute.pool, heads, n, update);
    compute.add_norm(x, update, &mtp.layer.ffn_norm, y);
    let width = n * mtp.layer.ffn.dense_width();
    let wide = wide.each_mut().map(|buffer| sized(buffer, width));
    ffn::apply_to(compute, &mtp.layer.ffn, y, (wide, experts), update);
    compute.add_norm(x, update, &mtp.final_norm, y);
    for (row, output) in rows.iter().zip(y.chunks_exact(hidden)) {
        if let Some(state) = &mut sequences[row.sequence].mtp {
            state.output_mut(row.row).copy_from_slice(output);
        }
    }
    let ask = LogitsRequest::top_k(k);
    let asked: Vec<AskedRow<'_>> = (0..n).map(|row| AskedRow { row, ask: &ask }).collect();
    let lm_head = mtp.head.as_ref().unwrap_or(&weights.head);
    let found = head::rows(compute, lm_head, y, &asked, head_buffers);
    Ok(found.chunks(1).map(candidates).collect())
}
