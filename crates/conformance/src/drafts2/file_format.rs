//! Writes a case as a file of either spelling, with known mistakes on demand.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use contract::{ModelSpec, QuantType};
use gguf::{Array, FileBytes, GgufError, GgufWriter, Value};
use model::{DraftOptions, LoadedDraft, ModelError};

use super::{Draft2Case, Tensor};
use crate::golden::GoldenError;

/// A file's spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draft2Format {
    /// GGUF of architecture `dflash`, all matrices of this type whose rows it can hold.
    Gguf(QuantType),
    /// The publisher's `config.json` and safetensors.
    Safetensors,
}

/// A mistake in a file, which a device must not compensate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draft2Mistake {
    /// The convolutions' taps in the opposite order.
    TapsSwapped,
    /// The convolutions' two sides exchanged.
    SidesSwapped,
    /// The groups' dynamic weights in another order.
    GroupsInterleaved,
    /// No dynamic weights.
    NoDynamicPart,
    /// The causal flag inverted.
    Causality,
    /// The window one token too wide.
    Window,
    /// No sinks.
    NoSinks,
    /// The vocabulary map by one row off.
    VocabMap,
}

pub(super) fn gguf(case: &Draft2Case) -> Result<Vec<u8>, GoldenError> {
    let contents = Contents::new(case, None);
    Ok(contents.gguf(QuantType::F32).map_err(ModelError::from)?)
}

pub(super) fn load(
    case: &Draft2Case,
    (format, mistake): (Draft2Format, Option<Draft2Mistake>),
    target: &ModelSpec,
    options: DraftOptions,
) -> Result<LoadedDraft, GoldenError> {
    let contents = Contents::new(case, mistake);
    match format {
        Draft2Format::Gguf(ty) => {
            let bytes = contents.gguf(ty).map_err(ModelError::from)?;
            let bytes = FileBytes::shared(Arc::from(bytes));
            Ok(model::load_draft_bytes(case.name, bytes, target, options)?)
        }
        Draft2Format::Safetensors => {
            let io = |source| GoldenError::Io {
                file: "a temporary folder".to_owned(),
                source,
            };
            let folder = tempfile::tempdir().map_err(io)?;
            contents
                .write_safetensors(folder.path(), target)
                .map_err(io)?;
            Ok(model::load_draft(folder.path(), target, options)?)
        }
    }
}

/// A tensor with its values.
struct Filled {
    tensor: Tensor,
    values: Vec<f32>,
}

struct Contents {
    /// Words of each key: name, type, values.
    keys: Vec<Vec<String>>,
    tensors: Vec<Filled>,
    ids: Option<Vec<i64>>,
}

/// The values of a tensor, as `draft2_goldens.values` draws them.
fn values(case: &str, tensor: &Tensor) -> Vec<f32> {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let name = format!("{case}/{}", tensor.name);
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325, fold);
    let mut top = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 56) as u16
    };
    let n: usize = tensor.shape.iter().product();
    let mut all: Vec<f32> = (0..n)
        .map(|_| match tensor.divisor {
            Some(divisor) => (2.0 * f32::from(top()) - 255.0) / divisor,
            None => f32::from(64 + top() / 2) / 128.0,
        })
        .collect();
    if let [_, taps, hidden] = tensor.shape[..] {
        // The row itself weighs most.
        for side in all.chunks_exact_mut(taps * hidden) {
            side[..hidden].iter_mut().for_each(|value| *value += 1.0);
        }
    }
    all
}

impl Contents {
    fn new(case: &Draft2Case, mistake: Option<Draft2Mistake>) -> Contents {
        let mut contents = Contents {
            keys: case.keys.clone(),
            tensors: Vec::new(),
            ids: case.ids.clone(),
        };
        for tensor in &case.tensors {
            contents.tensors.push(Filled {
                values: values(case.name, tensor),
                tensor: tensor.clone(),
            });
        }
        if let Some(mistake) = mistake {
            contents.spoil(mistake);
        }
        contents
    }

    fn key(&self, name: &str) -> Option<&[String]> {
        let found = self.keys.iter().find(|key| key[0] == name);
        found.map(|key| &key[2..])
    }

    fn spoil(&mut self, mistake: Draft2Mistake) {
        let taps = self
            .tensors
            .iter()
            .find(|filled| filled.tensor.shape.len() == 3);
        let taps = taps.map_or(1, |filled| filled.tensor.shape[1]);
        for filled in &mut self.tensors {
            let Filled { tensor, values } = filled;
            let is_base = tensor.name.ends_with("conv_base");
            let is_projection = tensor.name.ends_with("conv_proj.weight");
            // Values of one tap, and of one side.
            let tap = values.len() / (2 * taps);
            let side = values.len() / 2;
            match mistake {
                Draft2Mistake::TapsSwapped if is_base || is_projection => {
                    let sides = values.chunks_exact(side);
                    let swapped = sides.flat_map(|side| side.chunks_exact(tap).rev());
                    *values = swapped.flatten().copied().collect();
                }
                Draft2Mistake::SidesSwapped if is_base || is_projection => {
                    values.rotate_left(side);
                }
                Draft2Mistake::GroupsInterleaved if is_projection => {
                    let cols = tensor.shape[1];
                    for tap in values.chunks_exact_mut(tap) {
                        tap.rotate_left(cols);
                    }
                }
                Draft2Mistake::NoDynamicPart if is_projection => values.fill(0.0),
                _ => {}
            }
        }
        match mistake {
            Draft2Mistake::NoSinks => {
                self.tensors
                    .retain(|filled| !filled.tensor.name.contains("attn_sinks"));
            }
            Draft2Mistake::VocabMap => {
                if let Some(ids) = &mut self.ids {
                    ids.rotate_left(1);
                }
            }
            _ => {}
        }
        for key in &mut self.keys {
            match (mistake, &*key[0]) {
                (Draft2Mistake::Causality, "dflash.attention.causal") => {
                    key[2] = (key[2] != "true").to_string();
                }
                (Draft2Mistake::Window, "dflash.attention.sliding_window") => {
                    let window: u32 = key[2].parse().unwrap_or(0);
                    key[2] = (window + 1).to_string();
                }
                _ => {}
            }
        }
    }

    fn gguf(&self, ty: QuantType) -> Result<Vec<u8>, GgufError> {
        let mut writer = GgufWriter::new();
        writer.meta("general.architecture", "dflash".into())?;
        for key in &self.keys {
            writer.meta(&key[0], value(&key[1], &key[2..]))?;
        }
        let type_of = |tensor: &Tensor| {
            let cols = tensor.shape.last().copied().unwrap_or(0);
            let small = tensor.shape.len() != 2 || tensor.shape[0] == 1;
            match ty.block_values() {
                block if !small && cols.is_multiple_of(block) => ty,
                _ => QuantType::F32,
            }
        };
        for Filled { tensor, .. } in &self.tensors {
            let dims: Vec<u64> = tensor.shape.iter().rev().map(|n| *n as u64).collect();
            writer.tensor(&tensor.name, type_of(tensor), &dims)?;
        }
        if let Some(ids) = &self.ids {
            writer.integers("d2t", ids.len() as u64)?;
        }
        let mut body = writer.start(Vec::new())?;
        for Filled { tensor, values } in &self.tensors {
            let ty = type_of(tensor);
            let mut bytes = vec![0; ty.row_bytes(values.len())];
            contract::quant::quantize_row(ty, values, &mut bytes);
            body.write(&bytes)?;
        }
        for id in self.ids.iter().flatten() {
            body.write(&id.to_le_bytes())?;
        }
        body.finish()
    }

    fn write_safetensors(&self, folder: &Path, target: &ModelSpec) -> std::io::Result<()> {
        fs::write(folder.join("config.json"), self.config(target))?;
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        let mut entry = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            let begin = data.len();
            data.extend(bytes);
            entries.push(format!(
                r#""{name}": {{"dtype": "{dtype}", "shape": {shape:?}, "data_offsets": [{begin}, {}]}}"#,
                data.len()
            ));
        };
        let mut names = self.tensors.iter().map(|filled| &filled.tensor.name);
        let has_post_norms = names.any(|name| name.contains("post_attention_norm"));
        for Filled { tensor, values } in &self.tensors {
            let bytes = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            let name = published(&tensor.name, has_post_norms);
            entry(&name, "F32", &tensor.shape, bytes);
        }
        if let Some(ids) = &self.ids {
            // The publisher stores offsets.
            let offsets = ids.iter().enumerate().map(|(row, id)| id - row as i64);
            let bytes = offsets.flat_map(i64::to_le_bytes).collect();
            entry("d2t", "I64", &[ids.len()], bytes);
        }
        let header = format!("{{{}}}", entries.join(", "));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        fs::write(folder.join("model.safetensors"), bytes)
    }

    /// The publisher's configuration.
    fn config(&self, target: &ModelSpec) -> String {
        /// Key, field, and whether the field is in the nested object.
        const FIELDS: [(&str, &str, bool); 19] = [
            ("dflash.block_count", "num_hidden_layers", false),
            ("dflash.embedding_length", "hidden_size", false),
            ("dflash.feed_forward_length", "intermediate_size", false),
            ("dflash.attention.head_count", "num_attention_heads", false),
            (
                "dflash.attention.head_count_kv",
                "num_key_value_heads",
                false,
            ),
            ("dflash.attention.key_length", "head_dim", false),
            (
                "dflash.attention.layer_norm_rms_epsilon",
                "rms_norm_eps",
                false,
            ),
            ("dflash.rope.freq_base", "rope_theta", false),
            ("dflash.attention.causal", "is_causal", false),
            ("dflash.attention.sliding_window", "sliding_window", false),
            ("dflash.sample_from_anchor", "sample_from_anchor", false),
            ("dflash.logit_scale", "logit_scale", false),
            (
                "dflash.final_logit_softcapping",
                "final_logit_softcapping",
                false,
            ),
            ("tokenizer.ggml.mask_token_id", "mask_token_id", true),
            ("dflash.block_size", "block_size", true),
            ("dflash.conv_kernel_size", "conv_kernel_size", true),
            ("dflash.conv_group_size", "conv_group_size", true),
            ("dflash.selector_rank", "selector_rank", true),
            ("dflash.selector_top_k", "selector_top_k", true),
        ];
        let mut objects: BTreeMap<bool, Vec<String>> = BTreeMap::new();
        let mut put = |nested, field: &str, value: &str| {
            let object = objects.entry(nested).or_default();
            object.push(format!(r#""{field}": {value}"#));
        };
        for (key, field, nested) in FIELDS {
            if let Some([value]) = self.key(key) {
                put(nested, field, value);
            }
        }
        let layers = self.key("dflash.target_layers").unwrap_or_default();
        let layers = layers.iter().filter_map(|layer| layer.parse::<i32>().ok());
        let layers: Vec<i32> = layers.map(|layer| layer - 1).collect();
        put(true, "target_layer_ids", &format!("{layers:?}"));
        let slides = self
            .key("dflash.attention.sliding_window_pattern")
            .unwrap_or_default();
        if !slides.is_empty() {
            let kinds = slides.iter().map(|slides| match &**slides {
                "true" => "sliding_attention",
                _ => "full_attention",
            });
            put(
                false,
                "layer_types",
                &format!("{:?}", kinds.collect::<Vec<_>>()),
            );
        }
        let pairs = self.key("dflash.selector_rank").is_some();
        let title = if pairs {
            "DFlash2DraftModel"
        } else {
            "Qwen3DSparkModel"
        };
        put(false, "architectures", &format!("[{title:?}]"));
        put(false, "vocab_size", &target.vocab.to_string());
        let nested = objects.remove(&true).unwrap_or_default().join(", ");
        let root = objects.remove(&false).unwrap_or_default().join(", ");
        format!(r#"{{{root}, "dflash_config": {{{nested}}}}}"#)
    }
}

/// A key's value from its words.
fn value(kind: &str, words: &[String]) -> Value {
    let number = |word: &String| word.parse().unwrap_or(0);
    match kind {
        "u32" => Value::U32(words[0].parse().unwrap_or(0)),
        "f32" => Value::F32(words[0].parse().unwrap_or(0.0)),
        "bool" => Value::Bool(words[0] == "true"),
        "i32s" => Value::Array(Array::I32(words.iter().map(number).collect())),
        _ => Value::Array(Array::Bool(
            words.iter().map(|word| word == "true").collect(),
        )),
    }
}

/// The publisher's name of a GGUF tensor. With norms behind the sublayers, the norm before the
/// feed-forward has another name.
fn published(name: &str, has_post_norms: bool) -> String {
    const OUTER: [(&str, &str); 12] = [
        ("enc.output_norm.weight", "hidden_norm.weight"),
        ("output_norm.weight", "norm.weight"),
        ("token_embd.weight", "embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        (
            "selector_hidden.weight",
            "candidate_selector.hidden_projection.weight",
        ),
        (
            "selector_predecessor.weight",
            "candidate_selector.predecessor_codebook",
        ),
        (
            "selector_successor.weight",
            "candidate_selector.successor_codebook",
        ),
        ("markov_w1.weight", "markov_head.markov_w1.weight"),
        ("markov_w2.weight", "markov_head.markov_w2.weight"),
        ("conf_proj.weight", "confidence_head.proj.weight"),
        ("conf_proj.bias", "confidence_head.proj.bias"),
        ("fc.weight", "fc.weight"),
    ];
    const INNER: [(&str, &str); 17] = [
        ("attn_norm.weight", "input_layernorm.weight"),
        ("ffn_norm.weight", "post_attention_layernorm.weight"),
        ("attn_q.weight", "self_attn.q_proj.weight"),
        ("attn_k.weight", "self_attn.k_proj.weight"),
        ("attn_v.weight", "self_attn.v_proj.weight"),
        ("attn_output.weight", "self_attn.o_proj.weight"),
        ("attn_q_norm.weight", "self_attn.q_norm.weight"),
        ("attn_k_norm.weight", "self_attn.k_norm.weight"),
        ("ffn_gate.weight", "mlp.gate_proj.weight"),
        ("ffn_up.weight", "mlp.up_proj.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
        ("attn_sinks.weight", "self_attn.sinks"),
        ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
        ("attn_conv_base", "attention_conv.base_kernel"),
        (
            "attn_conv_proj.weight",
            "attention_conv.kernel_projection.weight",
        ),
        ("ffn_conv_base", "mlp_conv.base_kernel"),
        ("ffn_conv_proj.weight", "mlp_conv.kernel_projection.weight"),
    ];
    let of = |names: &[(&str, &str)], name: &str| {
        let found = names.iter().find(|(gguf, _)| *gguf == name);
        found.map_or(name.to_owned(), |(_, published)| (*published).to_owned())
    };
    match name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
    {
        None => of(&OUTER, name),
        Some((layer, part)) => {
            let part = match part {
                "ffn_norm.weight" if has_post_norms => {
                    "pre_feedforward_layernorm.weight".to_owned()
                }
                "post_attention_norm.weight" => "post_attention_layernorm.weight".to_owned(),
                part => of(&INNER, part),
            };
            format!("layers.{layer}.{part}")
        }
    }
}
