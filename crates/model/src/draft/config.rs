//! The publisher's `config.json` of a DFlash draft.

use serde_json::{Map, Value};

use super::{DraftFormat, DraftMetadata};
use crate::ModelError;

/// A parsed `config.json`, which is a JSON object.
pub(super) struct Config {
    pub(super) file: String,
    /// Its bytes, for the draft's hash.
    pub(super) text: Vec<u8>,
    root: Map<String, Value>,
    /// `dflash_config`; empty if missing.
    nested: Map<String, Value>,
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
        let nested = match root.get("dflash_config") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(nested)) => nested.clone(),
            Some(_) => return Err(refuse("dflash_config is not an object".to_owned())),
        };
        Ok(Config {
            file,
            text,
            root,
            nested,
        })
    }

    /// A value of the nested object, or else of the root; null counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let nested = self.nested.get(key).filter(|value| !value.is_null());
        nested.or_else(|| self.root.get(key).filter(|value| !value.is_null()))
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
        let inside = self
            .root
            .get("rope_parameters")
            .and_then(|rope| rope.get(KEY));
        let value = self.get(KEY).or(inside);
        let value = value.ok_or_else(|| self.refuse(KEY, "missing"))?;
        match value.as_f64() {
            Some(theta) if theta.is_finite() && theta > 0.0 => Ok(theta),
            _ => Err(self.refuse(KEY, format!("{value} where a positive number is expected"))),
        }
    }

    fn refuse_scaled_rope(&self) -> Result<(), ModelError> {
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(rope) = self.root.get(key).filter(|rope| !rope.is_null()) else {
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
        let Some(value) = self.get(KEY) else {
            return Ok(None);
        };
        let layer = |id: &Value| id.as_u64().and_then(|id| usize::try_from(id).ok());
        let ids = value.as_array().map(|ids| ids.iter().map(layer));
        match ids
            .and_then(|mut ids| ids.try_fold(Vec::new(), |all, id| Some([all, vec![id?]].concat())))
        {
            Some(ids) => Ok(Some(ids)),
            None => Err(self.refuse(KEY, format!("{value} where layer numbers are expected"))),
        }
    }

    /// The sliding layers and their window. `use_sliding_window` is ignored, because it is false in
    /// published files with sliding layers.
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

pub(super) fn read(config: &Config) -> Result<DraftMetadata, ModelError> {
    config.refuse_scaled_rope()?;
    let layers = config.count("num_hidden_layers")?;
    if layers > 64 {
        let detail = format!("{layers} layers, drafts have at most 64");
        return Err(config.refuse("num_hidden_layers", detail));
    }
    let (sliding, window) = config.windows(layers)?;
    let mask = config.get("mask_token_id");
    let mask = mask.ok_or_else(|| config.refuse("mask_token_id", "missing"))?;
    let eps = config.get("rms_norm_eps").and_then(Value::as_f64);
    let norm_eps = eps.filter(|eps| eps.is_finite() && *eps > 0.0);
    Ok(DraftMetadata {
        format: DraftFormat::Safetensors,
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
    })
}
