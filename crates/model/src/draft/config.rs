//! The publisher's `config.json` of a block draft.

use serde_json::{Map, Value};

use super::{DraftFormat, DraftKind, DraftMetadata};
use crate::ModelError;

/// A parsed `config.json`, which is a JSON object.
pub(super) struct Config {
    pub(super) file: String,
    /// Its bytes, for the draft's hash.
    pub(super) text: Vec<u8>,
    root: Map<String, Value>,
    /// `dflash_config`; empty if missing.
    nested: Map<String, Value>,
    /// `transformer_layer_config`, in which speculators keep the backbone; empty if missing.
    backbone: Map<String, Value>,
}

impl Config {
    pub(super) fn parse(file: String, text: Vec<u8>) -> Result<Config, ModelError> {
        let refuse = |detail: String| ModelError::Key {
            file: file.clone(),
            key: "config.json".to_owned(),
            detail,
        };
        let value: Value = serde_json::from_slice(&text).map_err(|e| refuse(e.to_string()))?;
        let Value::Object(root) = value else {
            return Err(refuse("not an object".to_owned()));
        };
        let inner = |key: &str| match root.get(key) {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(inner)) => Ok(inner.clone()),
            Some(_) => Err(refuse(format!("{key} is not an object"))),
        };
        Ok(Config {
            nested: inner("dflash_config")?,
            backbone: inner("transformer_layer_config")?,
            file,
            text,
            root,
        })
    }

    /// A value of the nested object, or else of the root, or else of the backbone's object. Null
    /// counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let objects = [&self.nested, &self.root, &self.backbone].into_iter();
        let mut found = objects.filter_map(|object| object.get(key));
        found.find(|value| !value.is_null())
    }

    fn refuse(&self, key: &str, detail: impl Into<String>) -> ModelError {
        ModelError::Key {
            file: self.file.clone(),
            key: key.to_owned(),
            detail: detail.into(),
        }
    }

    fn optional(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let whole = value.as_u64().and_then(|n| u32::try_from(n).ok());
        match whole {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.refuse(key, format!("{value} where a whole number is expected"))),
        }
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        match self.optional(key)? {
            Some(n) if n > 0 => Ok(n),
            Some(_) => Err(self.refuse(key, "0 where at least 1 is expected")),
            None => Err(self.refuse(key, "missing")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => {
                Err(self.refuse(key, format!("{value} where true or false is expected")))
            }
        }
    }

    /// A positive number at the root or in `rope_parameters`.
    fn theta(&self) -> Result<f64, ModelError> {
        const KEY: &str = "rope_theta";
        let inside = self.get("rope_parameters").and_then(|rope| rope.get(KEY));
        let value = self.get(KEY).or(inside);
        let value = value.ok_or_else(|| self.refuse(KEY, "missing"))?;
        match value.as_f64() {
            Some(theta) if theta.is_finite() && theta > 0.0 => Ok(theta),
            _ => Err(self.refuse(KEY, format!("{value} where a positive number is expected"))),
        }
    }

    /// A positive number; 0 counts as missing.
    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if number.is_finite() && number >= 0.0 => {
                Ok(Some(number).filter(|number| *number > 0.0))
            }
            _ => Err(self.refuse(key, format!("{value} where a positive number is expected"))),
        }
    }

    /// Refuses Markov and confidence heads of another form.
    fn refuse_other_heads(&self) -> Result<(), ModelError> {
        if let Some(kind) = self.get("markov_head_type")
            && kind != "vanilla"
        {
            let detail = format!("{kind} is not supported, only vanilla");
            return Err(self.refuse("markov_head_type", detail));
        }
        let has_confidence = self.flag("enable_confidence_head")?.unwrap_or(false);
        if has_confidence && self.flag("confidence_head_with_markov")? == Some(false) {
            let detail = "false is not supported: the head reads the token before";
            return Err(self.refuse("confidence_head_with_markov", detail));
        }
        Ok(())
    }

    fn refuse_scaled_rope(&self) -> Result<(), ModelError> {
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(rope) = self.get(key) else {
                continue;
            };
            let kind = rope.get("rope_type").or_else(|| rope.get("type"));
            match kind.and_then(Value::as_str) {
                None | Some("default") => {}
                Some(other) => {
                    let detail = format!("{} is not supported, only default", other.escape_debug());
                    return Err(self.refuse(key, detail));
                }
            }
        }
        Ok(())
    }

    fn capture_layers(&self) -> Result<Option<Vec<usize>>, ModelError> {
        const KEY: &str = "target_layer_ids";
        // Speculators number the hidden states from the embedding's, which is one more.
        const SHIFTED: &str = "aux_hidden_state_layer_ids";
        let plain = self.get(KEY).map(|value| (value, KEY, 0));
        let shifted = || self.get(SHIFTED).map(|value| (value, SHIFTED, 1));
        let Some((value, key, shift)) = plain.or_else(shifted) else {
            return Ok(None);
        };
        let layer = |id: &Value| {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            id.and_then(|id| id.checked_sub(shift))
        };
        let ids = value.as_array().map(|ids| ids.iter().map(layer));
        match ids
            .and_then(|mut ids| ids.try_fold(Vec::new(), |all, id| Some([all, vec![id?]].concat())))
        {
            Some(ids) => Ok(Some(ids)),
            None => Err(self.refuse(key, format!("{value} where layer numbers are expected"))),
        }
    }

    /// The sliding layers and their window. A false `use_sliding_window` is ignored, because
    /// published files with sliding layers have it.
    fn windows(&self, layers: usize) -> Result<(Vec<bool>, Option<usize>), ModelError> {
        const KEY: &str = "layer_types";
        let own = self.optional("swa_window_size")?;
        let window = match own {
            Some(window) => Some(window),
            None => self.optional("sliding_window")?,
        };
        let window = window.filter(|window| *window > 0);
        let Some(types) = self.get(KEY) else {
            let slides = self.flag("use_swa")?.unwrap_or(false);
            if slides && window.is_none() {
                return Err(self.refuse("use_swa", "true, but there is no window"));
            }
            let all_slide = self.flag("use_sliding_window")?.unwrap_or(false);
            let slides = slides || all_slide && window.is_some();
            return Ok((vec![slides; layers], window));
        };
        let names = types.as_array().filter(|types| types.len() == layers);
        let names = names.ok_or_else(|| {
            self.refuse(KEY, format!("{types} where {layers} names are expected"))
        })?;
        let mut sliding = Vec::with_capacity(layers);
        for name in names {
            sliding.push(match name.as_str() {
                Some("sliding_attention") => true,
                Some("full_attention") => false,
                _ => return Err(self.refuse(KEY, format!("{name} is not supported"))),
            });
        }
        if window.is_none() && sliding.contains(&true) {
            return Err(self.refuse(KEY, "layers slide, but sliding_window is missing"));
        }
        Ok((sliding, window))
    }
}

pub(super) fn read(config: &Config, kind: DraftKind) -> Result<DraftMetadata, ModelError> {
    config.refuse_scaled_rope()?;
    let layers = config.count("num_hidden_layers")?;
    if layers > 64 {
        let detail = format!("{layers} layers, drafts have at most 64");
        return Err(config.refuse("num_hidden_layers", detail));
    }
    config.refuse_other_heads()?;
    let (sliding, window) = config.windows(layers)?;
    let mask = config.get("mask_token_id");
    let mask = mask.ok_or_else(|| config.refuse("mask_token_id", "missing"))?;
    let eps = config.get("rms_norm_eps").and_then(Value::as_f64);
    let norm_eps = eps.filter(|eps| eps.is_finite() && *eps > 0.0);
    Ok(DraftMetadata {
        format: DraftFormat::Safetensors,
        kind,
        layers,
        block: config.count("block_size")?,
        mask: mask
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| config.refuse("mask_token_id", format!("{mask} is no token")))?,
        capture_layers: config.capture_layers()?,
        theta: config.theta()?,
        rope_dims: None,
        norm_eps: norm_eps
            .ok_or_else(|| config.refuse("rms_norm_eps", "missing or not a positive number"))?,
        sliding,
        window,
        // The root's value overrides the nested one; both override the default rule.
        causal: match config.flag("is_causal")? {
            Some(flag) => Some(flag),
            None => config.flag("causal")?,
        },
        vocab: config.optional("vocab_size")?,
        target_layers: config.optional("num_target_layers")?,
        hidden: config.optional("hidden_size")?,
        ffn: config.optional("intermediate_size")?,
        heads: config.optional("num_attention_heads")?,
        kv_heads: config.optional("num_key_value_heads")?,
        head_dim: config.optional("head_dim")?,
        sample_from_anchor: config.flag("sample_from_anchor")?,
        logit_scale: config.number("logit_scale")?,
        logit_softcap: config.number("final_logit_softcapping")?,
        conv_taps: config.optional("conv_kernel_size")?,
        conv_group: config.optional("conv_group_size")?,
        rank: match config.optional("selector_rank")? {
            Some(rank) => Some(rank),
            None => config.optional("markov_rank")?,
        },
        selector_top_k: config.optional("selector_top_k")?,
        has_sinks: config.flag("attention_sink_bias")?,
        has_confidence: config.flag("enable_confidence_head")?,
    })
}
