//! One module per family, from keys and tensors to the layers of a spec.

mod experts;
mod gemma3;
mod llama;
mod mtp;
mod qwen2;
mod qwen3;
mod qwen35;

use contract::{
    AttentionBiases, AttentionSpec, DenseSpec, FeedForward, GateActivation, LayerSpec, Mixer,
    MtpSpec, OutputGate, RopeSpec, WeightRef,
};

use crate::ModelError;
use crate::names::{
    ATTN_K, ATTN_K_BIAS, ATTN_OUT, ATTN_OUT_BIAS, ATTN_Q, ATTN_Q_BIAS, ATTN_V, ATTN_V_BIAS,
    FFN_DOWN, FFN_GATE, FFN_NORM, FFN_UP, MIXER_NORM,
};
use crate::reader::{BlockReader, Reader};
use experts::{ExpertKeys, SharedExpert};

/// The part of a model that a family's module reads.
pub(crate) struct Trunk {
    pub(crate) hidden: usize,
    pub(crate) trained_context: usize,
    pub(crate) norm_eps: f32,
    /// Factor on embedding rows.
    pub(crate) embedding_scale: f32,
    pub(crate) layers: Vec<LayerSpec>,
    /// The multi-token-prediction head, if the file has one.
    pub(crate) mtp: Option<MtpSpec>,
}

/// Reads the trunk as the family that the file names.
pub(crate) fn read(reader: &Reader<'_>) -> Result<Trunk, ModelError> {
    let instead = match reader.architecture {
        "qwen35" | "qwen35moe" => return qwen35::read(reader),
        "qwen3" | "qwen3moe" => return qwen3::read(reader),
        "qwen2" => return qwen2::read(reader),
        "llama" => return llama::read(reader),
        "gemma3" => return gemma3::read(reader),
        "qwen3next" => "use a model of Qwen3.5 or Qwen3.6",
        "dflash" | "dflash-draft" | "qwen35-dflash-draft" => {
            "this file is a draft, give the model it drafts for"
        }
        "clip" | "mmproj" => "this file holds a vision part, give the language model's file",
        _ => "use a model of Qwen3 to Qwen3.6, Qwen2, Llama 2 and 3, SmolLM2 or Gemma 3",
    };
    let what = format!("architecture {}", reader.architecture.escape_debug());
    Err(reader.unsupported(what, instead))
}

/// Maximum context; real models are far below.
const MAX_CONTEXT: usize = 1 << 30;
/// Heads are whole blocks of the KV cache types.
const HEAD_STEP: usize = 32;
/// Maximum head dimension; real models have 256.
const MAX_HEAD: usize = 1024;

/// The keys of every family, and the number of trunk blocks.
struct Common {
    hidden: usize,
    trained_context: usize,
    norm_eps: f32,
    /// Factor on positions in rotary embeddings.
    rope_scale: f64,
    /// Blocks by the file's count: the length of per-block keys. Some files do not count the
    /// multi-token-prediction head.
    blocks: usize,
    /// Blocks of the trunk. The head, if any, is the block behind them.
    trunk: usize,
    /// Whether there is a multi-token-prediction head.
    has_mtp: bool,
}

impl Common {
    fn read(reader: &Reader<'_>) -> Result<Common, ModelError> {
        let blocks = reader.count("block_count")?;
        if blocks > reader.file.tensors().len() {
            let detail = format!(
                "{blocks} blocks, but only {} tensors",
                reader.file.tensors().len()
            );
            return Err(reader.refuse_key("block_count", detail));
        }
        let mtp = mtp::block(reader, blocks)?;
        let trained_context = reader.count("context_length")?;
        if trained_context > MAX_CONTEXT {
            let detail = format!("{trained_context} tokens, the limit is {MAX_CONTEXT}");
            return Err(reader.refuse_key("context_length", detail));
        }
        Ok(Common {
            hidden: reader.count("embedding_length")?,
            trained_context,
            norm_eps: reader.float("attention.layer_norm_rms_epsilon")? as f32,
            rope_scale: rope_scale(reader)?,
            blocks,
            trunk: mtp.unwrap_or(blocks),
            has_mtp: mtp.is_some(),
        })
    }

    /// One number per block of a key, as [`Reader::per_block`]; the head's number is the last if
    /// the file has none for it.
    fn per_block(&self, reader: &Reader<'_>, suffix: &str) -> Result<Vec<usize>, ModelError> {
        let mut all = reader.per_block(suffix, self.blocks)?;
        if self.has_mtp && all.len() == self.trunk {
            // Blocks without attention have a count of 0.
            let last = all.iter().rev().find(|n| **n > 0).copied();
            all.push(last.unwrap_or(0));
        }
        Ok(all)
    }

    /// [`Common::per_block`], or `default` without the key.
    fn per_block_or(
        &self,
        reader: &Reader<'_>,
        suffix: &str,
        default: &[usize],
    ) -> Result<Vec<usize>, ModelError> {
        if reader.has_key(suffix) {
            self.per_block(reader, suffix)
        } else {
            Ok(default.to_vec())
        }
    }

    fn trunk(self, layers: Vec<LayerSpec>, mtp: Option<MtpSpec>) -> Trunk {
        Trunk {
            hidden: self.hidden,
            trained_context: self.trained_context,
            norm_eps: self.norm_eps,
            embedding_scale: 1.0,
            layers,
            mtp,
        }
    }
}

/// Head counts and sizes of one attention block.
struct Heads {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
}

/// The factor on positions of a linear scaling; other kinds are refused.
fn rope_scale(reader: &Reader<'_>) -> Result<f64, ModelError> {
    const TYPE: &str = "rope.scaling.type";
    match reader.text(TYPE)? {
        None | Some("none") => Ok(1.0),
        Some("linear") => Ok(1.0 / reader.float("rope.scaling.factor")?),
        Some(other) => {
            let other = other.escape_debug();
            let detail = format!("{other} is not supported, only none and linear");
            Err(reader.refuse_key(TYPE, detail))
        }
    }
}

/// The feed-forwards of a family that has dense models and mixtures of experts.
enum FeedForwards {
    /// The channels by block.
    Dense(Vec<usize>),
    Experts(ExpertKeys),
}

impl FeedForwards {
    /// Reads the keys of a family that has experts where `shared` is given.
    fn read(
        reader: &Reader<'_>,
        common: &Common,
        shared: Option<SharedExpert>,
    ) -> Result<FeedForwards, ModelError> {
        match shared {
            Some(shared) => {
                let keys = ExpertKeys::read(reader, common, shared)?;
                Ok(FeedForwards::Experts(keys))
            }
            None => {
                refuse_experts(reader)?;
                let ffn = common.per_block(reader, "feed_forward_length")?;
                Ok(FeedForwards::Dense(ffn))
            }
        }
    }

    fn of(&self, block: &BlockReader<'_>, hidden: usize) -> Result<FeedForward, ModelError> {
        match self {
            FeedForwards::Dense(ffn) => {
                let dense = dense_ffn(block, hidden, ffn[block.index])?;
                Ok(FeedForward::Dense(dense))
            }
            FeedForwards::Experts(keys) => keys.feed_forward(block, hidden),
        }
    }
}

/// Refuses what only mixtures of experts have.
fn refuse_experts(reader: &Reader<'_>) -> Result<(), ModelError> {
    match reader.optional("expert_count")? {
        None | Some(0) => Ok(()),
        Some(n) => Err(reader.unsupported(
            format!("a mixture of {n} experts"),
            "use a dense model of the same family",
        )),
    }
}

/// Checks head counts of block `i` against each other. A file of an older family need not say the
/// head's dimension: `hidden` is shared among the query heads then.
fn heads(
    reader: &Reader<'_>,
    (n_heads, n_kv_heads): (usize, usize),
    block: usize,
    hidden: Option<usize>,
) -> Result<Heads, ModelError> {
    if n_heads == 0 || n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
        let detail = format!(
            "block {block} has {n_heads} query heads and {n_kv_heads} key heads; \
             a multiple is expected"
        );
        return Err(reader.refuse_key("attention.head_count", detail));
    }
    let stored = reader.optional("attention.key_length")?;
    let head_dim = match (stored, hidden) {
        (None, Some(hidden)) => hidden / n_heads,
        _ => reader.count("attention.key_length")?,
    };
    check_head_dim(head_dim).map_err(|detail| reader.refuse_key("attention.key_length", detail))?;
    let value_dim = match (reader.optional("attention.value_length")?, hidden) {
        (None, Some(_)) => head_dim,
        _ => reader.count("attention.value_length")?,
    };
    if head_dim != value_dim {
        let detail = format!("{value_dim}, but attention.key_length is {head_dim}");
        return Err(reader.refuse_key("attention.value_length", detail));
    }
    Ok(Heads {
        n_heads,
        n_kv_heads,
        head_dim,
    })
}

/// Pairs of halves at the base that the file has to name.
fn rope(
    reader: &Reader<'_>,
    common: &Common,
    dims: usize,
    head_dim: usize,
) -> Result<RopeSpec, ModelError> {
    rope_at(
        reader,
        common,
        reader.float("rope.freq_base")?,
        (dims, head_dim),
    )
}

/// Pairs of halves at the base `theta`.
fn rope_at(
    reader: &Reader<'_>,
    common: &Common,
    theta: f64,
    (dims, head_dim): (usize, usize),
) -> Result<RopeSpec, ModelError> {
    if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
        let detail = format!("{dims}; an even number up to the head size {head_dim} is expected");
        return Err(reader.refuse_key("rope.dimension_count", detail));
    }
    Ok(RopeSpec {
        scale: common.rope_scale,
        ..RopeSpec::new(dims, theta)
    })
}

/// Full attention over unmodified projections, which families extend.
fn full_attention(
    block: &BlockReader<'_>,
    heads: Heads,
    hidden: usize,
    rope: RopeSpec,
) -> Result<AttentionSpec, ModelError> {
    let Heads {
        n_heads,
        n_kv_heads,
        head_dim,
    } = heads;
    let reader = block.reader;
    let q_rows = product(reader, &[n_heads, head_dim], "attention.head_count")?;
    let kv_rows = product(reader, &[n_kv_heads, head_dim], "attention.head_count_kv")?;
    Ok(AttentionSpec {
        n_heads,
        n_kv_heads,
        head_dim,
        rope,
        rope_factors: None,
        window: None,
        scale: attention_scale(head_dim),
        gate: OutputGate::None,
        q_norm: None,
        k_norm: None,
        q: block.matrix(ATTN_Q, q_rows, hidden)?,
        k: block.matrix(ATTN_K, kv_rows, hidden)?,
        v: block.matrix(ATTN_V, kv_rows, hidden)?,
        o: block.matrix(ATTN_OUT, hidden, q_rows)?,
        biases: AttentionBiases::default(),
    })
}

/// The biases that a block has.
fn biases(
    block: &BlockReader<'_>,
    attention: &AttentionSpec,
) -> Result<AttentionBiases, ModelError> {
    let of = |name: &str, weight: &WeightRef| block.optional_vector(name, weight.rows);
    Ok(AttentionBiases {
        q: of(ATTN_Q_BIAS, &attention.q)?,
        k: of(ATTN_K_BIAS, &attention.k)?,
        v: of(ATTN_V_BIAS, &attention.v)?,
        o: of(ATTN_OUT_BIAS, &attention.o)?,
    })
}

/// A product of factors as a row count; refuses an overflow with the key.
fn product(reader: &Reader<'_>, factors: &[usize], key: &str) -> Result<usize, ModelError> {
    factors
        .iter()
        .try_fold(1usize, |product, &f| product.checked_mul(f))
        .ok_or_else(|| reader.refuse_key(key, format!("the product of {factors:?} overflows")))
}

/// A layer with one norm before each block and a dense feed-forward of `ffn` channels.
fn dense_layer(
    block: &BlockReader<'_>,
    attention: AttentionSpec,
    hidden: usize,
    ffn: usize,
) -> Result<LayerSpec, ModelError> {
    Ok(LayerSpec {
        mixer_norm: block.vector(MIXER_NORM, hidden)?,
        mixer: Mixer::Attention(attention),
        post_mixer_norm: None,
        ffn_norm: block.vector(FFN_NORM, hidden)?,
        ffn: FeedForward::Dense(dense_ffn(block, hidden, ffn)?),
        post_ffn_norm: None,
    })
}

fn dense_ffn(block: &BlockReader<'_>, hidden: usize, ffn: usize) -> Result<DenseSpec, ModelError> {
    Ok(DenseSpec {
        activation: GateActivation::Silu,
        gate: block.matrix(FFN_GATE, ffn, hidden)?,
        up: block.matrix(FFN_UP, ffn, hidden)?,
        down: block.matrix(FFN_DOWN, hidden, ffn)?,
    })
}

/// Refuses a head dimension that is not whole blocks or exceeds any real model.
pub(crate) fn check_head_dim(head_dim: usize) -> Result<(), String> {
    if head_dim == 0 || !head_dim.is_multiple_of(HEAD_STEP) || head_dim > MAX_HEAD {
        return Err(format!(
            "{head_dim}; a multiple of {HEAD_STEP} up to {MAX_HEAD} is expected"
        ));
    }
    Ok(())
}

/// The scale of `q · k`: one over the square root of the head dimension.
pub(crate) fn attention_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

/// The head norms of every supported family.
fn head_norms(
    block: &BlockReader<'_>,
    head_dim: usize,
) -> Result<(Option<WeightRef>, Option<WeightRef>), ModelError> {
    let q = block.vector(crate::names::ATTN_Q_NORM, head_dim)?;
    let k = block.vector(crate::names::ATTN_K_NORM, head_dim)?;
    Ok((Some(q), Some(k)))
}
