//! Known kinds of drafts that are not supported, refused by name.

use gguf::GgufFile;

use super::config::Config;
use super::tensors::DraftTensors;
use crate::ModelError;

/// An unsupported kind of draft and how to recognise it.
struct UnsupportedDraft {
    name: &'static str,
    /// Parts of tensor names that only this kind has.
    tensors: &'static [&'static str],
    /// Ends of keys that only this kind has.
    keys: &'static [&'static str],
    /// Names of the kind, in lower case without separators.
    titles: &'static [&'static str],
}

const KINDS: [UnsupportedDraft; 3] = [
    UnsupportedDraft {
        name: "a DFlash2 draft (dynamic convolutions and a pairwise selector)",
        tensors: &["attn_conv_", "ffn_conv_", "selector_", "dynamic_conv"],
        keys: &[
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "selector_top_k",
        ],
        titles: &["dflash2"],
    },
    UnsupportedDraft {
        name: "a DSpark draft (a Markov head and a confidence head)",
        tensors: &["markov", "confidence"],
        keys: &["markov_rank", "markov_head_type", "confidence_head"],
        titles: &["dspark"],
    },
    UnsupportedDraft {
        name: "a draft with norms for each captured layer or gated attention",
        tensors: &["aux_norm", "capture_norm", "attn_gate", "self_attn.g_proj"],
        keys: &["attention_sink_bias", "final_logit_softcapping"],
        titles: &["laguna"],
    },
];

const INSTEAD: &str = "use a DFlash draft of the first kind, or --no-speculation";

pub(super) fn refuse_gguf(file: &GgufFile, directory: &DraftTensors) -> Result<(), ModelError> {
    let architecture = match file.meta().get("general.architecture") {
        Some(gguf::Value::String(text)) => text.shown().into_owned(),
        _ => String::new(),
    };
    // Models that are not drafts have such tensors and keys too.
    if !["dflash", "dspark", "draft"]
        .iter()
        .any(|part| architecture.contains(part))
    {
        return Ok(());
    }
    let keys: Vec<&str> = file
        .meta()
        .iter()
        .filter(|(_, value)| **value != gguf::Value::Bool(false))
        .map(|(key, _)| key)
        .collect();
    refuse(directory, &keys, &architecture)
}

pub(super) fn refuse_config(config: &Config, directory: &DraftTensors) -> Result<(), ModelError> {
    let is_set = |key: &&str| {
        let value = config.get(key);
        value.is_some_and(|value| *value != false)
    };
    let keys = KINDS.iter().flat_map(|kind| kind.keys.iter().copied());
    let keys: Vec<&str> = keys.filter(is_set).collect();
    let title = |key| config.get(key).map(ToString::to_string).unwrap_or_default();
    let titles = format!("{} {}", title("architectures"), title("model_type"));
    refuse(directory, &keys, &titles)
}

fn refuse(directory: &DraftTensors, keys: &[&str], titles: &str) -> Result<(), ModelError> {
    let titles: String = titles
        .to_lowercase()
        .chars()
        .filter(|c| !matches!(c, '-' | '_' | '.'))
        .collect();
    for kind in &KINDS {
        let by_tensor = directory
            .names()
            .any(|name| kind.tensors.iter().any(|part| name.contains(part)));
        let by_key = keys.iter().any(|key| {
            let last = key.rsplit('.').next().unwrap_or(key);
            kind.keys.contains(&last)
        });
        if by_tensor || by_key || kind.titles.iter().any(|title| titles.contains(title)) {
            return Err(ModelError::Unsupported {
                file: directory.file.clone(),
                what: kind.name.to_owned(),
                instead: INSTEAD.to_owned(),
            });
        }
    }
    Ok(())
}
