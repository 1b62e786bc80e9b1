//! The three GGUF file formats of a block draft.
//!
//! | | A `qwen35-dflash-draft` | B `dflash-draft` | C `dflash` |
//! |---|---|---|---|
//! | block size | `A.dflash.block_size` | `B.dflash.block_size` | `dflash.block_size` |
//! | captured layers | `A.dflash.target_layer_ids` | `B.dflash.target_layer_ids` | see below |
//! | mask | `A.dflash.mask_token_id` | `B.dflash.mask_token_id` | `tokenizer.ggml.mask_token_id` |
//! | window | none | `B.attention.sliding_window`, `_pattern` | the same under `dflash` |
//! | causal in the block | sliding layers | sliding layers | `dflash.attention.causal` |
//!
//! Captured layers: A may lack the key; C stores `dflash.target_layers`, **each plus one**.
//! Without `dflash.attention.causal`, the sliding layers of C are causal in the block if the draft
//! is of the first kind. The keys of the later kinds follow the block size's: `dflash.` in C, and
//! `B.dflash.` in B.
//!
//! `A.dflash.n_target_layers` is the number of captured layers in some files and of target layers
//! in others, so it is not read: the width of `fc` gives the number of captured layers.

use gguf::GgufFile;

use super::{DraftFormat, DraftKind, DraftMetadata};
use crate::ModelError;
use crate::reader::{Reader, key_error, missing};

/// Maximum number of layers; published drafts have 1 to 8.
const MAX_LAYERS: usize = 64;

pub(super) fn read(file: &GgufFile, kind: DraftKind) -> Result<DraftMetadata, ModelError> {
    let reader = Reader::new(file)?;
    let format = match reader.architecture {
        "qwen35-dflash-draft" => DraftFormat::GgufA,
        "dflash-draft" => DraftFormat::GgufB,
        "dflash" => DraftFormat::GgufC,
        other => {
            let what = format!("{} as a draft", other.escape_debug());
            return Err(reader.unsupported(
                what,
                "give a DFlash draft: architecture dflash, dflash-draft or qwen35-dflash-draft",
            ));
        }
    };
    let layers = reader.count("block_count")?;
    if layers > MAX_LAYERS {
        let detail = format!("{layers} layers, drafts have at most {MAX_LAYERS}");
        return Err(reader.refuse_key("block_count", detail));
    }
    if let Some(scaling) = reader.text("rope.scaling.type")?
        && scaling != "none"
    {
        let detail = format!("{} is not supported, only none", scaling.escape_debug());
        return Err(reader.refuse_key("rope.scaling.type", detail));
    }
    let (block_key, capture_layers_key) = match format {
        DraftFormat::GgufC => ("block_size", "target_layers"),
        _ => ("dflash.block_size", "dflash.target_layer_ids"),
    };
    let window = reader.optional("attention.sliding_window")?;
    let window = window.filter(|window| *window > 0);
    let own = |key: &str| match format {
        DraftFormat::GgufC => key.to_owned(),
        _ => format!("dflash.{key}"),
    };
    let count = |key: &str| reader.optional(&own(key));
    Ok(DraftMetadata {
        format,
        kind,
        layers,
        block: reader.count(block_key)?,
        mask: mask(&reader, format)?,
        capture_layers: capture_layers(&reader, format, capture_layers_key)?,
        theta: reader.float("rope.freq_base")?,
        rope_dims: reader.optional("rope.dimension_count")?,
        norm_eps: reader.float("attention.layer_norm_rms_epsilon")?,
        sliding: sliding(&reader, layers, window)?,
        window,
        causal: causal(&reader, format)?,
        vocab: vocab(&reader, format)?,
        target_layers: None,
        hidden: reader.optional("embedding_length")?,
        ffn: reader.optional("feed_forward_length")?,
        heads: reader.optional("attention.head_count")?,
        kv_heads: reader.optional("attention.head_count_kv")?,
        head_dim: reader.optional("attention.key_length")?,
        sample_from_anchor: flag(&reader, &own("sample_from_anchor"))?,
        logit_scale: number(&reader, "logit_scale")?,
        logit_softcap: number(&reader, "final_logit_softcapping")?,
        conv_taps: count("conv_kernel_size")?,
        conv_group: count("conv_group_size")?,
        rank: match count("selector_rank")? {
            Some(rank) => Some(rank),
            None => count("markov_rank")?,
        },
        selector_top_k: count("selector_top_k")?,
        has_sinks: None,
        has_confidence: flag(&reader, &own("has_confidence_head"))?,
    })
}

fn mask(reader: &Reader<'_>, format: DraftFormat) -> Result<u32, ModelError> {
    let file = reader.file;
    let key = match format {
        DraftFormat::GgufC => "tokenizer.ggml.mask_token_id".to_owned(),
        _ => format!("{}.dflash.mask_token_id", reader.architecture),
    };
    let found = file.meta().integer(&key).map_err(|e| key_error(file, e))?;
    let found = found.ok_or_else(|| missing(file, &key))?;
    u32::try_from(found).map_err(|_| ModelError::Key {
        file: file.name().to_owned(),
        key,
        detail: format!("{found} is beyond any vocabulary"),
    })
}

fn capture_layers(
    reader: &Reader<'_>,
    format: DraftFormat,
    suffix: &str,
) -> Result<Option<Vec<usize>>, ModelError> {
    let file = reader.file;
    let key = format!("{}.{suffix}", reader.architecture);
    let found = file.meta().integers(&key).map_err(|e| key_error(file, e))?;
    let Some(found) = found else { return Ok(None) };
    // Format C numbers the hidden states from the embedding's, which is one more.
    let shift = u64::from(format == DraftFormat::GgufC);
    let layer = |id: u64| {
        let layer = id
            .checked_sub(shift)
            .and_then(|id| usize::try_from(id).ok());
        layer.ok_or_else(|| reader.refuse_key(suffix, format!("{id} names no layer")))
    };
    found
        .into_iter()
        .map(layer)
        .collect::<Result<_, _>>()
        .map(Some)
}

fn sliding(
    reader: &Reader<'_>,
    layers: usize,
    window: Option<usize>,
) -> Result<Vec<bool>, ModelError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let Some(pattern) = reader.flags(PATTERN)? else {
        // A window without a pattern: all layers but the last slide, as in published drafts.
        return Ok((0..layers)
            .map(|i| window.is_some() && i + 1 < layers)
            .collect());
    };
    if pattern.len() != layers {
        let detail = format!("{} flags for {layers} layers", pattern.len());
        return Err(reader.refuse_key(PATTERN, detail));
    }
    if window.is_none() && pattern.contains(&true) {
        let detail = "layers slide, but attention.sliding_window is missing".to_owned();
        return Err(reader.refuse_key(PATTERN, detail));
    }
    Ok(pattern.to_vec())
}

fn causal(reader: &Reader<'_>, format: DraftFormat) -> Result<Option<bool>, ModelError> {
    if format != DraftFormat::GgufC {
        return Ok(None);
    }
    flag(reader, "attention.causal")
}

fn flag(reader: &Reader<'_>, suffix: &str) -> Result<Option<bool>, ModelError> {
    let key = format!("{}.{suffix}", reader.architecture);
    let file = reader.file;
    file.meta().boolean(&key).map_err(|e| key_error(file, e))
}

/// A positive number; 0 counts as missing.
fn number(reader: &Reader<'_>, suffix: &str) -> Result<Option<f64>, ModelError> {
    let key = format!("{}.{suffix}", reader.architecture);
    match reader.file.meta().get(&key) {
        None => Ok(None),
        Some(gguf::Value::F32(value)) if *value == 0.0 => Ok(None),
        Some(_) => reader.float(suffix).map(Some),
    }
}

fn vocab(reader: &Reader<'_>, format: DraftFormat) -> Result<Option<usize>, ModelError> {
    if let Some(vocab) = reader.optional("vocab_size")? {
        return Ok(Some(vocab));
    }
    if format != DraftFormat::GgufC {
        return Ok(None);
    }
    let tokens = reader.file.meta().get("tokenizer.ggml.tokens");
    Ok(match tokens {
        Some(gguf::Value::Array(tokens)) => Some(tokens.len()),
        _ => None,
    })
}
