//! Qwen3.5 and Qwen3.6: gated-delta layers, with gated full attention at intervals; dense, or a
//! mixture of experts with a shared one.

use contract::{
    AttentionBiases, AttentionSpec, GatedDeltaSpec, HeadMap, LayerSpec, Mixer, OutputGate,
};

use super::experts::SharedExpert;
use super::{
    Common, FeedForwards, Heads, Trunk, attention_scale, head_norms, heads, mtp, product, rope,
};
use crate::ModelError;
use crate::names::{
    ATTN_K, ATTN_OUT, ATTN_Q, ATTN_QKV, ATTN_V, DELTA_A, DELTA_ALPHA, DELTA_BETA, DELTA_BETA_ALPHA,
    DELTA_CONV, DELTA_DT, DELTA_NORM, DELTA_OUT, DELTA_Z, MIXER_NORM,
};
use crate::reader::{BlockReader, Reader};

/// The norm before the feed-forward, despite its name.
const FFN_NORM: &str = "post_attention_norm.weight";
/// Interval of the attention layers, if the file has none.
const DEFAULT_INTERVAL: usize = 4;
/// Maximum convolution taps; real models have 4.
const MAX_TAPS: usize = 16;

pub(super) fn read(reader: &Reader<'_>) -> Result<Trunk, ModelError> {
    let common = Common::read(reader)?;
    let recurrent = recurrent_blocks(reader, &common)?;
    let n_heads = common.per_block(reader, "attention.head_count")?;
    let n_kv_heads = common.per_block(reader, "attention.head_count_kv")?;
    let experts = (reader.architecture == "qwen35moe").then_some(SharedExpert::Gated);
    let ffn = FeedForwards::read(reader, &common, experts)?;
    let layer = |index: usize, recurrent: bool| {
        let block = BlockReader { reader, index };
        let mixer = if recurrent {
            Mixer::GatedDelta(gated_delta(&block, common.hidden)?)
        } else {
            let heads = heads(reader, (n_heads[index], n_kv_heads[index]), index, None)?;
            Mixer::Attention(attention(&block, heads, &common)?)
        };
        Ok::<LayerSpec, ModelError>(LayerSpec {
            mixer_norm: block.vector(MIXER_NORM, common.hidden)?,
            mixer,
            post_mixer_norm: None,
            ffn_norm: block.vector(FFN_NORM, common.hidden)?,
            ffn: ffn.of(&block, common.hidden)?,
            post_ffn_norm: None,
        })
    };
    let mut layers = Vec::with_capacity(common.trunk);
    for (index, recurrent) in recurrent.into_iter().enumerate() {
        layers.push(layer(index, recurrent)?);
    }
    let head = if common.has_mtp {
        let index = common.trunk;
        let block = BlockReader { reader, index };
        // Full attention, whatever the interval says of its index.
        Some(mtp::read(&block, layer(index, false)?, common.hidden)?)
    } else {
        None
    };
    Ok(common.trunk(layers, head))
}

/// Whether each trunk block is a gated-delta block: from the file's list, or else from the
/// interval.
fn recurrent_blocks(reader: &Reader<'_>, common: &Common) -> Result<Vec<bool>, ModelError> {
    const LIST: &str = "attention.recurrent_layers";
    const INTERVAL: &str = "full_attention_interval";
    if let Some(listed) = reader.flags(LIST)? {
        if listed.len() != common.blocks {
            let detail = format!("{} flags for {} blocks", listed.len(), common.blocks);
            return Err(reader.refuse_key(LIST, detail));
        }
        return Ok(listed[..common.trunk].to_vec());
    }
    let interval = reader.optional(INTERVAL)?.unwrap_or(DEFAULT_INTERVAL);
    if interval == 0 {
        return Err(reader.refuse_key(INTERVAL, "0 where at least 1 is expected".to_owned()));
    }
    Ok((0..common.trunk)
        .map(|i| !(i + 1).is_multiple_of(interval))
        .collect())
}

fn attention(
    block: &BlockReader<'_>,
    heads: Heads,
    common: &Common,
) -> Result<AttentionSpec, ModelError> {
    let hidden = common.hidden;
    let Heads {
        n_heads,
        n_kv_heads,
        head_dim,
    } = heads;
    let reader = block.reader;
    if block.has(ATTN_QKV) {
        return Err(block.refuse(
            ATTN_QKV,
            "q, k and v fused in a full-attention block are not supported; \
             convert again without fusing them",
        ));
    }
    let dims = reader.count("rope.dimension_count")?;
    let o_cols = product(reader, &[n_heads, head_dim], "attention.head_count")?;
    let q_rows = product(reader, &[2, o_cols], "attention.head_count")?;
    let kv_rows = product(reader, &[n_kv_heads, head_dim], "attention.head_count_kv")?;
    let (q_norm, k_norm) = head_norms(block, head_dim)?;
    Ok(AttentionSpec {
        n_heads,
        n_kv_heads,
        head_dim,
        rope: rope(reader, common, dims, head_dim)?,
        rope_factors: None,
        window: None,
        scale: attention_scale(head_dim),
        gate: OutputGate::SigmoidPerHead,
        q_norm,
        k_norm,
        q: block.matrix(ATTN_Q, q_rows, hidden)?,
        k: block.matrix(ATTN_K, kv_rows, hidden)?,
        v: block.matrix(ATTN_V, kv_rows, hidden)?,
        o: block.matrix(ATTN_OUT, hidden, o_cols)?,
        biases: AttentionBiases::default(),
    })
}

fn gated_delta(block: &BlockReader<'_>, hidden: usize) -> Result<GatedDeltaSpec, ModelError> {
    const INNER: &str = "ssm.inner_size";
    const TAPS: &str = "ssm.conv_kernel";
    let reader = block.reader;
    if block.has(DELTA_BETA_ALPHA) {
        return Err(block.refuse(
            DELTA_BETA_ALPHA,
            "beta and alpha fused, as in Qwen3-Next, are not supported",
        ));
    }
    let conv_taps = reader.count(TAPS)?;
    if !(2..=MAX_TAPS).contains(&conv_taps) {
        return Err(reader.refuse_key(TAPS, format!("{conv_taps}, 2 to {MAX_TAPS} are expected")));
    }
    let state = reader.count("ssm.state_size")?;
    let n_k_heads = reader.count("ssm.group_count")?;
    let n_v_heads = reader.count("ssm.time_step_rank")?;
    let v_rows = reader.count(INNER)?;
    if !n_v_heads.is_multiple_of(n_k_heads) {
        let detail =
            format!("{n_v_heads} value heads for {n_k_heads} key heads; a multiple is expected");
        return Err(reader.refuse_key("ssm.time_step_rank", detail));
    }
    if product(reader, &[n_v_heads, state], INNER)? != v_rows {
        let detail = format!("{v_rows}, but time_step_rank x state_size is {n_v_heads} x {state}");
        return Err(reader.refuse_key(INNER, detail));
    }
    let qk_rows = product(reader, &[2, n_k_heads, state], "ssm.group_count")?;
    let channels = qk_rows
        .checked_add(v_rows)
        .ok_or_else(|| reader.refuse_key(INNER, format!("{qk_rows} + {v_rows} overflows")))?;
    Ok(GatedDeltaSpec {
        n_k_heads,
        n_v_heads,
        k_dim: state,
        v_dim: state,
        conv_taps,
        head_map: HeadMap::Tiled,
        qkv: block.matrix(ATTN_QKV, channels, hidden)?,
        z: block.matrix(DELTA_Z, v_rows, hidden)?,
        beta: block.matrix(DELTA_BETA, n_v_heads, hidden)?,
        alpha: block.matrix(DELTA_ALPHA, n_v_heads, hidden)?,
        a: block.vector(DELTA_A, n_v_heads)?,
        dt: block.vector(DELTA_DT, n_v_heads)?,
        conv: block.plain(DELTA_CONV, channels, conv_taps)?,
        norm: block.vector(DELTA_NORM, state)?,
        out: block.matrix(DELTA_OUT, hidden, v_rows)?,
    })
}
