//! Llama 2 and 3, SmolLM2 and their relatives: rotary embedding of adjacent pairs, no head norms.

use contract::{AttentionSpec, RopePairs, RopeSpec};

use super::{Common, Trunk, biases, dense_layer, full_attention, heads, refuse_experts, rope_at};
use crate::ModelError;
use crate::names::ROPE_FACTORS;
use crate::reader::{BlockReader, Reader};

/// The base of files that name none: that of Llama 2.
const DEFAULT_THETA: f64 = 10_000.0;

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
        let theta = reader.optional_float("rope.freq_base")?;
        let theta = theta.unwrap_or(DEFAULT_THETA);
        let rope = RopeSpec {
            pairs: RopePairs::Adjacent,
            ..rope_at(reader, &common, theta, (dims, head_dim))?
        };
        let factors = reader.has(ROPE_FACTORS);
        let attention = full_attention(&block, heads, common.hidden, rope)?;
        let attention = AttentionSpec {
            rope_factors: factors
                .then(|| reader.vector(ROPE_FACTORS, dims / 2))
                .transpose()?,
            biases: biases(&block, &attention)?,
            ..attention
        };
        layers.push(dense_layer(&block, attention, common.hidden, ffn[index])?);
    }
    Ok(common.trunk(layers, None))
}
