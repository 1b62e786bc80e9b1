//! A model as data: everything a device needs to run it, without a model-family name.
//!
//! `model` turns a file into a [`ModelSpec`]; each device implements each block kind once and
//! iterates the list.
//! Formulas are in the devices' references; here are only shapes and switches.

use crate::{FeedForward, WeightRef};

/// Identity of a model's weights and shape; snapshots of another model never match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ModelHash(pub [u8; 16]);

/// One decoder-only model.
///
/// ```text
/// x = embedding[ids] * embedding_scale                 [n, hidden]
/// per layer:  x += mixer(rms(x, mixer_norm));  x += ffn(rms(x, ffn_norm))
///             a layer's post norms, if it has them, apply to what is added
/// logits = head · rms(x, final_norm)                   [n, vocab]
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Display name: the model's own name, or the file's stem.
    pub name: String,
    /// Identity of the weights.
    pub hash: ModelHash,
    /// Number of tokens, padding entries included; the length of a logits row.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The longest context the model was trained for, in tokens.
    pub trained_context: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// `[vocab, hidden]`; rows are looked up, never multiplied.
    pub embedding: WeightRef,
    /// Factor on each looked-up row; 1 for most models. The LM head has none.
    pub embedding_scale: f32,
    /// The trunk, bottom to top.
    pub layers: Vec<LayerSpec>,
    /// `[hidden]`.
    pub final_norm: WeightRef,
    /// `[vocab, hidden]`; the same reference as `embedding` when tied.
    pub head: WeightRef,
    /// The multi-token-prediction head, if the model has one and it is to be used.
    pub mtp: Option<MtpSpec>,
}

/// A multi-token-prediction (MTP) head: one more layer, which drafts from the model's own hidden
/// rows.
///
/// ```text
/// h[p]   = rms(x[p], model.final_norm)            [hidden]; h[-1] = 0
/// e[p]   = eh_proj · [rms(embedding[id p], embedding_norm); rms(h[p - 1], hidden_norm)]
/// y[p]   = rms(layer(e)[p], final_norm)           [hidden]
/// logits = head · y[p]                            [vocab]: the token at position p + 1
/// ```
///
/// The layer caches one key and value per committed position, from `e[p]` alone. A drafted row at
/// depth `d > 0` has `y` of its parent row in place of `h[p - 1]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MtpSpec {
    /// `[hidden, 2 * hidden]`; the first `hidden` columns multiply the embedding.
    pub eh_proj: WeightRef,
    /// `[hidden]`: norm of the token's embedding.
    pub embedding_norm: WeightRef,
    /// `[hidden]`: norm of the hidden row of the position before.
    pub hidden_norm: WeightRef,
    /// `[vocab, hidden]`; `None` if the head shares the model's embedding.
    pub embedding: Option<WeightRef>,
    /// The layer. Its mixer is attention, in the KV cache behind the trunk's attention layers.
    pub layer: LayerSpec,
    /// `[hidden]`; the model's `final_norm` if the file has none for the head.
    pub final_norm: WeightRef,
    /// `[vocab, hidden]`; `None` if the head shares the model's LM head.
    pub head: Option<WeightRef>,
}

/// One layer: a mixer and a feed-forward, each behind its own norm and residual.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// `[hidden]`, multiplied as stored (already includes any `1 + w`).
    pub mixer_norm: WeightRef,
    /// What mixes positions.
    pub mixer: Mixer,
    /// `[hidden]`: norm of the mixer's output before it is added, if the layer has one.
    pub post_mixer_norm: Option<WeightRef>,
    /// `[hidden]`, as `mixer_norm`.
    pub ffn_norm: WeightRef,
    /// What works on each position alone.
    pub ffn: FeedForward,
    /// `[hidden]`: norm of the feed-forward's output before it is added, if the layer has one.
    pub post_ffn_norm: Option<WeightRef>,
}

/// The part of a layer that looks at other positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Softmax attention over cached keys and values.
    Attention(AttentionSpec),
    /// Gated delta rule over a fixed-size state, behind a short causal convolution.
    GatedDelta(GatedDeltaSpec),
}

/// Grouped-query softmax attention with per-head q/k norm and rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; query head `h` reads `h / (n_heads / n_kv_heads)`.
    pub n_kv_heads: usize,
    /// Values per head, for q, k and v alike.
    pub head_dim: usize,
    /// Rotary embedding of q and k.
    pub rope: RopeSpec,
    /// `[rope.dims / 2]`: divisors of the inverse frequencies, for contexts beyond the trained one.
    pub rope_factors: Option<WeightRef>,
    /// The row at position `p` sees the positions after `p - window`; `None` for all up to `p`.
    pub window: Option<usize>,
    /// Factor on `q · k`.
    pub scale: f32,
    /// Whether the query projection carries an output gate.
    pub gate: OutputGate,
    /// `[head_dim]`, applied to each query head before rope.
    pub q_norm: Option<WeightRef>,
    /// `[head_dim]`, applied to each key head before rope.
    pub k_norm: Option<WeightRef>,
    /// `[n_heads * head_dim, hidden]`, or twice the rows with a gate.
    pub q: WeightRef,
    /// `[n_kv_heads * head_dim, hidden]`.
    pub k: WeightRef,
    /// `[n_kv_heads * head_dim, hidden]`.
    pub v: WeightRef,
    /// `[hidden, n_heads * head_dim]`.
    pub o: WeightRef,
    /// What is added to the projections.
    pub biases: AttentionBiases,
}

/// Biases of the attention projections, each of a projection's rows; `None` adds nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AttentionBiases {
    /// Of the query projection.
    pub q: Option<WeightRef>,
    /// Of the key projection.
    pub k: Option<WeightRef>,
    /// Of the value projection.
    pub v: Option<WeightRef>,
    /// Of the output projection.
    pub o: Option<WeightRef>,
}

impl AttentionBiases {
    /// Those that there are.
    pub fn iter(&self) -> impl Iterator<Item = &WeightRef> {
        [&self.q, &self.k, &self.v, &self.o].into_iter().flatten()
    }
}

/// Rotary embedding of the first `dims` values of a head, in pairs.
///
/// Pair `j` has the angle `position * scale * theta^(-2j / dims)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// How many leading values are rotated; even, at most `head_dim`.
    pub dims: usize,
    /// Base of the inverse frequencies.
    pub theta: f64,
    /// Factor on positions: below 1 for a context that was stretched linearly.
    pub scale: f64,
    /// The values of a pair.
    pub pairs: RopePairs,
}

/// Which two values a rotary embedding turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// `j` and `j + dims / 2`.
    Halves,
    /// `2 j` and `2 j + 1`.
    Adjacent,
}

impl RopeSpec {
    /// Pairs of halves at unscaled positions.
    pub const fn new(dims: usize, theta: f64) -> RopeSpec {
        RopeSpec {
            dims,
            theta,
            scale: 1.0,
            pairs: RopePairs::Halves,
        }
    }
}

/// What gates the attention output before the output projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// Nothing.
    None,
    /// `o * sigmoid(gate)`; the query projection's rows are, head by head, `head_dim` of query then
    /// `head_dim` of gate.
    SigmoidPerHead,
}

/// A gated delta-rule mixer (Gated DeltaNet, arXiv 2412.06464).
#[derive(Debug, Clone, PartialEq)]
pub struct GatedDeltaSpec {
    /// Key (and query) heads.
    pub n_k_heads: usize,
    /// Value heads; one state each.
    pub n_v_heads: usize,
    /// Values per key head (`d_k`).
    pub k_dim: usize,
    /// Values per value head (`d_v`).
    pub v_dim: usize,
    /// Taps of the causal depthwise convolution, the current token included.
    pub conv_taps: usize,
    /// Which key head a value head uses.
    pub head_map: HeadMap,
    /// `[2 * n_k_heads * k_dim + n_v_heads * v_dim, hidden]`: rows Q, then K, then V.
    pub qkv: WeightRef,
    /// `[n_v_heads * v_dim, hidden]`: the output gate z.
    pub z: WeightRef,
    /// `[n_v_heads, hidden]`.
    pub beta: WeightRef,
    /// `[n_v_heads, hidden]`.
    pub alpha: WeightRef,
    /// `[n_v_heads]`: already `-exp(A_log)`, so negative.
    pub a: WeightRef,
    /// `[n_v_heads]`: bias inside the softplus.
    pub dt: WeightRef,
    /// `[channels, conv_taps]`, channels as the rows of `qkv`; the last tap multiplies the current
    /// token.
    pub conv: WeightRef,
    /// `[v_dim]`: norm of each value head's output.
    pub norm: WeightRef,
    /// `[hidden, n_v_heads * v_dim]`.
    pub out: WeightRef,
}

/// How value heads share key heads when there are more of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadMap {
    /// Value head `h` uses key head `h % n_k_heads` (GGUF files).
    Tiled,
    /// Value head `h` uses key head `h / (n_v_heads / n_k_heads)` (safetensors checkpoints).
    Grouped,
}

impl HeadMap {
    /// The key head of value head `v_head`.
    pub fn k_head(self, v_head: usize, n_k_heads: usize, n_v_heads: usize) -> usize {
        match self {
            HeadMap::Tiled => v_head % n_k_heads,
            HeadMap::Grouped => v_head / (n_v_heads / n_k_heads),
        }
    }
}

impl GatedDeltaSpec {
    /// Channels of the convolution: the rows of `qkv`.
    pub fn channels(&self) -> usize {
        2 * self.n_k_heads * self.k_dim + self.n_v_heads * self.v_dim
    }

    /// Values of one sequence's delta state in this layer, `[n_v_heads, k_dim, v_dim]`.
    pub fn state_values(&self) -> usize {
        self.n_v_heads * self.k_dim * self.v_dim
    }

    /// Values of one sequence's convolution window in this layer, `[conv_taps - 1, channels]`.
    pub fn window_values(&self) -> usize {
        (self.conv_taps - 1) * self.channels()
    }
}

impl LayerSpec {
    /// Every weight of the layer, but not the rotary factors, which layers share.
    pub fn weights(&self) -> Vec<&WeightRef> {
        let mut all = vec![&self.mixer_norm, &self.ffn_norm];
        all.extend(self.post_mixer_norm.iter().chain(&self.post_ffn_norm));
        match &self.mixer {
            Mixer::Attention(a) => {
                all.extend([&a.q, &a.k, &a.v, &a.o]);
                all.extend(a.q_norm.iter().chain(&a.k_norm));
                all.extend(a.biases.iter());
            }
            Mixer::GatedDelta(d) => all.extend([
                &d.qkv, &d.z, &d.beta, &d.alpha, &d.a, &d.dt, &d.conv, &d.norm, &d.out,
            ]),
        }
        all.extend(self.ffn.weights());
        all
    }
}

impl AttentionSpec {
    /// Whether it is full attention with pairs of halves and neither biases nor rotary factors: the
    /// form of drafts and of multi-token-prediction heads.
    pub fn is_basic(&self) -> bool {
        self.window.is_none()
            && self.rope_factors.is_none()
            && self.biases.iter().next().is_none()
            && self.rope.pairs == RopePairs::Halves
    }
}

impl MtpSpec {
    /// Every weight that only the head reads; `model` is the model that it belongs to.
    pub fn weights<'a>(&'a self, model: &ModelSpec) -> Vec<&'a WeightRef> {
        let mut all = vec![&self.eh_proj, &self.embedding_norm, &self.hidden_norm];
        all.extend(&self.embedding);
        all.extend(self.layer.weights());
        if self.final_norm.name != model.final_norm.name {
            all.push(&self.final_norm);
        }
        all.extend(&self.head);
        all
    }

    /// The layer's attention; `None` for a head that `model` never builds.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.layer.mixer {
            Mixer::Attention(a) => Some(a),
            Mixer::GatedDelta(_) => None,
        }
    }
}

impl ModelSpec {
    /// Every weight the model reads, each once, embedding first.
    pub fn weights(&self) -> Vec<&WeightRef> {
        let mut all = vec![&self.embedding];
        all.extend(self.layers.iter().flat_map(LayerSpec::weights));
        let factors = self
            .attention_layers()
            .filter_map(|a| a.rope_factors.as_ref());
        for factors in factors {
            if all.iter().all(|weight| weight.name != factors.name) {
                all.push(factors);
            }
        }
        all.push(&self.final_norm);
        if self.head.name != self.embedding.name {
            all.push(&self.head);
        }
        if let Some(mtp) = &self.mtp {
            all.extend(mtp.weights(self));
        }
        all
    }

    /// The layers with a KV cache, in its order: the trunk's attention layers, then that of the
    /// multi-token-prediction head.
    pub fn kv_layers(&self) -> impl Iterator<Item = &AttentionSpec> {
        let mtp = self.mtp.as_ref().and_then(MtpSpec::attention);
        self.attention_layers().chain(mtp)
    }

    /// The attention layers of the trunk, bottom to top.
    pub fn attention_layers(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Attention(a) => Some(a),
            Mixer::GatedDelta(_) => None,
        })
    }

    /// The gated-delta layers, bottom to top.
    pub fn delta_layers(&self) -> impl Iterator<Item = &GatedDeltaSpec> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::GatedDelta(d) => Some(d),
            Mixer::Attention(_) => None,
        })
    }
}
