//! Which kind of draft a file holds, and known kinds that are refused by name.

use gguf::GgufFile;

use super::config::Config;
use super::metadata::DraftKind;
use super::tensors::DraftTensors;
use crate::ModelError;

/// How a kind is recognised.
struct Marks {
    /// Parts of tensor names that only this kind has.
    tensors: &'static [&'static str],
    /// Ends of keys that only this kind has.
    keys: &'static [&'static str],
    /// Names of the kind, in lower case without separators.
    titles: &'static [&'static str],
}

const DFLASH2: Marks = Marks {
    tensors: &[
        "attn_conv",
        "ffn_conv",
        "attention_conv",
        "mlp_conv",
        "selector_",
        "selector.",
    ],
    keys: &[
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    ],
    titles: &["dflash2"],
};

const DSPARK: Marks = Marks {
    tensors: &["markov", "conf_proj", "confidence_head"],
    keys: &[
        "markov_rank",
        "markov_head_type",
        "has_confidence_head",
        "enable_confidence_head",
    ],
    titles: &["dspark"],
};

/// Drafts with norms for each captured layer or gated attention. The keys mark only drafts of the
/// first kind, since the later kinds have them too.
const GATED: Marks = Marks {
    tensors: &["aux_norm", "capture_norm", "attn_gate", "self_attn.g_proj"],
    keys: &[],
    titles: &["laguna"],
};
const GATED_KEYS: [&str; 2] = ["attention_sink_bias", "final_logit_softcapping"];

const INSTEAD: &str = "use a DFlash, DFlash2 or DSpark draft, or --no-speculation";

/// The kind of a GGUF file.
pub(super) fn of_gguf(file: &GgufFile, directory: &DraftTensors) -> Result<DraftKind, ModelError> {
    let architecture = match file.meta().get("general.architecture") {
        Some(gguf::Value::String(text)) => text.shown().into_owned(),
        _ => String::new(),
    };
    // Models that are not drafts have such tensors and keys too.
    if !["dflash", "dspark", "draft"]
        .iter()
        .any(|part| architecture.contains(part))
    {
        return Ok(DraftKind::Dflash);
    }
    let keys: Vec<&str> = file
        .meta()
        .iter()
        .filter(|(_, value)| **value != gguf::Value::Bool(false))
        .map(|(key, _)| key.rsplit('.').next().unwrap_or(key))
        .collect();
    recognise(directory, &keys, &architecture)
}

/// The kind of a folder with a `config.json`.
pub(super) fn of_config(
    config: &Config,
    directory: &DraftTensors,
) -> Result<DraftKind, ModelError> {
    let is_set = |key: &&str| {
        let value = config.get(key);
        value.is_some_and(|value| *value != false)
    };
    let all = [DFLASH2.keys, DSPARK.keys, &GATED_KEYS].concat();
    let keys: Vec<&str> = all.into_iter().filter(is_set).collect();
    let title = |key| config.get(key).map(ToString::to_string).unwrap_or_default();
    let titles = [
        title("architectures"),
        title("model_type"),
        title("speculators_model_type"),
    ];
    recognise(directory, &keys, &titles.join(" "))
}

fn recognise(
    directory: &DraftTensors,
    keys: &[&str],
    titles: &str,
) -> Result<DraftKind, ModelError> {
    let titles: String = titles
        .to_lowercase()
        .chars()
        .filter(|c| !matches!(c, '-' | '_' | '.'))
        .collect();
    let has = |marks: &Marks| {
        let by_tensor = directory
            .names()
            .any(|name| marks.tensors.iter().any(|part| name.contains(part)));
        by_tensor
            || keys.iter().any(|key| marks.keys.contains(key))
            || marks.titles.iter().any(|title| titles.contains(title))
    };
    let refuse = |what: &str| {
        Err(ModelError::Unsupported {
            file: directory.file.clone(),
            what: what.to_owned(),
            instead: INSTEAD.to_owned(),
        })
    };
    let kind = match (has(&DFLASH2), has(&DSPARK)) {
        (true, true) => return refuse("a draft with both a pairwise selector and a Markov head"),
        (true, false) => DraftKind::Dflash2,
        (false, true) => DraftKind::Dspark,
        (false, false) => DraftKind::Dflash,
    };
    let by_key = kind == DraftKind::Dflash && keys.iter().any(|key| GATED_KEYS.contains(key));
    if by_key || has(&GATED) {
        return refuse("a draft with norms for each captured layer or gated attention");
    }
    Ok(kind)
}
