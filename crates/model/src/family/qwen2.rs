//! Qwen2 and Qwen2.5 dense: biases on queries, keys and values, no head norms.

use contract::AttentionSpec;

use super::{Common, Trunk, biases, dense_layer, full_attention, heads, refuse_experts, rope};
use crate::ModelError;
use crate::reader::{BlockReader, Reader};

pub(super) fn read(reader: &Reader<'_>) -> Result<Trunk, ModelError> {
    refuse_experts(reader)?;
    let common = Common::read(reader)?;
    let n_heads = common.per_block(reader, "attention.head_count")?;
    let n_kv_heads = common.per_block_or(reader, "attention.head_count_kv", &n_heads)?;
    let ffn = common.per_block(reader, "feed_forward_length")?;
    let mut layers = Vec::with_capacity(common.trunk);
    for index in 0..common.trunk {
        let block = BlockReader { reader, index };
        let counts = (n_heads[index], n_kv_heads[index]);
        let heads = heads(reader, counts, index, Some(common.hidden))?;
        let head_dim = heads.head_dim;
        let dims = reader.optional("rope.dimension_count")?.unwrap_or(head_dim);
        let rope = rope(reader, &common, dims, head_dim)?;
        let attention = full_attention(&block, heads, common.hidden, rope)?;
        let attention = AttentionSpec {
            biases: biases(&block, &attention)?,
            ..attention
        };
        layers.push(dense_layer(&block, attention, common.hidden, ffn[index])?);
    }
    Ok(common.trunk(layers, None))
}
