//! The shape of a synthetic model as a list of tensors.

use crate::names::ROPE_FACTORS;

/// The sizes that determine every tensor's shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SynthShape {
    /// The command-line name.
    pub name: &'static str,
    /// The kind of token mixers.
    pub kind: SynthKind,
    pub layers: u64,
    pub hidden: u64,
    pub ffn: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub vocab: u64,
    pub context: u32,
    /// Base of the rotations.
    pub theta: f32,
    pub tied: bool,
    /// The multi-token-prediction head.
    pub mtp: SynthMtp,
    /// The experts of every layer in place of the `ffn` channels.
    pub experts: Option<SynthExperts>,
    /// Tokens choose experts alike: layers add so little that a router sees the token's random
    /// embedding. Without it, the layers' sums grow alike for all tokens, and so do the choices.
    pub uniform_routing: bool,
}

/// The suffix of a shape's name for [`uniform_routing`](SynthShape::uniform_routing).
pub(super) const UNIFORM: &str = "+uniform";

/// The mixture of experts of a synthetic model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SynthExperts {
    pub count: u64,
    pub used: u64,
    /// Channels of an expert.
    pub width: u64,
    /// Channels of the shared expert, which hybrid shapes have.
    pub shared_width: u64,
}

/// The multi-token-prediction head of a synthetic model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SynthMtp {
    None,
    /// With the model's embedding and LM head.
    Shared,
    /// With an embedding and an LM head of its own.
    Own,
}

impl SynthMtp {
    /// The suffix of a shape's name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            SynthMtp::None => "",
            SynthMtp::Shared => "+mtp",
            SynthMtp::Own => "+mtp-own",
        }
    }
}

/// The families of synthetic models.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum SynthKind {
    /// Three gated-delta layers, then one of gated attention.
    Hybrid {
        /// Key heads and value heads of the delta layers; both have dimension 128.
        k_heads: u64,
        v_heads: u64,
    },
    /// Attention in every layer.
    Dense(SynthDense),
}

/// What a dense family has beside matrices and norms before blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SynthDense {
    /// Norms of query and key heads.
    Qwen3,
    /// Biases of queries, keys and values.
    Qwen2,
    /// Neither.
    Llama {
        /// Whether a tensor stretches the rotations, as in Llama 3.1 and later.
        rope_factors: bool,
    },
    /// Norms of heads and behind blocks; five layers of six see the last tokens only.
    Gemma3 { window: u32 },
}

impl SynthDense {
    /// Whether query and key heads have norms.
    fn norms_heads(self) -> bool {
        matches!(self, SynthDense::Qwen3 | SynthDense::Gemma3 { .. })
    }
}

/// Every fourth layer has attention.
pub(super) const INTERVAL: u64 = 4;
pub(super) const DELTA_DIM: u64 = 128;
pub(super) const CONV_TAPS: u64 = 4;
pub(super) const HYBRID_ROPE_DIMS: u32 = 64;

/// Distribution of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fill {
    /// A matrix of zero mean and a standard deviation of `1 / sqrt(columns)`.
    Matrix,
    /// Around one, as norm weights are.
    Norm,
    /// Weights of a norm that leaves little of its input.
    FaintNorm,
    /// Around zero, small: a row of a matrix that is stored as a vector.
    Vector,
    /// Negative, `-exp(A_log)` of a trained model's range.
    Decay,
    /// The bias inside the softplus.
    DecayBias,
    /// Convolution taps.
    Taps,
}

/// One tensor to be written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Planned {
    pub name: String,
    /// Fastest first.
    pub dims: Vec<u64>,
    pub fill: Fill,
}

impl SynthShape {
    /// The model's display name.
    pub(super) fn title(&self) -> String {
        let routing = if self.uniform_routing { UNIFORM } else { "" };
        format!(
            "{}{}{routing} (random weights)",
            self.name,
            self.mtp.suffix()
        )
    }

    /// Blocks of the file: the layers and the multi-token-prediction head.
    pub(super) fn blocks(&self) -> u64 {
        self.layers + u64::from(self.mtp != SynthMtp::None)
    }

    /// Whether layer `i` attends.
    pub(super) fn attends(&self, i: u64) -> bool {
        match self.kind {
            SynthKind::Dense(_) => true,
            // The head behind the layers attends too.
            SynthKind::Hybrid { .. } => (i + 1).is_multiple_of(INTERVAL) || i >= self.layers,
        }
    }

    /// Every tensor of the file, in file order.
    pub(super) fn tensors(&self) -> Vec<Planned> {
        let mut all = List(Vec::new());
        all.push(
            "token_embd.weight",
            &[self.hidden, self.vocab],
            Fill::Matrix,
        );
        all.push("output_norm.weight", &[self.hidden], Fill::Norm);
        if !self.tied {
            all.push("output.weight", &[self.hidden, self.vocab], Fill::Matrix);
        }
        if self.kind == SynthKind::Dense(SynthDense::Llama { rope_factors: true }) {
            all.push(ROPE_FACTORS, &[self.head_dim / 2], Fill::Norm);
        }
        for i in 0..self.blocks() {
            self.layer(i, &mut all);
        }
        if self.mtp != SynthMtp::None {
            self.mtp_head(&mut all);
        }
        all.0
    }

    /// Tensors of the multi-token-prediction head beside its layer.
    fn mtp_head(&self, all: &mut List) {
        let (i, hidden) = (self.layers, self.hidden);
        let mut put =
            |part: &str, dims: &[u64], fill| all.push(&format!("blk.{i}.nextn.{part}"), dims, fill);
        put("eh_proj.weight", &[2 * hidden, hidden], Fill::Matrix);
        put("enorm.weight", &[hidden], Fill::Norm);
        put("hnorm.weight", &[hidden], Fill::Norm);
        put("shared_head_norm.weight", &[hidden], Fill::Norm);
        if self.mtp == SynthMtp::Own {
            put("embed_tokens.weight", &[hidden, self.vocab], Fill::Matrix);
            put(
                "shared_head_head.weight",
                &[hidden, self.vocab],
                Fill::Matrix,
            );
        }
    }

    fn layer(&self, i: u64, all: &mut List) {
        let (hidden, ffn) = (self.hidden, self.ffn);
        let hybrid = matches!(self.kind, SynthKind::Hybrid { .. });
        let mut put =
            |part: &str, dims: &[u64], fill| all.push(&format!("blk.{i}.{part}"), dims, fill);
        let norm = if self.uniform_routing {
            Fill::FaintNorm
        } else {
            Fill::Norm
        };
        put("attn_norm.weight", &[hidden], norm);
        let before_ffn = if hybrid {
            "post_attention_norm.weight"
        } else {
            "ffn_norm.weight"
        };
        put(before_ffn, &[hidden], norm);
        match self.kind {
            SynthKind::Hybrid { k_heads, v_heads } if !self.attends(i) => {
                let values = v_heads * DELTA_DIM;
                let channels = 2 * k_heads * DELTA_DIM + values;
                put("attn_qkv.weight", &[hidden, channels], Fill::Matrix);
                put("attn_gate.weight", &[hidden, values], Fill::Matrix);
                put("ssm_beta.weight", &[hidden, v_heads], Fill::Matrix);
                put("ssm_alpha.weight", &[hidden, v_heads], Fill::Matrix);
                put("ssm_a", &[v_heads], Fill::Decay);
                put("ssm_dt.bias", &[v_heads], Fill::DecayBias);
                put("ssm_conv1d.weight", &[CONV_TAPS, channels], Fill::Taps);
                put("ssm_norm.weight", &[DELTA_DIM], norm);
                put("ssm_out.weight", &[values, hidden], Fill::Matrix);
            }
            _ => {
                let queries = self.heads * self.head_dim;
                let keys = self.kv_heads * self.head_dim;
                let gate = if hybrid { 2 } else { 1 };
                put("attn_q.weight", &[hidden, gate * queries], Fill::Matrix);
                put("attn_k.weight", &[hidden, keys], Fill::Matrix);
                put("attn_v.weight", &[hidden, keys], Fill::Matrix);
                put("attn_output.weight", &[queries, hidden], Fill::Matrix);
                let has_head_norms = match self.kind {
                    SynthKind::Hybrid { .. } => true,
                    SynthKind::Dense(family) => family.norms_heads(),
                };
                if has_head_norms {
                    put("attn_q_norm.weight", &[self.head_dim], Fill::Norm);
                    put("attn_k_norm.weight", &[self.head_dim], Fill::Norm);
                }
                if self.kind == SynthKind::Dense(SynthDense::Qwen2) {
                    put("attn_q.bias", &[queries], Fill::Vector);
                    put("attn_k.bias", &[keys], Fill::Vector);
                    put("attn_v.bias", &[keys], Fill::Vector);
                }
            }
        }
        if let SynthKind::Dense(SynthDense::Gemma3 { .. }) = self.kind {
            put("post_attention_norm.weight", &[hidden], norm);
            put("post_ffw_norm.weight", &[hidden], norm);
        }
        let Some(experts) = self.experts else {
            put("ffn_gate.weight", &[hidden, ffn], Fill::Matrix);
            put("ffn_up.weight", &[hidden, ffn], Fill::Matrix);
            put("ffn_down.weight", &[ffn, hidden], Fill::Matrix);
            return;
        };
        let SynthExperts { count, width, .. } = experts;
        put("ffn_gate_inp.weight", &[hidden, count], Fill::Matrix);
        put(
            "ffn_gate_exps.weight",
            &[hidden, width, count],
            Fill::Matrix,
        );
        put("ffn_up_exps.weight", &[hidden, width, count], Fill::Matrix);
        put(
            "ffn_down_exps.weight",
            &[width, hidden, count],
            Fill::Matrix,
        );
        if hybrid {
            let width = experts.shared_width;
            put("ffn_gate_inp_shexp.weight", &[hidden], Fill::Vector);
            put("ffn_gate_shexp.weight", &[hidden, width], Fill::Matrix);
            put("ffn_up_shexp.weight", &[hidden, width], Fill::Matrix);
            put("ffn_down_shexp.weight", &[width, hidden], Fill::Matrix);
        }
    }
}

struct List(Vec<Planned>);

impl List {
    fn push(&mut self, name: &str, dims: &[u64], fill: Fill) {
        self.0.push(Planned {
            name: name.to_owned(),
            dims: dims.to_vec(),
            fill,
        });
    }
}
