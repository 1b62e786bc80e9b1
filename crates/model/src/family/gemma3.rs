//! Gemma 3: norms before and behind each block, most layers with a sliding window, GELU gates.

use contract::{AttentionSpec, DenseSpec, FeedForward, GateActivation, LayerSpec, Mixer, RopeSpec};

use super::{
    Common, Trunk, attention_scale, dense_ffn, full_attention, head_norms, heads, rope_at,
};
use crate::ModelError;
use crate::names::{FFN_NORM, MIXER_NORM};
use crate::reader::{BlockReader, Reader};

const POST_MIXER_NORM: &str = "post_attention_norm.weight";
const POST_FFN_NORM: &str = "post_ffw_norm.weight";
/// The base of layers without a window, if the file names none.
const GLOBAL_THETA: f64 = 1_000_000.0;
/// The base of layers with a window, if the file names none.
const LOCAL_THETA: f64 = 10_000.0;
/// Every sixth layer sees everything.
const PATTERN: usize = 6;
/// The largest model, whose queries are scaled by the width of a head as the residual stream has
/// it.
const LAYERS_OF_27B: usize = 62;

pub(super) fn read(reader: &Reader<'_>) -> Result<Trunk, ModelError> {
    const SOFTCAP: &str = "final_logit_softcapping";
    let common = Common::read(reader)?;
    if let Some(cap) = reader.optional_float(SOFTCAP)? {
        let detail = format!("{cap}; capped logits are not supported");
        return Err(reader.refuse_key(SOFTCAP, detail));
    }
    let windows = windows(reader, &common)?;
    let n_heads = common.per_block(reader, "attention.head_count")?;
    let n_kv_heads = common.per_block_or(reader, "attention.head_count_kv", &n_heads)?;
    let ffn = common.per_block(reader, "feed_forward_length")?;
    let theta = reader.optional_float("rope.freq_base")?;
    let local_theta = reader.optional_float("rope.freq_base_swa")?;
    let mut layers = Vec::with_capacity(common.trunk);
    for index in 0..common.trunk {
        let block = BlockReader { reader, index };
        let counts = (n_heads[index], n_kv_heads[index]);
        let heads = heads(reader, counts, index, None)?;
        let head_dim = heads.head_dim;
        let dims = (head_dim, head_dim);
        let rope = match windows[index] {
            // The trained context is stretched where all of it is seen.
            Some(_) => RopeSpec {
                scale: 1.0,
                ..rope_at(reader, &common, local_theta.unwrap_or(LOCAL_THETA), dims)?
            },
            None => rope_at(reader, &common, theta.unwrap_or(GLOBAL_THETA), dims)?,
        };
        let width = if common.trunk == LAYERS_OF_27B {
            common.hidden / n_heads[index]
        } else {
            head_dim
        };
        let (q_norm, k_norm) = head_norms(&block, head_dim)?;
        let attention = AttentionSpec {
            window: windows[index],
            scale: attention_scale(width),
            q_norm,
            k_norm,
            ..full_attention(&block, heads, common.hidden, rope)?
        };
        layers.push(LayerSpec {
            mixer_norm: block.vector(MIXER_NORM, common.hidden)?,
            mixer: Mixer::Attention(attention),
            post_mixer_norm: Some(block.vector(POST_MIXER_NORM, common.hidden)?),
            ffn_norm: block.vector(FFN_NORM, common.hidden)?,
            ffn: FeedForward::Dense(DenseSpec {
                activation: GateActivation::GeluTanh,
                ..dense_ffn(&block, common.hidden, ffn[index])?
            }),
            post_ffn_norm: Some(block.vector(POST_FFN_NORM, common.hidden)?),
        });
    }
    let hidden = common.hidden;
    Ok(Trunk {
        embedding_scale: (hidden as f64).sqrt() as f32,
        ..common.trunk(layers, None)
    })
}

/// The window of each block, if it has one.
fn windows(reader: &Reader<'_>, common: &Common) -> Result<Vec<Option<usize>>, ModelError> {
    const WINDOW: &str = "attention.sliding_window";
    const FLAGS: &str = "attention.sliding_window_pattern";
    let blocks = common.trunk;
    let Some(window) = reader.optional(WINDOW)?.filter(|window| *window > 0) else {
        return Ok(vec![None; blocks]);
    };
    let local = |is: bool| is.then_some(window);
    if !reader.has_key(FLAGS) {
        let is_local = |i: usize| !(i + 1).is_multiple_of(PATTERN);
        return Ok((0..blocks).map(|i| local(is_local(i))).collect());
    }
    if let Ok(Some(period)) = reader.optional(FLAGS) {
        let is_local = |i: usize| period == 0 || !(i + 1).is_multiple_of(period);
        return Ok((0..blocks).map(|i| local(is_local(i))).collect());
    }
    let flags = reader.flags(FLAGS)?.unwrap_or_default();
    if flags.len() != blocks {
        let detail = format!("{} flags for {blocks} blocks", flags.len());
        return Err(reader.refuse_key(FLAGS, detail));
    }
    Ok(flags.iter().map(|is| local(*is)).collect())
}
