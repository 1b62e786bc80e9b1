//! The CPU scorer: a model without LM head, run over a whole prompt layer by layer.
//!
//! One layer's keys and values exist at a time; of the layers below only the residual stream is
//! kept, `[n, hidden]`. The exit layer computes keys and tail queries alone.
//!
//! Results are deterministic: work is cut at fixed rows, whatever the number of threads.

mod attention;
mod keys;
mod tail;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use contract::scorer::check_score_call;
use contract::{
    BlockSparsity, DeviceError, LoadProgress, Mixer, ModelSpec, ScoreProgress, ScoreSettings,
    Scorer, ScorerConfig, ScorerInfo, TokenId, WeightRef, WeightSource,
};

use self::attention::q_stride;
use self::keys::LayerKeys;
use self::tail::{TailLogits, TailWeights};
use crate::blocks::{delta, ffn};
use crate::kernels::Kernels;
use crate::pass::{BufferWidths, ExecContext, LayerSegment, PassBuffers, SegmentKind};
use crate::reference::rope;
use crate::scratch::ScratchPool;
use crate::simd::dispatch::Dispatch;
use crate::state::DeltaState;
use crate::thread_pool::ThreadPool;
use crate::weights::{Attention, LayerMixer, LayerWeights, Loader, table_rows};
use crate::{check, memory};

/// Rows of a piece of work: whole blocks of attention and whole chunks of the delta rule.
const PIECE: usize = 4 * BlockSparsity::BLOCK;

/// An opened scorer.
pub(crate) struct CpuScorer {
    info: ScorerInfo,
    spec: Arc<ModelSpec>,
    source: Arc<dyn WeightSource>,
    /// Up to the exit layer.
    layers: Vec<LayerWeights>,
    pool: ThreadPool,
    kernels: Kernels,
    scratch: ScratchPool,
    buffers: PassBuffers,
}

/// Which of a layer's parts are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerRole {
    /// The layer's output.
    Below,
    /// The output and the tail's weights.
    Scored,
    /// The tail's weights alone.
    Exit,
}

impl CpuScorer {
    /// Loads the layers up to the exit.
    pub(crate) fn open(
        config: ScorerConfig,
        (dispatch, threads): (Dispatch, usize),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CpuScorer, DeviceError> {
        let ScorerConfig {
            model: spec,
            weights: source,
            ..
        } = config;
        check::spec(&spec)?;
        let last = config.exit_layer.unwrap_or(usize::MAX);
        let is_attention = |layer: &usize| matches!(spec.layers[*layer].mixer, Mixer::Attention(_));
        let attention: Vec<usize> = (0..spec.layers.len())
            .filter(|layer| *layer <= last && is_attention(layer))
            .collect();
        let Some(&exit_layer) = attention.last() else {
            return Err(DeviceError::Unsupported {
                what: format!("scoring with {}", spec.name),
                device: "the cpu".to_owned(),
                instead: "use a scorer with attention layers".to_owned(),
            });
        };
        let used = &spec.layers[..=exit_layer];
        let weights = || used.iter().flat_map(contract::LayerSpec::weights);
        let total = weights().map(|weight| weight.bytes() as u64).sum();
        memory::require(total + call_bytes(&spec, exit_layer, config.max_tokens))?;
        let pool = ThreadPool::new(threads);
        let mut loader = Loader::new(&*source, &dispatch, &pool, progress, total);
        let layers = used
            .iter()
            .map(|layer| LayerWeights::load(layer, &mut loader));
        let layers = layers.collect::<Result<Vec<LayerWeights>, _>>()?;
        let info = ScorerInfo {
            device: "cpu".to_owned(),
            exit_layer,
            attention_layers: attention.len(),
            vocab: spec.vocab,
            max_tokens: config.max_tokens,
            weights_bytes: layers.iter().map(LayerWeights::owned_bytes).sum::<usize>() as u64,
        };
        Ok(CpuScorer {
            info,
            buffers: PassBuffers::new(BufferWidths::of(&spec), PIECE),
            spec,
            source,
            layers,
            pool,
            kernels: Kernels::of(dispatch),
            scratch: ScratchPool::default(),
        })
    }

    /// The parts of each layer that a call needs.
    fn roles(&self, settings: &ScoreSettings) -> Vec<LayerRole> {
        let scored = settings.scored_layers.unwrap_or(usize::MAX);
        let mut above = 0;
        let mut roles: Vec<LayerRole> = self
            .layers
            .iter()
            .rev()
            .map(|layer| match layer.mixer {
                LayerMixer::Delta(_) => LayerRole::Below,
                LayerMixer::Attention(_) => {
                    above += 1;
                    match above {
                        1 => LayerRole::Exit,
                        _ if above <= scored => LayerRole::Scored,
                        _ => LayerRole::Below,
                    }
                }
            })
            .collect();
        roles.reverse();
        roles
    }
}

/// Bytes of a call beside the weights: residual stream, one layer's keys and values, tail logits.
fn call_bytes(spec: &ModelSpec, exit_layer: usize, tokens: usize) -> u64 {
    /// Tail queries of a usual call.
    const TAIL: usize = 8;
    let attention = spec.layers[..=exit_layer]
        .iter()
        .map(|layer| match &layer.mixer {
            Mixer::Attention(a) => 2 * a.n_kv_heads * a.head_dim + TAIL * a.n_heads,
            Mixer::GatedDelta(_) => 0,
        });
    let ffn = spec.layers.iter().map(|layer| {
        let gates = layer.ffn.dense().map(|dense| &dense.gate);
        gates.map_or(0, |gate| WeightRef::bytes(gate) / gate.rows.max(1))
    });
    let row = spec.hidden + TAIL + attention.max().unwrap_or(0);
    let piece = BufferWidths::of(spec).total() * PIECE;
    (4 * (row.saturating_mul(tokens) + piece) + ffn.max().unwrap_or(0)) as u64
}

impl Scorer for CpuScorer {
    fn info(&self) -> &ScorerInfo {
        &self.info
    }

    fn score(
        &mut self,
        tokens: &[TokenId],
        settings: &ScoreSettings,
        progress: &mut dyn FnMut(ScoreProgress) -> ControlFlow<()>,
    ) -> Result<Option<Vec<f32>>, DeviceError> {
        check_score_call(&self.info, tokens, settings)?;
        let hidden = self.spec.hidden;
        let mut x = vec![0.0; tokens.len() * hidden];
        table_rows(&*self.source, &self.spec.embedding, tokens, &mut x)?;
        if self.spec.embedding_scale != 1.0 {
            x.iter_mut()
                .for_each(|value| *value *= self.spec.embedding_scale);
        }
        let roles = self.roles(settings);
        let mut tail = TailWeights::new(tokens.len(), settings.tail_tokens);
        let mut steps = Steps {
            at: ScoreProgress {
                done: 0,
                total: tokens.len() * self.layers.len(),
            },
            report: progress,
        };
        let compute = ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.spec);
        for (layer, role) in self.layers.iter().zip(roles) {
            let mut pass = LayerPass {
                compute,
                layer,
                role,
                settings,
                x: &mut x,
                buffers: &mut self.buffers,
            };
            let flow = self.pool.enter(|| match &layer.mixer {
                LayerMixer::Delta(_) => pass.delta(&mut steps),
                LayerMixer::Attention(attention) => {
                    pass.attention(attention, &mut tail, &mut steps)
                }
            });
            if flow.is_break() {
                return Ok(None);
            }
        }
        Ok(Some(tail.scores(settings)))
    }
}

/// Progress of a call.
struct Steps<'a> {
    at: ScoreProgress,
    report: &'a mut dyn FnMut(ScoreProgress) -> ControlFlow<()>,
}

impl Steps<'_> {
    fn advance(&mut self, rows: usize) -> ControlFlow<()> {
        self.at.done += rows;
        (self.report)(self.at)
    }
}

/// One layer over the whole prompt.
struct LayerPass<'a> {
    compute: ExecContext<'a>,
    layer: &'a LayerWeights,
    role: LayerRole,
    settings: &'a ScoreSettings,
    /// The residual stream, `[n, hidden]`.
    x: &'a mut [f32],
    buffers: &'a mut PassBuffers,
}

/// Cosines and sines of consecutive rows, `[n, dims / 2]` each.
struct RowAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RowAngles {
    fn new(attention: &Attention, rows: Range<usize>) -> RowAngles {
        let half = attention.inverse_frequencies.len();
        let mut angles = RowAngles {
            cos: vec![0.0; rows.len() * half],
            sin: vec![0.0; rows.len() * half],
            half,
        };
        for (i, position) in rows.enumerate() {
            let at = i * half..(i + 1) * half;
            let (cos, sin) = (&mut angles.cos[at.clone()], &mut angles.sin[at]);
            rope::angles_at(position, &attention.inverse_frequencies, cos, sin);
        }
        angles
    }

    /// Rotates heads `[n, heads, stride]` in place, each up to the rotary dimensions.
    fn rotate(
        &self,
        compute: ExecContext<'_>,
        attention: &Attention,
        rows: &mut [f32],
        stride: usize,
    ) {
        if self.half == 0 {
            return;
        }
        let rotate = rope::rotation(attention.spec.rope.pairs);
        let width = rows.len() / (self.cos.len() / self.half);
        let rows = rows.chunks_exact_mut(width).enumerate();
        compute.pool.for_each_item(rows, |(row, heads)| {
            let at = row * self.half..(row + 1) * self.half;
            for head in heads.chunks_exact_mut(stride) {
                let head = &mut head[..attention.spec.head_dim];
                rotate(head, &self.cos[at.clone()], &self.sin[at.clone()]);
            }
        });
    }
}

impl LayerPass<'_> {
    fn n(&self) -> usize {
        self.x.len() / self.layer.mixer_norm.len()
    }

    /// The pieces of the prompt.
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let n = self.n();
        (0..n).step_by(PIECE).map(move |at| at..n.min(at + PIECE))
    }

    /// Loads rows of the residual stream and their norm into the buffers.
    fn load(&mut self, rows: Range<usize>) {
        let hidden = self.layer.mixer_norm.len();
        let x = &self.x[rows.start * hidden..rows.end * hidden];
        self.buffers.x[..x.len()].copy_from_slice(x);
        let y = &mut self.buffers.y[..x.len()];
        self.compute.norm(x, &self.layer.mixer_norm, y);
    }

    /// Adds the mixer's output in the buffers and runs the feed-forward, then stores the rows.
    fn finish(&mut self, rows: Range<usize>) {
        let (layer, hidden) = (self.layer, self.layer.mixer_norm.len());
        let (n, all) = (rows.len(), rows.len() * hidden);
        let compute = self.compute;
        compute.post_norm(
            &mut self.buffers.update[..all],
            layer.post_mixer_norm.as_deref(),
        );
        compute.add_norm_of(self.buffers, n, &layer.ffn_norm);
        ffn::apply(compute, layer, self.buffers, n);
        compute.post_norm(
            &mut self.buffers.update[..all],
            layer.post_ffn_norm.as_deref(),
        );
        (compute.kernels.add)(&mut self.buffers.x[..all], &self.buffers.update[..all]);
        self.x[rows.start * hidden..rows.end * hidden].copy_from_slice(&self.buffers.x[..all]);
    }

    fn delta(&mut self, steps: &mut Steps<'_>) -> ControlFlow<()> {
        let LayerMixer::Delta(weights) = &self.layer.mixer else {
            return ControlFlow::Continue(());
        };
        let mut state = DeltaState::new(&weights.spec);
        for rows in self.pieces() {
            self.load(rows.clone());
            let segment = LayerSegment {
                state: &mut state,
                work: SegmentKind::Chunk,
                first_row: 0,
                n_rows: rows.len(),
                position: rows.start,
            };
            delta::mix(self.compute, weights, self.buffers, &mut [segment]);
            self.finish(rows.clone());
            steps.advance(rows.len())?;
        }
        ControlFlow::Continue(())
    }

    fn attention(
        &mut self,
        attention: &Attention,
        tail: &mut TailWeights,
        steps: &mut Steps<'_>,
    ) -> ControlFlow<()> {
        let n = self.n();
        let spec = &attention.spec;
        let mut logits = (self.role != LayerRole::Below).then(|| {
            let queries = self.tail_queries(attention);
            TailLogits::new(queries, spec, n)
        });
        let is_exit = self.role == LayerRole::Exit;
        let mut keys = LayerKeys::new(spec, if is_exit { 0 } else { n });
        for rows in self.pieces() {
            self.load(rows.clone());
            self.keys(attention, rows.clone(), &mut keys, logits.as_mut());
            if is_exit {
                steps.advance(rows.len())?;
            }
        }
        if let Some(logits) = &mut logits {
            tail.raise(self.compute, logits);
        }
        if is_exit {
            return ControlFlow::Continue(());
        }
        for rows in self.pieces() {
            self.load(rows.clone());
            self.mix(attention, &keys, rows.clone());
            self.finish(rows.clone());
            steps.advance(rows.len())?;
        }
        ControlFlow::Continue(())
    }

    /// Prepared queries of the tail, `[tail, n_heads, head_dim]`.
    fn tail_queries(&mut self, attention: &Attention) -> Vec<f32> {
        let (n, tail) = (self.n(), self.settings.tail_tokens);
        let (dim, stride) = (attention.spec.head_dim, q_stride(&attention.spec));
        let mut all = Vec::with_capacity(tail * attention.spec.n_heads * dim);
        let mut first = n - tail;
        while first < n {
            let rows = first..n.min(first + PIECE);
            self.load(rows.clone());
            let q = self.queries(attention, rows.clone(), self.settings.rotated_tail);
            all.extend(q.chunks_exact(stride).flat_map(|head| &head[..dim]));
            first = rows.end;
        }
        all
    }

    /// Queries of the rows in the buffers, `[n, n_heads, head and gate]`.
    fn queries(&mut self, attention: &Attention, rows: Range<usize>, rotated: bool) -> Vec<f32> {
        let stride = q_stride(&attention.spec);
        let y = &self.buffers.y[..rows.len() * attention.q.cols()];
        let mut q = vec![0.0; rows.len() * attention.q.rows()];
        attention.q.apply(self.compute.pool, y, rows.len(), &mut q);
        self.compute.add_bias(&mut q, attention.q_bias.as_deref());
        self.head_norm(&mut q, stride, attention.q_norm.as_deref());
        if rotated {
            let angles = RowAngles::new(attention, rows);
            angles.rotate(self.compute, attention, &mut q, stride);
        }
        q
    }

    /// Normalises heads of `stride` values in place, if there is a norm.
    fn head_norm(&self, heads: &mut [f32], stride: usize, norm: Option<&[f32]>) {
        let Some(norm) = norm else { return };
        let compute = self.compute;
        let groups = heads.chunks_mut(16 * stride);
        compute.pool.for_each_item(groups, |heads| {
            for head in heads.chunks_exact_mut(stride) {
                (compute.kernels.rms_in_place)(&mut head[..norm.len()], norm, compute.norm_eps);
            }
        });
    }

    /// Keys and values of the rows in the buffers, into `keys` unless this is the exit layer, and
    /// the tail's logits.
    fn keys(
        &mut self,
        attention: &Attention,
        rows: Range<usize>,
        keys: &mut LayerKeys,
        mut logits: Option<&mut TailLogits>,
    ) {
        let spec = &attention.spec;
        let compute = self.compute;
        let y = &self.buffers.y[..rows.len() * attention.k.cols()];
        let mut k = vec![0.0; rows.len() * attention.k.rows()];
        attention.k.apply(compute.pool, y, rows.len(), &mut k);
        compute.add_bias(&mut k, attention.k_bias.as_deref());
        self.head_norm(&mut k, spec.head_dim, attention.k_norm.as_deref());
        if let Some(logits) = &mut logits
            && !self.settings.rotated_tail
        {
            logits.add(compute, spec, rows.start, &k);
        }
        if keys.n_rows() == 0 && !self.settings.rotated_tail {
            return;
        }
        RowAngles::new(attention, rows.clone()).rotate(compute, attention, &mut k, spec.head_dim);
        if let Some(logits) = logits
            && self.settings.rotated_tail
        {
            logits.add(compute, spec, rows.start, &k);
        }
        if keys.n_rows() > 0 {
            let y = &self.buffers.y[..rows.len() * attention.v.cols()];
            let mut v = vec![0.0; rows.len() * attention.v.rows()];
            attention.v.apply(compute.pool, y, rows.len(), &mut v);
            compute.add_bias(&mut v, attention.v_bias.as_deref());
            keys.store(rows.start, &k, &v);
        }
    }

    /// Attention of the rows in the buffers, into the buffers' update.
    fn mix(&mut self, attention: &Attention, keys: &LayerKeys, rows: Range<usize>) {
        let spec = &attention.spec;
        let compute = self.compute;
        let q = self.queries(attention, rows.clone(), true);
        let mut heads = vec![0.0; rows.len() * spec.n_heads * spec.head_dim];
        let sparse = (spec, self.settings.sparsity);
        attention::attend(compute, sparse, keys, (rows.start, &q), &mut heads);
        let update = &mut self.buffers.update[..rows.len() * attention.o.rows()];
        attention.o.apply(compute.pool, &heads, rows.len(), update);
        compute.add_bias(update, attention.o_bias.as_deref());
    }
}
