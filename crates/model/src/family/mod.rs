//! The families we read, each a small module that turns metadata and tensor names into layers.

mod dense;
mod hybrid;

use contract::{FeedForward, LayerSpec};

use crate::error::ModelError;
use crate::source::Source;

/// One family: how its layers are named and shaped.
pub(crate) trait Family {
    /// The trunk's layers, bottom to top.
    fn layers(&self, source: &Source<'_>, trunk: &Trunk) -> Result<Vec<LayerSpec>, ModelError>;
}

/// Sizes every family states in the same keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trunk {
    /// Layers, prediction blocks after the trunk not counted.
    pub layers: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: Heads,
    pub rope_theta: f64,
    pub norm_eps: f32,
    pub context: usize,
}

/// Attention heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub n: usize,
    pub n_kv: usize,
    pub dim: usize,
}

/// Values beyond this are damage, not a model.
const MOST_LAYERS: usize = 1024;

/// The family of an architecture name, or what to tell the user.
pub(crate) fn of(source: &Source<'_>) -> Result<&'static dyn Family, ModelError> {
    let instead = match source.architecture() {
        "qwen35" => return Ok(&hybrid::Hybrid),
        "qwen3" => return Ok(&dense::Dense),
        "qwen35moe" | "qwen3moe" | "qwen3next" => "use a dense model of the same family",
        "dflash" | "dflash-draft" | "qwen35-dflash-draft" => {
            "this file is a draft, give a target model"
        }
        "clip" | "mmproj" => "this file holds a vision part, give the language model's file",
        _ => "use a Qwen3.5, Qwen3.6 or Qwen3 dense model",
    };
    Err(source.unsupported(format!("architecture {}", source.architecture()), instead))
}

impl Trunk {
    /// Reads and checks what all families share.
    pub(crate) fn read(source: &Source<'_>) -> Result<Trunk, ModelError> {
        let blocks = source.count("block_count")?;
        let predicted = source.optional_usize("nextn_predict_layers")?.unwrap_or(0);
        let layers = blocks
            .checked_sub(predicted)
            .filter(|n| (1..=MOST_LAYERS).contains(n));
        let Some(layers) = layers else {
            return Err(source.key(
                "block_count",
                format!("is {blocks} with {predicted} prediction blocks, expected 1 to {MOST_LAYERS} layers besides them"),
            ));
        };
        if !source.has("blk.0.attn_norm.weight")
            && source.has(&format!("blk.{layers}.attn_norm.weight"))
        {
            return Err(source.unsupported(
                "a file with nothing but prediction blocks".to_owned(),
                "give the file that holds the trunk",
            ));
        }
        let hidden = source.count("embedding_length")?;
        let n = source.count("attention.head_count")?;
        let n_kv = source
            .optional_usize("attention.head_count_kv")?
            .unwrap_or(n);
        if n_kv == 0 || !n.is_multiple_of(n_kv) {
            return Err(source.key(
                "attention.head_count_kv",
                format!("is {n_kv}, expected a divisor of attention.head_count {n}"),
            ));
        }
        let dim = match source.optional_usize("attention.key_length")? {
            Some(dim) => dim,
            None => hidden / n,
        };
        if dim == 0 || !dim.is_multiple_of(32) || dim > 1024 {
            return Err(source.key(
                "attention.key_length",
                format!("is {dim}, expected a multiple of 32 up to 1024"),
            ));
        }
        let value_dim = source
            .optional_usize("attention.value_length")?
            .unwrap_or(dim);
        if value_dim != dim {
            return Err(source.key(
                "attention.value_length",
                format!("is {value_dim}, expected attention.key_length {dim}"),
            ));
        }
        let rope_theta = source.float("rope.freq_base", 10_000.0)?;
        if !(rope_theta.is_finite() && rope_theta > 1.0) {
            return Err(source.key(
                "rope.freq_base",
                format!("is {rope_theta}, expected above 1"),
            ));
        }
        let eps = source.float("attention.layer_norm_rms_epsilon", 1e-6)?;
        if !(eps > 0.0 && eps < 1.0) {
            return Err(source.key(
                "attention.layer_norm_rms_epsilon",
                format!("is {eps}, expected between 0 and 1"),
            ));
        }
        Ok(Trunk {
            layers,
            hidden,
            ffn: source.count("feed_forward_length")?,
            heads: Heads { n, n_kv, dim },
            rope_theta,
            norm_eps: eps as f32,
            context: source.count("context_length")?,
        })
    }
}

/// The gated feed-forward both families have.
fn feed_forward(source: &Source<'_>, trunk: &Trunk, i: usize) -> Result<FeedForward, ModelError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    Ok(FeedForward::Dense {
        gate: source.matrix(&name("ffn_gate.weight"), trunk.ffn, trunk.hidden)?,
        up: source.matrix(&name("ffn_up.weight"), trunk.ffn, trunk.hidden)?,
        down: source.matrix(&name("ffn_down.weight"), trunk.hidden, trunk.ffn)?,
    })
}

/// `1 / sqrt(head_dim)`.
fn attention_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}
