//! Qwen3 dense (`qwen3`): attention with q/k norm in every layer, nothing gated.

use contract::{AttentionSpec, LayerSpec, Mixer, OutputGate, RopeSpec};

use crate::error::ModelError;
use crate::family::{Family, Trunk, attention_scale, feed_forward};
use crate::source::Source;

/// The family's marker.
pub(super) struct Dense;

impl Family for Dense {
    fn layers(&self, source: &Source<'_>, trunk: &Trunk) -> Result<Vec<LayerSpec>, ModelError> {
        (0..trunk.layers)
            .map(|i| {
                let name = |part: &str| format!("blk.{i}.{part}");
                Ok(LayerSpec {
                    mixer_norm: source.vector(&name("attn_norm.weight"), trunk.hidden)?,
                    mixer: Mixer::Attention(attention(source, trunk, name)?),
                    ffn_norm: source.vector(&name("ffn_norm.weight"), trunk.hidden)?,
                    ffn: feed_forward(source, trunk, i)?,
                })
            })
            .collect()
    }
}

fn attention(
    source: &Source<'_>,
    trunk: &Trunk,
    name: impl Fn(&str) -> String,
) -> Result<AttentionSpec, ModelError> {
    let heads = trunk.heads;
    let (queries, keys) = (heads.n * heads.dim, heads.n_kv * heads.dim);
    Ok(AttentionSpec {
        n_heads: heads.n,
        n_kv_heads: heads.n_kv,
        head_dim: heads.dim,
        rope: RopeSpec {
            dims: heads.dim,
            theta: trunk.rope_theta,
        },
        scale: attention_scale(heads.dim),
        gate: OutputGate::None,
        q_norm: Some(source.vector(&name("attn_q_norm.weight"), heads.dim)?),
        k_norm: Some(source.vector(&name("attn_k_norm.weight"), heads.dim)?),
        q: source.matrix(&name("attn_q.weight"), queries, trunk.hidden)?,
        k: source.matrix(&name("attn_k.weight"), keys, trunk.hidden)?,
        v: source.matrix(&name("attn_v.weight"), keys, trunk.hidden)?,
        o: source.matrix(&name("attn_output.weight"), trunk.hidden, queries)?,
    })
}
