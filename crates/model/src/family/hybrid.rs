//! Qwen3.5 and Qwen3.6 dense (`qwen35`): gated-delta layers with gated attention between them.
//!
//! Names, shapes and what conversion did to the values are section 2 of the format notes: norm weights
//! already contain the `1 +`, `ssm_a` is already `-exp(A_log)`, and value heads are tiled over key heads.

use contract::{AttentionSpec, GatedDeltaSpec, HeadMap, LayerSpec, Mixer, OutputGate, RopeSpec};

use crate::error::ModelError;
use crate::family::{Family, Trunk, attention_scale, feed_forward};
use crate::source::Source;

/// The family's marker.
pub(super) struct Hybrid;

/// Attention layers stand at every fourth place when a file does not say.
const DEFAULT_INTERVAL: usize = 4;

impl Family for Hybrid {
    fn layers(&self, source: &Source<'_>, trunk: &Trunk) -> Result<Vec<LayerSpec>, ModelError> {
        let recurrent = recurrent_layers(source, trunk)?;
        let delta = recurrent
            .contains(&true)
            .then(|| DeltaSizes::read(source))
            .transpose()?;
        (0..trunk.layers)
            .map(|i| {
                let mixer = match delta.filter(|_| recurrent[i]) {
                    Some(sizes) => Mixer::GatedDelta(gated_delta(source, trunk, i, sizes)?),
                    None => Mixer::Attention(attention(source, trunk, i)?),
                };
                Ok(LayerSpec {
                    mixer_norm: source.vector(&block(i, "attn_norm.weight"), trunk.hidden)?,
                    mixer,
                    ffn_norm: source
                        .vector(&block(i, "post_attention_norm.weight"), trunk.hidden)?,
                    ffn: feed_forward(source, trunk, i)?,
                })
            })
            .collect()
    }
}

fn block(i: usize, part: &str) -> String {
    format!("blk.{i}.{part}")
}

/// Which trunk layers are recurrent: the file's own list, else all but every `interval`-th.
fn recurrent_layers(source: &Source<'_>, trunk: &Trunk) -> Result<Vec<bool>, ModelError> {
    const LIST: &str = "attention.recurrent_layers";
    if let Some(list) = source.bools(LIST)? {
        if list.len() < trunk.layers {
            let (have, want) = (list.len(), trunk.layers);
            return Err(source.key(
                LIST,
                format!("has {have} entries, the model has {want} layers"),
            ));
        }
        return Ok(list[..trunk.layers].to_vec());
    }
    const INTERVAL: &str = "full_attention_interval";
    let interval = source.optional_usize(INTERVAL)?.unwrap_or(DEFAULT_INTERVAL);
    if interval == 0 {
        return Err(source.key(INTERVAL, "is 0, expected at least 1".to_owned()));
    }
    Ok((0..trunk.layers)
        .map(|i| !(i + 1).is_multiple_of(interval))
        .collect())
}

fn attention(source: &Source<'_>, trunk: &Trunk, i: usize) -> Result<AttentionSpec, ModelError> {
    if source.has(&block(i, "attn_qkv.weight")) {
        return Err(source.unsupported(
            format!(
                "the fused projection {} of an attention layer",
                block(i, "attn_qkv.weight")
            ),
            "convert the model again without fusing q, k and v",
        ));
    }
    let heads = trunk.heads;
    let (queries, keys) = (heads.n * heads.dim, heads.n_kv * heads.dim);
    let rope_dims = source
        .optional_usize("rope.dimension_count")?
        .unwrap_or(heads.dim);
    if rope_dims == 0 || rope_dims > heads.dim || !rope_dims.is_multiple_of(2) {
        let dim = heads.dim;
        return Err(source.key(
            "rope.dimension_count",
            format!("is {rope_dims}, expected an even number up to the head's {dim}"),
        ));
    }
    Ok(AttentionSpec {
        n_heads: heads.n,
        n_kv_heads: heads.n_kv,
        head_dim: heads.dim,
        rope: RopeSpec {
            dims: rope_dims,
            theta: trunk.rope_theta,
        },
        scale: attention_scale(heads.dim),
        gate: OutputGate::SigmoidPerHead,
        q_norm: Some(source.vector(&block(i, "attn_q_norm.weight"), heads.dim)?),
        k_norm: Some(source.vector(&block(i, "attn_k_norm.weight"), heads.dim)?),
        q: source.matrix(&block(i, "attn_q.weight"), 2 * queries, trunk.hidden)?,
        k: source.matrix(&block(i, "attn_k.weight"), keys, trunk.hidden)?,
        v: source.matrix(&block(i, "attn_v.weight"), keys, trunk.hidden)?,
        o: source.matrix(&block(i, "attn_output.weight"), trunk.hidden, queries)?,
    })
}

/// Sizes all delta layers of a file share.
#[derive(Debug, Clone, Copy)]
struct DeltaSizes {
    taps: usize,
    dim: usize,
    k_heads: usize,
    v_heads: usize,
}

impl DeltaSizes {
    fn read(source: &Source<'_>) -> Result<DeltaSizes, ModelError> {
        let sizes = DeltaSizes {
            taps: source.count("ssm.conv_kernel")?,
            dim: source.count("ssm.state_size")?,
            k_heads: source.count("ssm.group_count")?,
            v_heads: source.count("ssm.time_step_rank")?,
        };
        let DeltaSizes {
            taps,
            dim,
            k_heads,
            v_heads,
        } = sizes;
        if taps < 2 {
            return Err(source.key("ssm.conv_kernel", format!("is {taps}, expected at least 2")));
        }
        if !v_heads.is_multiple_of(k_heads) {
            return Err(source.key(
                "ssm.time_step_rank",
                format!("is {v_heads}, expected a multiple of ssm.group_count {k_heads}"),
            ));
        }
        let inner = source.count("ssm.inner_size")?;
        if v_heads.checked_mul(dim) != Some(inner) {
            return Err(source.key(
                "ssm.inner_size",
                format!("is {inner}, expected {v_heads} heads of {dim} values"),
            ));
        }
        Ok(sizes)
    }
}

fn gated_delta(
    source: &Source<'_>,
    trunk: &Trunk,
    i: usize,
    sizes: DeltaSizes,
) -> Result<GatedDeltaSpec, ModelError> {
    let DeltaSizes {
        taps,
        dim,
        k_heads,
        v_heads,
    } = sizes;
    let hidden = trunk.hidden;
    let values = v_heads * dim;
    let channels = 2 * k_heads * dim + values;
    Ok(GatedDeltaSpec {
        n_k_heads: k_heads,
        n_v_heads: v_heads,
        k_dim: dim,
        v_dim: dim,
        conv_taps: taps,
        head_map: HeadMap::Tiled,
        qkv: source.matrix(&block(i, "attn_qkv.weight"), channels, hidden)?,
        z: source.matrix(&block(i, "attn_gate.weight"), values, hidden)?,
        beta: source.matrix(&block(i, "ssm_beta.weight"), v_heads, hidden)?,
        alpha: source.matrix(&block(i, "ssm_alpha.weight"), v_heads, hidden)?,
        a: source.vector(&block(i, "ssm_a"), v_heads)?,
        dt: source.vector(&block(i, "ssm_dt.bias"), v_heads)?,
        conv: source.matrix(&block(i, "ssm_conv1d.weight"), channels, taps)?,
        norm: source.vector(&block(i, "ssm_norm.weight"), dim)?,
        out: source.matrix(&block(i, "ssm_out.weight"), hidden, values)?,
    })
}
