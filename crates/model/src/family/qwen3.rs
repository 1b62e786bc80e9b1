//! Qwen3 dense: full attention in every layer, rotary over the whole head, no output gate.

use contract::{AttentionSpec, LayerSpec, Mixer, OutputGate};

use super::{Common, Heads, Trunk, attention_scale, dense_ffn, head_norms, heads, product, rope};
use crate::ModelError;
use crate::names::{ATTN_K, ATTN_OUT, ATTN_Q, ATTN_V, MIXER_NORM};
use crate::reader::{BlockReader, Reader};

const FFN_NORM: &str = "ffn_norm.weight";

pub(super) fn read(reader: &Reader<'_>) -> Result<Trunk, ModelError> {
    let common = Common::read(reader)?;
    if common.has_mtp {
        return Err(reader.unsupported(
            "a Qwen3 model with a multi-token prediction head".to_owned(),
            "use a file without the head, or a model that was trained with one",
        ));
    }
    let n_heads = common.per_block(reader, "attention.head_count")?;
    let n_kv_heads = common.per_block(reader, "attention.head_count_kv")?;
    let ffn = common.per_block(reader, "feed_forward_length")?;
    let mut layers = Vec::with_capacity(common.trunk);
    for index in 0..common.trunk {
        let block = BlockReader { reader, index };
        let heads = heads(reader, (n_heads[index], n_kv_heads[index]), index)?;
        layers.push(LayerSpec {
            mixer_norm: block.vector(MIXER_NORM, common.hidden)?,
            mixer: Mixer::Attention(attention(&block, heads, common.hidden)?),
            ffn_norm: block.vector(FFN_NORM, common.hidden)?,
            ffn: dense_ffn(&block, common.hidden, ffn[index])?,
        });
    }
    Ok(common.trunk(layers, None))
}

fn attention(
    block: &BlockReader<'_>,
    heads: Heads,
    hidden: usize,
) -> Result<AttentionSpec, ModelError> {
    let Heads {
        n_heads,
        n_kv_heads,
        head_dim,
    } = heads;
    let reader = block.reader;
    let dims = reader.optional("rope.dimension_count")?.unwrap_or(head_dim);
    let q_rows = product(reader, &[n_heads, head_dim], "attention.head_count")?;
    let kv_rows = product(reader, &[n_kv_heads, head_dim], "attention.head_count_kv")?;
    let (q_norm, k_norm) = head_norms(block, head_dim)?;
    Ok(AttentionSpec {
        n_heads,
        n_kv_heads,
        head_dim,
        rope: rope(reader, dims, head_dim)?,
        scale: attention_scale(head_dim),
        gate: OutputGate::None,
        q_norm,
        k_norm,
        q: block.matrix(ATTN_Q, q_rows, hidden)?,
        k: block.matrix(ATTN_K, kv_rows, hidden)?,
        v: block.matrix(ATTN_V, kv_rows, hidden)?,
        o: block.matrix(ATTN_OUT, hidden, q_rows)?,
    })
}
