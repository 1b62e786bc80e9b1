//! Qwen3: full attention in every layer, rotary over the whole head, no output gate; dense, or a
//! mixture of experts.

use contract::{AttentionSpec, LayerSpec, Mixer};

use super::experts::SharedExpert;
use super::{Common, FeedForwards, Trunk, full_attention, head_norms, heads, rope};
use crate::ModelError;
use crate::names::{FFN_NORM, MIXER_NORM};
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
    let experts = (reader.architecture == "qwen3moe").then_some(SharedExpert::None);
    let ffn = FeedForwards::read(reader, &common, experts)?;
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
        layers.push(LayerSpec {
            mixer_norm: block.vector(MIXER_NORM, common.hidden)?,
            mixer: Mixer::Attention(attention),
            post_mixer_norm: None,
            ffn_norm: block.vector(FFN_NORM, common.hidden)?,
            ffn: ffn.of(&block, common.hidden)?,
            post_ffn_norm: None,
        });
    }
    Ok(common.trunk(layers, None))
}
