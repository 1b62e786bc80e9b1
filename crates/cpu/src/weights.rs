//! A model's weights, checked and ready to be multiplied with.

use std::ops::Range;
use std::sync::Arc;

use contract::quant::dequantize_row;
use contract::{
    AttentionSpec, DenseSpec, DeviceError, ExpertGateUp, ExpertStack, FeedForward, GateActivation,
    GatedDeltaSpec, LayerSpec, LoadProgress, Mixer, ModelSpec, MoeSpec, MtpSpec, QuantType,
    TokenId, WeightError, WeightRef, WeightSource,
};

use crate::linear::Linear;
use crate::reference::rope;
use crate::simd::dispatch::Dispatch;
use crate::thread_pool::ThreadPool;

/// Every weight of a model in the form the blocks use.
pub(crate) struct ModelWeights {
    pub(crate) spec: Arc<ModelSpec>,
    /// Gives the embedding rows, which are read in place.
    source: Arc<dyn WeightSource>,
    pub(crate) layers: Vec<LayerWeights>,
    /// `[hidden]`.
    pub(crate) final_norm: Vec<f32>,
    /// Without rows in a pipeline stage below the last.
    pub(crate) head: Linear,
    /// The multi-token-prediction head, if the spec has one.
    pub(crate) mtp: Option<MtpWeights>,
}

/// Weights of a multi-token-prediction head.
pub(crate) struct MtpWeights {
    pub(crate) eh_proj: Linear,
    /// `[hidden]` each.
    pub(crate) embedding_norm: Vec<f32>,
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) layer: LayerWeights,
    /// `[hidden]`.
    pub(crate) final_norm: Vec<f32>,
    /// `None` if it shares the model's LM head.
    pub(crate) head: Option<Linear>,
}

/// One layer.
pub(crate) struct LayerWeights {
    /// `[hidden]`.
    pub(crate) mixer_norm: Vec<f32>,
    pub(crate) mixer: LayerMixer,
    /// `[hidden]`.
    pub(crate) post_mixer_norm: Option<Vec<f32>>,
    /// `[hidden]`.
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: LayerFfn,
    /// `[hidden]`.
    pub(crate) post_ffn_norm: Option<Vec<f32>>,
}

/// The feed-forward of one layer.
pub(crate) enum LayerFfn {
    Dense(Box<Dense>),
    Experts(Box<ExpertWeights>),
}

/// Weights of a mixture of experts.
pub(crate) struct ExpertWeights {
    pub(crate) spec: MoeSpec,
    /// In f32, whatever stores it.
    pub(crate) router: Linear,
    /// One matrix per expert, as `up` and `down`.
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) shared: Option<SharedExpert>,
}

/// Weights of the expert of every row.
pub(crate) struct SharedExpert {
    /// `[hidden]`.
    pub(crate) gate: Vec<f32>,
    pub(crate) ffn: Dense,
}

/// Weights of a dense feed-forward.
pub(crate) struct Dense {
    pub(crate) activation: GateActivation,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

/// The mixer of one layer.
pub(crate) enum LayerMixer {
    Attention(Box<Attention>),
    Delta(Box<Delta>),
}

/// Weights of an attention mixer.
pub(crate) struct Attention {
    pub(crate) spec: AttentionSpec,
    /// `[head_dim]` each.
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    /// Biases of the projections, `[rows]` each.
    pub(crate) q_bias: Option<Vec<f32>>,
    pub(crate) k_bias: Option<Vec<f32>>,
    pub(crate) v_bias: Option<Vec<f32>>,
    pub(crate) o_bias: Option<Vec<f32>>,
    /// Angles per position of each pair, `[rope dims / 2]`.
    pub(crate) inverse_frequencies: Vec<f64>,
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) o: Linear,
}

/// Weights of a gated-delta mixer.
pub(crate) struct Delta {
    pub(crate) spec: GatedDeltaSpec,
    pub(crate) qkv: Linear,
    pub(crate) z: Linear,
    pub(crate) beta: Linear,
    pub(crate) alpha: Linear,
    pub(crate) out: Linear,
    /// `[n_v_heads]` each.
    pub(crate) a: Vec<f32>,
    pub(crate) dt: Vec<f32>,
    /// Head by head, `[conv_taps, head width]`: the weights of the channels from `c` to `c + width`
    /// begin at `c * conv_taps`.
    pub(crate) conv: Vec<f32>,
    /// `[v_dim]`.
    pub(crate) norm: Vec<f32>,
}

/// Loads weights one by one and reports its progress.
pub(crate) struct Loader<'a> {
    source: &'a dyn WeightSource,
    dispatch: &'a Dispatch,
    pool: &'a ThreadPool,
    progress: &'a mut dyn FnMut(LoadProgress),
    state: LoadProgress,
}

impl ModelWeights {
    /// Loads every weight of a model that [`crate::check::require_supported`] has passed.
    pub(crate) fn load(
        (spec, source): (Arc<ModelSpec>, Arc<dyn WeightSource>),
        dispatch: &Dispatch,
        pool: &ThreadPool,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<ModelWeights, DeviceError> {
        let total: u64 = spec.weights().iter().map(|w| w.bytes() as u64).sum();
        let mut loader = Loader::new(&*source, dispatch, pool, progress, total);
        if spec.embedding.rows > 0 {
            check_bytes(&spec.embedding, source.bytes(&spec.embedding)?)?;
        }
        let layers = spec.layers.iter();
        let layers = layers.map(|layer| LayerWeights::load(layer, &mut loader));
        let layers = layers.collect::<Result<Vec<LayerWeights>, WeightError>>()?;
        let final_norm = loader.vector(&spec.final_norm)?;
        let head = match spec.head.rows {
            0 => Linear::of_matrices(pool, &spec.head, &[], dispatch),
            _ => loader.matrix(&spec.head)?,
        };
        let mtp = spec.mtp.as_ref().map(|mtp| {
            if let Some(embedding) = &mtp.embedding {
                check_bytes(embedding, source.bytes(embedding)?)?;
            }
            MtpWeights::load(mtp, &mut loader)
        });
        let mtp = mtp.transpose()?;
        loader.count(total);
        Ok(ModelWeights {
            layers,
            final_norm,
            head,
            mtp,
            spec,
            source,
        })
    }

    /// Bytes held in memory of our own.
    pub(crate) fn owned_bytes(&self) -> u64 {
        let layers = self
            .layers
            .iter()
            .map(LayerWeights::owned_bytes)
            .sum::<usize>();
        let mtp = self.mtp.as_ref().map_or(0, MtpWeights::owned_bytes);
        (layers + mtp + vector_bytes(&self.final_norm) + self.head.owned_bytes()) as u64
    }

    /// Writes the embedding of each token to a row of `out` `[n, hidden]`.
    ///
    /// `tokens` must be below the vocabulary's size.
    pub(crate) fn embed(&self, tokens: &[TokenId], out: &mut [f32]) -> Result<(), DeviceError> {
        self.embed_with(&self.spec.embedding, tokens, out)?;
        let scale = self.spec.embedding_scale;
        if scale != 1.0 {
            out.iter_mut().for_each(|value| *value *= scale);
        }
        Ok(())
    }

    /// [`ModelWeights::embed`] with the embedding of the multi-token-prediction head.
    pub(crate) fn mtp_embed(&self, tokens: &[TokenId], out: &mut [f32]) -> Result<(), DeviceError> {
        let own = self
            .spec
            .mtp
            .as_ref()
            .and_then(|mtp| mtp.embedding.as_ref());
        self.embed_with(own.unwrap_or(&self.spec.embedding), tokens, out)
    }

    fn embed_with(
        &self,
        weight: &WeightRef,
        tokens: &[TokenId],
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        Ok(table_rows(&*self.source, weight, tokens, out)?)
    }
}

/// Writes the table's row of each token, which is below its number of rows, to `out` `[n, cols]`.
pub(crate) fn table_rows(
    source: &dyn WeightSource,
    table: &WeightRef,
    tokens: &[TokenId],
    out: &mut [f32],
) -> Result<(), WeightError> {
    let bytes = source.bytes(table)?;
    let row_bytes = table.ty.row_bytes(table.cols);
    for (token, out) in tokens.iter().zip(out.chunks_exact_mut(table.cols)) {
        let row = &bytes[token.index() * row_bytes..][..row_bytes];
        dequantize_row(table.ty, row, out);
    }
    Ok(())
}

fn vector_bytes(vector: &[f32]) -> usize {
    size_of_val(vector)
}

impl MtpWeights {
    fn load(spec: &MtpSpec, loader: &mut Loader<'_>) -> Result<MtpWeights, WeightError> {
        let head = spec.head.as_ref().map(|head| loader.matrix(head));
        Ok(MtpWeights {
            head: head.transpose()?,
            eh_proj: loader.matrix(&spec.eh_proj)?,
            embedding_norm: loader.vector(&spec.embedding_norm)?,
            hidden_norm: loader.vector(&spec.hidden_norm)?,
            layer: LayerWeights::load(&spec.layer, loader)?,
            final_norm: loader.vector(&spec.final_norm)?,
        })
    }

    fn owned_bytes(&self) -> usize {
        let vectors = [&self.embedding_norm, &self.hidden_norm, &self.final_norm];
        let vectors: usize = vectors.into_iter().map(|vector| vector_bytes(vector)).sum();
        let head = self.head.as_ref().map_or(0, Linear::owned_bytes);
        vectors + self.eh_proj.owned_bytes() + head + self.layer.owned_bytes()
    }
}

impl LayerWeights {
    pub(crate) fn load(
        layer: &LayerSpec,
        loader: &mut Loader<'_>,
    ) -> Result<LayerWeights, WeightError> {
        Ok(LayerWeights {
            mixer_norm: loader.vector(&layer.mixer_norm)?,
            mixer: match &layer.mixer {
                Mixer::Attention(a) => LayerMixer::Attention(Box::new(Attention::load(a, loader)?)),
                Mixer::GatedDelta(d) => LayerMixer::Delta(Box::new(Delta::load(d, loader)?)),
            },
            post_mixer_norm: loader.optional(layer.post_mixer_norm.as_ref())?,
            ffn_norm: loader.vector(&layer.ffn_norm)?,
            ffn: LayerFfn::load(&layer.ffn, loader)?,
            post_ffn_norm: loader.optional(layer.post_ffn_norm.as_ref())?,
        })
    }

    pub(crate) fn owned_bytes(&self) -> usize {
        let (vectors, matrices): (Vec<&[f32]>, Vec<&Linear>) = match &self.mixer {
            LayerMixer::Attention(w) => (w.vectors().collect(), w.matrices().to_vec()),
            LayerMixer::Delta(w) => (
                vec![&w.a, &w.dt, &w.conv, &w.norm],
                vec![&w.qkv, &w.z, &w.beta, &w.alpha, &w.out],
            ),
        };
        let post = self.post_mixer_norm.iter().chain(&self.post_ffn_norm);
        let vectors = vectors
            .into_iter()
            .chain([&*self.mixer_norm, &*self.ffn_norm])
            .chain(post.map(|norm| &**norm));
        let matrices = matrices.into_iter().chain(self.ffn.matrices());
        let vectors = vectors.chain(self.ffn.vectors());
        vectors.map(vector_bytes).sum::<usize>() + matrices.map(Linear::owned_bytes).sum::<usize>()
    }
}

impl LayerFfn {
    fn load(spec: &FeedForward, loader: &mut Loader<'_>) -> Result<LayerFfn, WeightError> {
        Ok(match spec {
            FeedForward::Dense(spec) => LayerFfn::Dense(Box::new(Dense::load(spec, loader)?)),
            FeedForward::Experts(spec) => {
                LayerFfn::Experts(Box::new(ExpertWeights::load(spec, loader)?))
            }
        })
    }

    /// Channels of the feed-forward that every row passes: the dense one, or the shared expert.
    pub(crate) fn dense_width(&self) -> usize {
        match self {
            LayerFfn::Dense(dense) => dense.gate.rows(),
            LayerFfn::Experts(experts) => experts.shared.as_ref().map_or(0, |s| s.ffn.gate.rows()),
        }
    }

    fn matrices(&self) -> Vec<&Linear> {
        match self {
            LayerFfn::Dense(dense) => dense.matrices().to_vec(),
            LayerFfn::Experts(experts) => {
                let shared = experts
                    .shared
                    .iter()
                    .flat_map(|shared| shared.ffn.matrices());
                let own = [&experts.router, &experts.gate, &experts.up, &experts.down];
                own.into_iter().chain(shared).collect()
            }
        }
    }

    fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        let shared = match self {
            LayerFfn::Dense(_) => None,
            LayerFfn::Experts(experts) => experts.shared.as_ref(),
        };
        shared.into_iter().map(|shared| &*shared.gate)
    }
}

impl ExpertWeights {
    fn load(spec: &MoeSpec, loader: &mut Loader<'_>) -> Result<ExpertWeights, WeightError> {
        let (gate, up) = match &spec.gate_up {
            ExpertGateUp::Separate { gate, up } => (
                loader.stack(gate, 0..gate.rows())?,
                loader.stack(up, 0..up.rows())?,
            ),
            ExpertGateUp::Fused(fused) => {
                let width = spec.width();
                (
                    loader.stack(fused, 0..width)?,
                    loader.stack(fused, width..2 * width)?,
                )
            }
        };
        let shared = spec.shared.as_ref().map(|shared| {
            Ok(SharedExpert {
                gate: loader.vector(&shared.gate)?,
                ffn: Dense::load(&shared.ffn, loader)?,
            })
        });
        Ok(ExpertWeights {
            shared: shared.transpose()?,
            router: loader.float_matrix(&spec.router)?,
            gate,
            up,
            down: loader.stack(&spec.down, 0..spec.down.rows())?,
            spec: spec.clone(),
        })
    }
}

impl Dense {
    pub(crate) fn load(spec: &DenseSpec, loader: &mut Loader<'_>) -> Result<Dense, WeightError> {
        Ok(Dense {
            activation: spec.activation,
            gate: loader.matrix(&spec.gate)?,
            up: loader.matrix(&spec.up)?,
            down: loader.matrix(&spec.down)?,
        })
    }

    pub(crate) fn matrices(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

impl Attention {
    pub(crate) fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        let biases = [&self.q_bias, &self.k_bias, &self.v_bias, &self.o_bias];
        let norms = self.q_norm.iter().chain(&self.k_norm);
        norms.chain(biases.into_iter().flatten()).map(|v| &**v)
    }

    pub(crate) fn matrices(&self) -> [&Linear; 4] {
        [&self.q, &self.k, &self.v, &self.o]
    }

    pub(crate) fn load(
        spec: &AttentionSpec,
        loader: &mut Loader<'_>,
    ) -> Result<Attention, WeightError> {
        let mut vector = |weight: &Option<WeightRef>| loader.optional(weight.as_ref());
        let factors = vector(&spec.rope_factors)?;
        Ok(Attention {
            q_norm: vector(&spec.q_norm)?,
            k_norm: vector(&spec.k_norm)?,
            q_bias: vector(&spec.biases.q)?,
            k_bias: vector(&spec.biases.k)?,
            v_bias: vector(&spec.biases.v)?,
            o_bias: vector(&spec.biases.o)?,
            inverse_frequencies: rope::inverse_frequencies_of(spec.rope, factors.as_deref()),
            q: loader.matrix(&spec.q)?,
            k: loader.matrix(&spec.k)?,
            v: loader.matrix(&spec.v)?,
            o: loader.matrix(&spec.o)?,
            spec: spec.clone(),
        })
    }
}

impl Delta {
    fn load(spec: &GatedDeltaSpec, loader: &mut Loader<'_>) -> Result<Delta, WeightError> {
        Ok(Delta {
            qkv: loader.matrix(&spec.qkv)?,
            z: loader.matrix(&spec.z)?,
            beta: loader.matrix(&spec.beta)?,
            alpha: loader.matrix(&spec.alpha)?,
            out: loader.matrix(&spec.out)?,
            a: loader.vector(&spec.a)?,
            dt: loader.vector(&spec.dt)?,
            conv: conv_by_head(spec, &loader.vector(&spec.conv)?),
            norm: loader.vector(&spec.norm)?,
            spec: spec.clone(),
        })
    }
}

/// From `[channels, taps]` to the layout of [`Delta::conv`].
fn conv_by_head(spec: &GatedDeltaSpec, stored: &[f32]) -> Vec<f32> {
    let taps = spec.conv_taps;
    let mut out = vec![0.0; stored.len()];
    let widths = std::iter::repeat_n(spec.k_dim, 2 * spec.n_k_heads)
        .chain(std::iter::repeat_n(spec.v_dim, spec.n_v_heads));
    let mut begin = 0;
    for width in widths {
        let head = begin * taps..(begin + width) * taps;
        let (from, to) = (&stored[head.clone()], &mut out[head]);
        for (channel, weights) in from.chunks_exact(taps).enumerate() {
            for (tap, &weight) in weights.iter().enumerate() {
                to[tap * width + channel] = weight;
            }
        }
        begin += width;
    }
    out
}

impl<'a> Loader<'a> {
    /// Nothing loaded of `total_bytes`.
    pub(crate) fn new(
        source: &'a dyn WeightSource,
        dispatch: &'a Dispatch,
        pool: &'a ThreadPool,
        progress: &'a mut dyn FnMut(LoadProgress),
        total_bytes: u64,
    ) -> Loader<'a> {
        Loader {
            source,
            dispatch,
            pool,
            progress,
            state: LoadProgress {
                done_bytes: 0,
                total_bytes,
            },
        }
    }

    /// A small weight as f32 values in stored order.
    pub(crate) fn vector(&mut self, weight: &WeightRef) -> Result<Vec<f32>, WeightError> {
        let bytes = self.source.bytes(weight)?;
        check_bytes(weight, bytes)?;
        let mut values = vec![0.0; weight.values()];
        let rows = bytes.chunks_exact(weight.ty.row_bytes(weight.cols));
        for (row, values) in rows.zip(values.chunks_exact_mut(weight.cols)) {
            dequantize_row(weight.ty, row, values);
        }
        self.count(weight.bytes() as u64);
        Ok(values)
    }

    /// [`Loader::vector`] of a weight that may be absent.
    fn optional(&mut self, weight: Option<&WeightRef>) -> Result<Option<Vec<f32>>, WeightError> {
        weight.map(|weight| self.vector(weight)).transpose()
    }

    pub(crate) fn matrix(&mut self, weight: &WeightRef) -> Result<Linear, WeightError> {
        let bytes = self.source.bytes(weight)?;
        check_bytes(weight, bytes)?;
        let linear = Linear::load_on(self.pool, weight, bytes, self.dispatch)?;
        self.count(weight.bytes() as u64);
        Ok(linear)
    }

    /// A matrix of any type as f32.
    fn float_matrix(&mut self, weight: &WeightRef) -> Result<Linear, WeightError> {
        let values = self.vector(weight)?;
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let weight = WeightRef {
            ty: QuantType::F32,
            ..weight.clone()
        };
        Linear::load_on(self.pool, &weight, &bytes, self.dispatch)
    }

    /// The rows `rows` of each expert.
    fn stack(&mut self, stack: &ExpertStack, rows: Range<usize>) -> Result<Linear, WeightError> {
        let weight = &stack.weight;
        let bytes = self.source.bytes(weight)?;
        check_bytes(weight, bytes)?;
        let row_bytes = weight.ty.row_bytes(weight.cols);
        let part = rows.start * row_bytes..rows.end * row_bytes;
        let experts = bytes.chunks_exact(stack.expert_bytes());
        let experts: Vec<&[u8]> = experts.map(|expert| &expert[part.clone()]).collect();
        let each = WeightRef {
            rows: rows.len(),
            ..weight.clone()
        };
        let linear = Linear::of_matrices(self.pool, &each, &experts, self.dispatch);
        self.count((stack.n_experts * part.len()) as u64);
        Ok(linear)
    }

    /// Adds to what is done, up to the total.
    fn count(&mut self, bytes: u64) {
        let total = self.state.total_bytes;
        self.state.done_bytes = (self.state.done_bytes + bytes).min(total);
        (self.progress)(self.state);
    }
}

pub(crate) fn check_bytes(weight: &WeightRef, bytes: &[u8]) -> Result<(), WeightError> {
    if bytes.len() == weight.bytes() {
        return Ok(());
    }
    Err(WeightError::Mismatch {
        name: Arc::clone(&weight.name),
        detail: format!("{} bytes, {} expected", bytes.len(), weight.bytes()),
    })
}
