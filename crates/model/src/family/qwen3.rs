//! Qwen3 dense: full attention in every layer, rotary over the whole head, no output gate.

use contract::AttentionSpec;

use super::{Common, Trunk, dense_layer, full_attention, head_norms, heads, rope};
use crate::ModelError;
use crate::reader::{BlockReader, Reader};

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
        let heads = heads(reader, (n_heads[index], n_kv_heads[index]), index, None)?;
        let head_dim = heads.head_dim;
        let dims = reader.optional("rope.dimension_count")?.unwrap_or(head_dim);
        let rope = rope(reader, &common, dims, head_dim)?;
        let (q_norm, k_norm) = head_norms(&block, head_dim)?;
        let attention = AttentionSpec {
            q_norm,
            k_norm,
            ..full_attention(&block, heads, common.hidden, rope)?
        };
        layers.push(dense_layer(&block, attention, common.hidden, ffn[index])?);
    }
    Ok(common.trunk(layers, None))
}
