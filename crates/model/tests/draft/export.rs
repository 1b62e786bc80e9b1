//! Writes one small draft in all file_formats, and spoils it.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use contract::{ModelSpec, QuantType};
use gguf::{Array, FileBytes, GgufWriter, Value};
use model::synth::SynthSpec;
use model::{DraftOptions, LoadedDraft, ModelError};
use serde_json::{Map, json};

pub(crate) const LAYERS: usize = 3;
pub(crate) const HIDDEN: usize = 256;
const FFN: usize = 512;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 128;
pub(crate) const TAPS: [i32; 3] = [0, 1, 3];
pub(crate) const WINDOW: u32 = 64;

/// The target that the draft is for: 4 layers, 256 wide, 1024 tokens.
pub(crate) fn target() -> Arc<ModelSpec> {
    static TARGET: OnceLock<Arc<ModelSpec>> = OnceLock::new();
    let made = TARGET.get_or_init(|| {
        let bytes = SynthSpec::parse("tiny-hybrid:q8_0")
            .unwrap()
            .bytes()
            .unwrap();
        let bytes = FileBytes::shared(Arc::from(bytes));
        model::load_bytes("target.gguf", bytes).unwrap().spec
    });
    Arc::clone(made)
}

/// How a draft is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DraftFileFormat {
    A,
    B,
    C,
    Safetensors,
}

impl DraftFileFormat {
    pub(crate) const ALL: [DraftFileFormat; 4] = [
        DraftFileFormat::A,
        DraftFileFormat::B,
        DraftFileFormat::C,
        DraftFileFormat::Safetensors,
    ];
    pub(crate) const GGUF: [DraftFileFormat; 3] =
        [DraftFileFormat::A, DraftFileFormat::B, DraftFileFormat::C];

    pub(crate) fn architecture(self) -> &'static str {
        match self {
            DraftFileFormat::A => "qwen35-dflash-draft",
            DraftFileFormat::B => "dflash-draft",
            DraftFileFormat::C => "dflash",
            DraftFileFormat::Safetensors => "",
        }
    }
}

/// One tensor by its published name, and its shape `[rows, cols]`; one row for a vector.
fn tensors() -> Vec<(String, usize, usize)> {
    let mut all = vec![
        ("fc".to_owned(), HIDDEN, TAPS.len() * HIDDEN),
        ("hidden_norm".to_owned(), 1, HIDDEN),
        ("norm".to_owned(), 1, HIDDEN),
    ];
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for i in 0..LAYERS {
        let mut put = |name: &str, rows, cols| all.push((format!("layers.{i}.{name}"), rows, cols));
        put("input_layernorm", 1, HIDDEN);
        put("post_attention_layernorm", 1, HIDDEN);
        put("self_attn.q_proj", q, HIDDEN);
        put("self_attn.k_proj", kv, HIDDEN);
        put("self_attn.v_proj", kv, HIDDEN);
        put("self_attn.o_proj", HIDDEN, q);
        put("self_attn.q_norm", 1, HEAD_DIM);
        put("self_attn.k_norm", 1, HEAD_DIM);
        put("mlp.gate_proj", FFN, HIDDEN);
        put("mlp.up_proj", FFN, HIDDEN);
        put("mlp.down_proj", HIDDEN, FFN);
    }
    all
}

/// The name of a tensor in a GGUF dialect.
fn gguf_name(name: &str, file_format: DraftFileFormat) -> String {
    let c = file_format == DraftFileFormat::C;
    match name {
        "fc" if c => return "fc.weight".to_owned(),
        "fc" => return "dflash.fc.weight".to_owned(),
        "hidden_norm" if c => return "enc.output_norm.weight".to_owned(),
        "hidden_norm" => return "dflash.hidden_norm.weight".to_owned(),
        "norm" => return "output_norm.weight".to_owned(),
        _ => {}
    }
    let (layer, part) = name
        .strip_prefix("layers.")
        .unwrap()
        .split_once('.')
        .unwrap();
    let part = match part {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        _ => "ffn_down",
    };
    format!("blk.{layer}.{part}.weight")
}

/// Values that differ from tensor to tensor and from place to place.
fn values(name: &str, n: usize) -> Vec<u8> {
    let salt = name
        .bytes()
        .fold(7_u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let value = |i: usize| ((salt.wrapping_add(i as u32) % 251) as f32 - 125.0) / 1000.0;
    (0..n).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// A draft's file and what is to be changed in it.
#[derive(Clone)]
pub(crate) struct Export {
    pub(crate) file_format: DraftFileFormat,
    pub(crate) sliding: bool,
    /// Keys set to another value, or taken out.
    pub(crate) keys: Vec<(String, Option<Value>)>,
    /// Fields of `config.json`, set or taken out.
    pub(crate) fields: Vec<(String, serde_json::Value)>,
    /// Tensors by their name in the file: renamed, or taken out.
    pub(crate) renamed: Vec<(String, Option<String>)>,
    /// Tensors added: name, rows, columns.
    pub(crate) added: Vec<(String, usize, usize)>,
    /// A vector of 64-bit integers, by its name.
    pub(crate) integers: Option<(String, Vec<i64>)>,
}

impl Export {
    pub(crate) fn new(file_format: DraftFileFormat) -> Export {
        Export {
            file_format,
            sliding: false,
            keys: Vec::new(),
            fields: Vec::new(),
            renamed: Vec::new(),
            added: Vec::new(),
            integers: None,
        }
    }

    pub(crate) fn sliding(mut self) -> Export {
        self.sliding = true;
        self
    }

    /// Sets a key; `{a}` in it is the architecture.
    pub(crate) fn key(mut self, key: &str, value: Option<Value>) -> Export {
        let key = key.replace("{a}", self.file_format.architecture());
        self.keys.push((key, value));
        self
    }

    pub(crate) fn field(mut self, key: &str, value: serde_json::Value) -> Export {
        self.fields.push((key.to_owned(), value));
        self
    }

    pub(crate) fn rename(mut self, from: &str, to: Option<&str>) -> Export {
        self.renamed.push((from.to_owned(), to.map(str::to_owned)));
        self
    }

    pub(crate) fn add(mut self, name: &str, rows: usize, cols: usize) -> Export {
        self.added.push((name.to_owned(), rows, cols));
        self
    }

    /// Takes back a tensor that was added.
    pub(crate) fn without(mut self, name: &str) -> Export {
        self.added.retain(|(added, _, _)| added != name);
        self
    }

    pub(crate) fn integers(mut self, name: &str, values: Vec<i64>) -> Export {
        self.integers = Some((name.to_owned(), values));
        self
    }

    pub(crate) fn load(&self) -> Result<LoadedDraft, ModelError> {
        self.load_with(DraftOptions::default())
    }

    pub(crate) fn load_with(&self, options: DraftOptions) -> Result<LoadedDraft, ModelError> {
        let target = target();
        if self.file_format == DraftFileFormat::Safetensors {
            let folder = tempfile::tempdir().unwrap();
            self.write_safetensors(folder.path());
            return model::load_draft(folder.path(), &target, options);
        }
        let bytes = FileBytes::shared(Arc::from(self.gguf()));
        model::load_draft_bytes("draft.gguf", bytes, &target, options)
    }

    fn listed(&self, name: impl Fn(&str) -> String) -> Vec<(String, String, usize, usize)> {
        let mut all = Vec::new();
        for (published, rows, cols) in tensors() {
            let name = name(&published);
            let name = match self.renamed.iter().find(|(from, _)| *from == name) {
                Some((_, Some(to))) => to.clone(),
                Some((_, None)) => continue,
                None => name,
            };
            all.push((name, published, rows, cols));
        }
        let added = self
            .added
            .iter()
            .map(|(name, rows, cols)| (name.clone(), name.clone(), *rows, *cols));
        all.extend(added);
        all
    }

    pub(crate) fn gguf(&self) -> Vec<u8> {
        let a = self.file_format.architecture();
        let u = Value::U32;
        let ids = |shift: i32| Value::Array(Array::I32(TAPS.map(|t| t + shift).to_vec()));
        let mut keys: Vec<(String, Value)> = vec![
            ("general.architecture".to_owned(), a.into()),
            ("general.name".to_owned(), "small draft".into()),
        ];
        let mut put = |key: &str, value: Value| keys.push((format!("{a}.{key}"), value));
        put("block_count", u(LAYERS as u32));
        put("context_length", u(4096));
        put("embedding_length", u(HIDDEN as u32));
        put("feed_forward_length", u(FFN as u32));
        put("attention.head_count", u(HEADS as u32));
        put("attention.head_count_kv", u(KV_HEADS as u32));
        put("attention.key_length", u(HEAD_DIM as u32));
        put("attention.value_length", u(HEAD_DIM as u32));
        put("attention.layer_norm_rms_epsilon", Value::F32(1e-6));
        put("rope.freq_base", Value::F32(1e7));
        match self.file_format {
            DraftFileFormat::C => {
                put("block_size", u(16));
                put("target_layers", ids(1));
                put(
                    "rope.dimension_sections",
                    Value::Array(Array::I32(vec![64, 0, 0, 0])),
                );
            }
            _ => {
                put("dflash.block_size", u(16));
                put("dflash.target_layer_ids", ids(0));
                put("dflash.mask_token_id", u(1023));
                put("vocab_size", u(1024));
                // What some converters write here is the target's depth.
                put("dflash.n_target_layers", u(64));
            }
        }
        if self.sliding && self.file_format != DraftFileFormat::A {
            let pattern = (0..LAYERS).map(|i| i + 1 < LAYERS).collect();
            put("attention.sliding_window", u(WINDOW));
            put(
                "attention.sliding_window_pattern",
                Value::Array(Array::Bool(pattern)),
            );
        }
        if self.file_format == DraftFileFormat::C {
            keys.push(("tokenizer.ggml.mask_token_id".to_owned(), u(1023)));
        }
        for (key, value) in &self.keys {
            keys.retain(|(other, _)| other != key);
            keys.extend(value.clone().map(|value| (key.clone(), value)));
        }
        let mut writer = GgufWriter::new();
        for (key, value) in keys {
            writer.meta(&key, value).unwrap();
        }
        let all = self.listed(|name| gguf_name(name, self.file_format));
        for (name, _, rows, cols) in &all {
            let dims = [*cols as u64, *rows as u64];
            let dims = if *rows == 1 { &dims[..1] } else { &dims[..] };
            writer.tensor(name, QuantType::F32, dims).unwrap();
        }
        if let Some((name, values)) = &self.integers {
            writer.integers(name, values.len() as u64).unwrap();
        }
        let mut body = writer.start(Vec::new()).unwrap();
        for (_, published, rows, cols) in &all {
            body.write(&values(published, rows * cols)).unwrap();
        }
        for value in self.integers.iter().flat_map(|(_, values)| values) {
            body.write(&value.to_le_bytes()).unwrap();
        }
        body.finish().unwrap()
    }

    pub(crate) fn write_safetensors(&self, folder: &Path) {
        let kind = |i: usize| {
            if self.sliding && i + 1 < LAYERS {
                "sliding_attention"
            } else {
                "full_attention"
            }
        };
        let mut config = json!({
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
            "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": FFN,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "vocab_size": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e7, "block_size": 16,
            "num_target_layers": 4, "use_sliding_window": false,
            "sliding_window": self.sliding.then_some(WINDOW),
            "layer_types": (0..LAYERS).map(kind).collect::<Vec<_>>(),
            "dflash_config": { "mask_token_id": 1023, "target_layer_ids": TAPS },
        });
        for (path, value) in &self.fields {
            let mut at = &mut config;
            let (parents, last) = path
                .rsplit_once('/')
                .map_or((None, &**path), |(p, l)| (Some(p), l));
            for parent in parents.into_iter().flat_map(|p| p.split('/')) {
                at = &mut at[parent];
            }
            at[last] = value.clone();
        }
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, published, rows, cols) in self.listed(|name| format!("{name}.weight")) {
            let begin = data.len();
            data.extend(values(&published, rows * cols));
            let shape = if rows == 1 {
                json!([cols])
            } else {
                json!([rows, cols])
            };
            let entry =
                json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name, entry);
        }
        if let Some((name, values)) = &self.integers {
            let begin = data.len();
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            let entry = json!({
                "dtype": "I64", "shape": [values.len()], "data_offsets": [begin, data.len()],
            });
            header.insert(name.clone(), entry);
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(data);
        std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
    }
}
