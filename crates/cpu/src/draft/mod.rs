//! The draft model on this device: features of committed tokens become keys and values, blocks of
//! masks become candidates. [`contract::draft`] has the formulas.

mod conditional;
pub(crate) mod conv;
pub(crate) mod weights;

use contract::{
    Conditioning, DeviceError, DraftCandidates, DraftLoadConfig, DraftLogits, DraftSpec,
    DraftValues, LoadProgress, LogitsRequest, LogitsRow, TokenId,
};

use crate::blocks::dense;
use crate::blocks::draft::{DraftAttention, DraftBlock, attend};
use crate::blocks::head::{self, AskedRow, HeadBuffers};
use crate::draft_cache::DraftCache;
use crate::layer_buffers::{LayerBuffers, sized};
use crate::linear::{Linear, apply_all};
use crate::pass::ExecContext;
use crate::reference::draft::DraftMask;
use crate::reference::{kv, rope};
use crate::simd::dispatch::Dispatch;
use crate::thread_pool::ThreadPool;
use crate::weights::{Attention, ModelWeights, table_rows};
use conditional::{ScoreBuffers, Scorer};
use conv::{ConvBuffers, ConvWeights, Side};
use weights::{DraftWeights, LazyWeights};

pub(crate) use conditional::MAX_STATES;

/// A loaded draft. [`DraftCache`] holds its state per sequence.
pub(crate) struct Draft {
    weights: LazyWeights,
    buffers: Buffers,
    scores: ScoreBuffers,
}

/// Buffers of a pass.
#[derive(Default)]
struct Buffers {
    layer: LayerBuffers,
    conv: ConvBuffers,
}

/// One sequence of a draft call.
pub(crate) struct DraftRoot<'a> {
    pub(crate) cache: &'a mut DraftCache,
    /// Committed tokens.
    pub(crate) position: usize,
    pub(crate) token: TokenId,
}

/// Depth and width of a draft.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    pub(crate) depth: usize,
    pub(crate) k: usize,
}

/// Captures the hidden states of a target pass.
pub(crate) struct HiddenStateCapture<'a> {
    layers: &'a [usize],
    hidden: usize,
    /// `[n, capture_layers, hidden]`.
    features: &'a mut [f32],
}

impl<'a> HiddenStateCapture<'a> {
    /// Captures into `features`, which is large enough for every pass. Captures nothing without a
    /// draft.
    pub(crate) fn new(draft: Option<&'a Draft>, features: &'a mut [f32]) -> HiddenStateCapture<'a> {
        let spec = draft.map(Draft::spec);
        HiddenStateCapture {
            layers: spec.map_or(&[], |spec| &spec.capture_layers),
            hidden: spec.map_or(0, |spec| spec.hidden),
            features,
        }
    }

    /// Stores the residual stream `[n, hidden]` after a layer, if the draft reads that layer.
    pub(crate) fn take(&mut self, layer: usize, x: &[f32]) {
        let Some(tap) = self.layers.iter().position(|tap| *tap == layer) else {
            return;
        };
        let rows = self
            .features
            .chunks_exact_mut(self.layers.len() * self.hidden);
        for (row, x) in rows.zip(x.chunks_exact(self.hidden)) {
            row[tap * self.hidden..][..self.hidden].copy_from_slice(x);
        }
    }

    /// The features of a range of the pass's rows.
    pub(crate) fn rows(&self, rows: std::ops::Range<usize>) -> &[f32] {
        let width = self.layers.len() * self.hidden;
        &self.features[rows.start * width..rows.end * width]
    }
}

impl Draft {
    pub(crate) fn new(
        config: DraftLoadConfig,
        dispatch: Dispatch,
        pool: &ThreadPool,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Draft, DeviceError> {
        Ok(Draft {
            weights: LazyWeights::new(config, dispatch, pool, progress)?,
            buffers: Buffers::default(),
            scores: ScoreBuffers::default(),
        })
    }

    pub(crate) fn spec(&self) -> &DraftSpec {
        self.weights.spec()
    }

    /// Loads the weights, if loading was deferred to the first use.
    pub(crate) fn ready(&mut self, pool: &ThreadPool) -> Result<(), DeviceError> {
        self.weights.get(pool).map(|_| ())
    }

    /// Projects the pending features in `cache`. Its sequence has `position` committed tokens.
    pub(crate) fn project(
        &mut self,
        compute: ExecContext<'_>,
        cache: &mut DraftCache,
        position: usize,
    ) -> Result<(), DeviceError> {
        let n = cache.n_pending_features();
        if n == 0 {
            return Ok(());
        }
        let compute = ExecContext {
            norm_eps: self.weights.spec().norm_eps,
            ..compute
        };
        self.weights.get(compute.pool)?;
        if let Some(weights) = self.weights.loaded() {
            let parts = (self.weights.spec(), weights);
            project(compute, parts, &mut self.buffers.layer, cache, position - n);
        }
        cache.pending_features.clear();
        Ok(())
    }

    /// Candidates behind each root.
    pub(crate) fn draft(
        &mut self,
        compute: ExecContext<'_>,
        target: &ModelWeights,
        roots: &mut [DraftRoot<'_>],
        reach: Reach,
        head_buffers: &mut HeadBuffers,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let rows = self.spec().pass_rows(reach.depth);
        self.run(compute, target, roots, rows)?;
        if self.spec().conditioning != Conditioning::Independent {
            return self.score(compute, target, roots, (reach, None));
        }
        let first_row = self.spec().first_row;
        let ask = LogitsRequest::top_k(reach.k);
        let firsts = (0..roots.len()).map(|i| i * rows + first_row);
        let asked: Vec<AskedRow<'_>> = firsts
            .flat_map(|first| first..first + reach.depth)
            .map(|row| AskedRow { row, ask: &ask })
            .collect();
        let found = head::rows(
            compute,
            &target.head,
            &self.buffers.layer.y,
            &asked,
            head_buffers,
        );
        Ok(found.chunks(reach.depth).map(candidates).collect())
    }

    /// The logits of one sequence's drafting rows, and its likeliest chain.
    pub(crate) fn logits(
        &mut self,
        compute: ExecContext<'_>,
        target: &ModelWeights,
        root: DraftRoot<'_>,
    ) -> Result<DraftLogits, DeviceError> {
        let (depth, vocab) = (self.spec().depth(), target.head.rows());
        let roots = &mut [root];
        self.run(compute, target, roots, self.spec().block)?;
        let reach = Reach { depth, k: 1 };
        let mut kept = Vec::new();
        let found = self.score(compute, target, roots, (reach, Some(&mut kept)))?;
        let ids = self.spec().head.as_ref().and_then(|head| head.ids.as_ref());
        let logits = match ids {
            None => kept,
            Some(ids) => {
                let mut logits = vec![f32::NEG_INFINITY; depth * vocab];
                let rows = logits.chunks_exact_mut(vocab);
                for (row, kept) in rows.zip(kept.chunks_exact(ids.len())) {
                    for (id, logit) in ids.iter().zip(kept) {
                        row[id.index()] = *logit;
                    }
                }
                logits
            }
        };
        let chain = found.first().map_or(Vec::new(), DraftCandidates::chain);
        Ok(DraftLogits { logits, chain })
    }

    /// Runs blocks of `rows` rows: each root, and masks behind it.
    fn run(
        &mut self,
        compute: ExecContext<'_>,
        target: &ModelWeights,
        roots: &mut [DraftRoot<'_>],
        rows: usize,
    ) -> Result<(), DeviceError> {
        for root in &mut *roots {
            self.project(compute, root.cache, root.position)?;
        }
        let mask = self.spec().mask_token;
        let tokens: Vec<TokenId> = roots
            .iter()
            .flat_map(|root| (0..rows).map(move |row| if row == 0 { root.token } else { mask }))
            .collect();
        let hidden = self.spec().hidden;
        let x = sized(&mut self.buffers.layer.x, tokens.len() * hidden);
        match &self.weights.spec().embedding {
            Some(own) => table_rows(self.weights.source(), own, &tokens, x)?,
            None => target.embed(&tokens, x)?,
        }
        self.pass(compute, roots, rows)
    }

    /// Candidates that depend on the token before, from the last pass.
    fn score(
        &mut self,
        compute: ExecContext<'_>,
        target: &ModelWeights,
        roots: &[DraftRoot<'_>],
        (reach, kept): (Reach, Option<&mut Vec<f32>>),
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let Some(weights) = self.weights.loaded() else {
            return Ok(Vec::new());
        };
        let scorer = Scorer {
            spec: self.weights.spec(),
            weights,
            source: self.weights.source(),
            lm_head: weights.head.as_ref().unwrap_or(&target.head),
        };
        let tokens: Vec<TokenId> = roots.iter().map(|root| root.token).collect();
        let rows = (&self.buffers.layer.y[..], &tokens[..]);
        scorer.candidates(compute, rows, reach, &mut self.scores, kept)
    }

    /// Runs blocks of `block` rows with embeddings in `x` and writes the stream after the final
    /// norm to `y`.
    fn pass(
        &mut self,
        compute: ExecContext<'_>,
        roots: &[DraftRoot<'_>],
        block: usize,
    ) -> Result<(), DeviceError> {
        let spec = self.weights.spec().clone();
        let weights = self.weights.get(compute.pool)?;
        let compute = ExecContext {
            norm_eps: spec.norm_eps,
            ..compute
        };
        let n = roots.len() * block;
        let Buffers { layer, conv } = &mut self.buffers;
        let LayerBuffers {
            x,
            y,
            update,
            q,
            heads,
            kv,
            wide,
            cos,
            sin,
            ..
        } = layer;
        let all = n * spec.hidden;
        let (x, y, update) = (&mut x[..all], sized(y, all), sized(update, all));
        let positions: Vec<usize> = roots
            .iter()
            .flat_map(|root| root.position..root.position + block)
            .collect();
        if let Some(first) = weights.layers.first() {
            compute.norm(x, &first.attention_norm, y);
        }
        for (i, (layer, of)) in weights.layers.iter().zip(&spec.layers).enumerate() {
            let attention = &layer.attention;
            let before = i
                .checked_sub(1)
                .map(|before| &weights.layers[before].attention);
            if !before.is_some_and(|before| same_rope(before, attention)) {
                fill_rope(compute, attention, &positions, (&mut *cos, &mut *sin));
            }
            let size = n * attention.spec.rope.dims / 2;
            let angles = (&cos[..size], &sin[..size]);
            let (q_width, kv_width) = (attention.q.rows(), attention.k.rows());
            let q = sized(q, n * q_width);
            let (k, v) = sized(kv, 2 * n * kv_width).split_at_mut(n * kv_width);
            let input = convolved(compute, &layer.attention_conv, (y, block), conv);
            match of.values {
                DraftValues::Projection => apply_all(
                    compute.pool,
                    input,
                    n,
                    &mut [
                        (&attention.q, &mut *q),
                        (&attention.k, &mut *k),
                        (&attention.v, &mut *v),
                    ],
                ),
                DraftValues::Keys => {
                    let parts = &mut [(&attention.q, &mut *q), (&attention.k, &mut *k)];
                    apply_all(compute.pool, input, n, parts);
                    values_of_keys(compute, attention, k, v);
                }
            }
            prepare(compute, attention, attention.q_norm.as_deref(), q, angles);
            prepare(compute, attention, attention.k_norm.as_deref(), k, angles);
            let mask = DraftMask {
                window: of.window,
                causal: of.block_mask == contract::BlockMask::Causal,
            };
            let heads = sized(heads, n * q_width);
            let rows = block * kv_width;
            let mut blocks: Vec<DraftBlock<'_>> = Vec::with_capacity(roots.len());
            for (at, root) in roots.iter().enumerate() {
                blocks.push(DraftBlock {
                    ring: &root.cache.rings[i],
                    committed: root.position,
                    q: &q[at * block * q_width..][..block * q_width],
                    k: &k[at * rows..][..rows],
                    v: &v[at * rows..][..rows],
                });
            }
            let how = DraftAttention {
                spec: &attention.spec,
                mask,
                sinks: layer.sinks.as_deref(),
            };
            attend(compute, how, &blocks, heads);
            attention.o.apply(compute.pool, heads, n, update);
            let norm = layer.post_attention_norm.as_deref();
            finish_sublayer(
                compute,
                (&layer.attention_conv, norm),
                (update, block),
                conv,
            );
            compute.add_norm(x, update, &layer.ffn_norm, y);
            let width = n * layer.ffn.gate.rows();
            let wide = wide.each_mut().map(|buffer| sized(buffer, width));
            let input = convolved(compute, &layer.ffn_conv, (y, block), conv);
            dense::apply(compute, &layer.ffn, input, wide, update);
            let norm = layer.post_ffn_norm.as_deref();
            finish_sublayer(compute, (&layer.ffn_conv, norm), (update, block), conv);
            let next = weights.layers.get(i + 1);
            let norm = next.map_or(&weights.final_norm, |next| &next.attention_norm);
            compute.add_norm(x, update, norm, y);
        }
        Ok(())
    }
}

/// The input of a sublayer: `y`, convolved in layers with a convolution.
fn convolved<'a>(
    compute: ExecContext<'_>,
    conv: &Option<ConvWeights>,
    (y, block): (&'a [f32], usize),
    buffers: &'a mut ConvBuffers,
) -> &'a [f32] {
    let Some(conv) = conv else { return y };
    conv.project(compute, y, buffers);
    conv.apply(compute, (y, block), Side::Input, buffers);
    &buffers.rows[..y.len()]
}

/// Convolves and normalises the output of a sublayer in place, in layers that do.
fn finish_sublayer(
    compute: ExecContext<'_>,
    (conv, norm): (&Option<ConvWeights>, Option<&[f32]>),
    (update, block): (&mut [f32], usize),
    buffers: &mut ConvBuffers,
) {
    if let Some(conv) = conv {
        conv.apply(compute, (update, block), Side::Output, buffers);
        update.copy_from_slice(&buffers.rows[..update.len()]);
    }
    if let Some(norm) = norm {
        let rows = update.chunks_exact_mut(norm.len());
        compute.pool.for_each_item(rows, |row| {
            (compute.kernels.rms_in_place)(row, norm, compute.norm_eps);
        });
    }
}

/// Values from projected keys `[n, n_kv_heads, head_dim]`: each head through a norm that has no
/// weights.
fn values_of_keys(
    compute: ExecContext<'_>,
    attention: &Attention,
    keys: &[f32],
    values: &mut [f32],
) {
    let ones = vec![1.0; attention.spec.head_dim];
    values.copy_from_slice(keys);
    for head in values.chunks_exact_mut(ones.len()) {
        (compute.kernels.rms_in_place)(head, &ones, compute.norm_eps);
    }
}

/// Computes stored keys and values from the features of the tokens from `first`.
fn project(
    compute: ExecContext<'_>,
    (spec, weights): (&DraftSpec, &DraftWeights),
    buffers: &mut LayerBuffers,
    cache: &mut DraftCache,
    first: usize,
) {
    let n = cache.n_pending_features();
    let hidden = weights.fc.rows();
    let (raw, f) = (
        sized(&mut buffers.update, n * hidden),
        sized(&mut buffers.y, n * hidden),
    );
    weights
        .fc
        .apply(compute.pool, &cache.pending_features, n, raw);
    compute.norm(raw, &weights.hidden_norm, f);
    let parts = |layer: &'_ weights::DraftLayerWeights| {
        let a = &layer.attention;
        [a.k.rows(), a.v.rows()]
    };
    let width: usize = weights.layers.iter().flat_map(parts).sum();
    let mut rest = sized(&mut buffers.kv, n * width);
    let mut outputs: Vec<(&Linear, &mut [f32])> = Vec::new();
    for layer in &weights.layers {
        for linear in [&layer.attention.k, &layer.attention.v] {
            let (out, later) = rest.split_at_mut(n * linear.rows());
            outputs.push((linear, out));
            rest = later;
        }
    }
    apply_all(compute.pool, f, n, &mut outputs);
    let positions: Vec<usize> = (first..first + n).collect();
    let mut outputs = outputs.into_iter().map(|(_, out)| out);
    let mut before: Option<&Attention> = None;
    let layers = weights.layers.iter().zip(&spec.layers);
    for ((layer, of), ring) in layers.zip(&mut cache.rings) {
        let (Some(k), Some(v)) = (outputs.next(), outputs.next()) else {
            return;
        };
        let attention = &layer.attention;
        if !before.is_some_and(|before| same_rope(before, attention)) {
            let angles = (&mut buffers.cos, &mut buffers.sin);
            fill_rope(compute, attention, &positions, angles);
        }
        before = Some(attention);
        if of.values == DraftValues::Keys {
            values_of_keys(compute, attention, k, v);
        }
        let size = n * attention.spec.rope.dims / 2;
        let angles = (&buffers.cos[..size], &buffers.sin[..size]);
        prepare(compute, attention, attention.k_norm.as_deref(), k, angles);
        let shape = ring.shape;
        let store = |ty: kv::Codec, rows: &[f32], bytes: &mut [u8]| {
            let (width, dim) = (shape.n_kv_heads * shape.head_dim, shape.head_dim);
            let row_bytes = ty.row_bytes(dim);
            let skip = n.saturating_sub(ring.slots);
            for (row, position) in rows.chunks_exact(width).zip(first..).skip(skip) {
                let slot = position % ring.slots * shape.n_kv_heads * row_bytes;
                let slots = bytes[slot..].chunks_exact_mut(row_bytes);
                for (head, bytes) in row.chunks_exact(dim).zip(slots) {
                    kv::encode(ty, head, bytes);
                }
            }
        };
        store(shape.k, k, &mut ring.keys);
        store(shape.v, v, &mut ring.values);
    }
}

/// Cosines and sines of rows at these positions, `[n, rope dims / 2]` each.
pub(crate) fn fill_rope(
    compute: ExecContext<'_>,
    attention: &Attention,
    positions: &[usize],
    (cos, sin): (&mut Vec<f32>, &mut Vec<f32>),
) {
    let half = attention.inverse_frequencies.len();
    let (cos, sin) = (
        sized(cos, positions.len() * half),
        sized(sin, positions.len() * half),
    );
    let rows = positions
        .iter()
        .zip(cos.chunks_exact_mut(half))
        .zip(sin.chunks_exact_mut(half));
    compute.pool.for_each_item(rows, |((position, cos), sin)| {
        rope::angles_at(*position, &attention.inverse_frequencies, cos, sin);
    });
}

/// Whether two layers have the same rotary embedding, so that they can share the table.
fn same_rope(one: &Attention, other: &Attention) -> bool {
    one.inverse_frequencies == other.inverse_frequencies
}

/// Normalises and rotates the heads of rows `[n, heads, head_dim]` in place.
fn prepare(
    compute: ExecContext<'_>,
    attention: &Attention,
    norm: Option<&[f32]>,
    rows: &mut [f32],
    (cos, sin): (&[f32], &[f32]),
) {
    let (dim, half) = (attention.spec.head_dim, attention.spec.rope.dims / 2);
    let width = rows.len() / (cos.len() / half);
    let items = rows.chunks_exact_mut(width).enumerate();
    compute.pool.for_each_item(items, |(row, heads)| {
        let (cos, sin) = (&cos[row * half..][..half], &sin[row * half..][..half]);
        for head in heads.chunks_exact_mut(dim) {
            if let Some(norm) = norm {
                (compute.kernels.rms_in_place)(head, norm, compute.norm_eps);
            }
            rope::rotate(head, cos, sin);
        }
    });
}

/// One sequence's rows, best first at each depth, as candidates.
pub(crate) fn candidates(rows: &[LogitsRow]) -> DraftCandidates {
    let k = rows.first().map_or(0, |row| row.ids.len());
    let mut all = DraftCandidates {
        ids: Vec::with_capacity(rows.len() * k),
        log_probs: Vec::with_capacity(rows.len() * k),
        lse: Vec::with_capacity(rows.len()),
        k,
        ..DraftCandidates::default()
    };
    for row in rows {
        all.ids.extend_from_slice(&row.ids);
        all.log_probs
            .extend(row.raw.iter().map(|logit| logit - row.raw_lse));
        all.lse.push(row.raw_lse);
    }
    all
}
