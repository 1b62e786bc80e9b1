//! Writes drafts in the four file formats, with the quirks of their converters.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use contract::quant::quantize_row;
use contract::{ModelSpec, QuantType};
use gguf::{Array, FileBytes, GgufError, GgufWriter, Value};
use model::{DraftOptions, LoadedDraft, ModelError};

use super::{LayerMask, RandomDraft};
use crate::golden::GoldenError;

/// File format of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftFileFormat {
    /// GGUF `qwen35-dflash-draft`: its rope base is the
    /// converter's default, and it has no windows.
    A,
    /// GGUF `dflash-draft`.
    B,
    /// GGUF `dflash`: its target layers are numbered from 1.
    C,
    /// The publisher's folder: a `config.json` that denies its windows, and bf16 tensors.
    Safetensors,
}

impl DraftFileFormat {
    /// All four.
    pub const ALL: [DraftFileFormat; 4] = [
        DraftFileFormat::A,
        DraftFileFormat::B,
        DraftFileFormat::C,
        DraftFileFormat::Safetensors,
    ];

    fn architecture(self) -> &'static str {
        match self {
            DraftFileFormat::A => "qwen35-dflash-draft",
            DraftFileFormat::B => "dflash-draft",
            DraftFileFormat::C | DraftFileFormat::Safetensors => "dflash",
        }
    }
}

/// Deviations of a file from the draft; all but `ty` make it incorrect. Incorrect files test the
/// tests.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DraftFileQuirks {
    /// Type of its matrices; `None` is f32. Ignored by safetensors.
    pub ty: Option<QuantType>,
    /// Added to every target layer.
    pub capture_layers_offset: i32,
    /// Factor on the rope base; 0 leaves it unchanged.
    pub theta_factor: f32,
    /// Tokens added to the window.
    pub window_offset: i32,
    /// Another mask token.
    pub mask: Option<u32>,
    /// Inverts the causal flag, in the file formats that have one.
    pub flip_causal: bool,
}

impl DraftFileQuirks {
    /// Whether a file with these quirks still describes the draft correctly.
    pub fn are_correct(&self) -> bool {
        DraftFileQuirks { ty: None, ..*self } == DraftFileQuirks::default()
    }
}

/// Writes a draft and loads the file.
pub(super) fn load(
    draft: &RandomDraft,
    (file_format, quirks): (DraftFileFormat, DraftFileQuirks),
    target: &ModelSpec,
    options: DraftOptions,
) -> Result<LoadedDraft, GoldenError> {
    let contents = DraftFileContents::new(draft, quirks, target);
    if file_format == DraftFileFormat::Safetensors {
        let folder =
            tempfile::tempdir().map_err(|source| io_error("a temporary folder", source))?;
        contents.write_safetensors(folder.path())?;
        return Ok(model::load_draft(folder.path(), target, options)?);
    }
    let bytes = contents.gguf(file_format).map_err(ModelError::from)?;
    let bytes = FileBytes::shared(Arc::from(bytes));
    Ok(model::load_draft_bytes(draft.name, bytes, target, options)?)
}

fn io_error(file: &str, source: std::io::Error) -> GoldenError {
    GoldenError::Io {
        file: file.to_owned(),
        source,
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), GoldenError> {
    fs::write(folder.join(name), bytes).map_err(|source| io_error(name, source))
}

/// The distribution of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorKind {
    /// Around zero.
    Matrix,
    /// Around one.
    Norm,
}

/// The first `n` values of a draft's tensor: eight-bit integers times a power of two, which bf16,
/// f16 and f32 represent exactly. The seed is FNV-1a of the names, the generator is SplitMix64,
/// both as in `draft_goldens.py`.
pub(super) fn values(draft: &str, tensor: &str, n: usize, kind: TensorKind) -> Vec<f32> {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let name = format!("{draft}/{tensor}");
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325, fold);
    let mut top = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 56) as u16
    };
    let value = |top: u16| match kind {
        TensorKind::Matrix => (2.0 * f32::from(top) - 255.0) / 2048.0,
        TensorKind::Norm => f32::from(64 + top / 2) / 128.0,
    };
    (0..n).map(|_| value(top())).collect()
}

/// One tensor by its published name, without `.weight`.
struct Tensor {
    name: String,
    /// 1 for a vector.
    rows: usize,
    cols: usize,
}

impl Tensor {
    fn kind(&self) -> TensorKind {
        if self.name.ends_with("norm") {
            TensorKind::Norm
        } else {
            TensorKind::Matrix
        }
    }

    fn bytes(&self, draft: &str, ty: QuantType) -> Vec<u8> {
        let name = format!("{}.weight", self.name);
        let values = values(draft, &name, self.rows * self.cols, self.kind());
        let mut bytes = vec![0; ty.row_bytes(values.len())];
        quantize_row(ty, &values, &mut bytes);
        bytes
    }

    /// The name in a GGUF format.
    fn in_gguf(&self, file_format: DraftFileFormat) -> String {
        let c = file_format == DraftFileFormat::C;
        let outer = match &*self.name {
            "fc" if c => "fc",
            "fc" => "dflash.fc",
            "hidden_norm" if c => "enc.output_norm",
            "hidden_norm" => "dflash.hidden_norm",
            "norm" => "output_norm",
            _ => "",
        };
        if !outer.is_empty() {
            return format!("{outer}.weight");
        }
        const PARTS: [(&str, &str); 11] = [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ];
        let name = self.name.strip_prefix("layers.").unwrap_or(&self.name);
        let (layer, part) = name.split_once('.').unwrap_or((name, ""));
        let known = PARTS.iter().find(|(published, _)| *published == part);
        format!(
            "blk.{layer}.{}.weight",
            known.map_or(part, |(_, ours)| ours)
        )
    }
}

/// A draft as a file describes it.
struct DraftFileContents<'a> {
    draft: &'a RandomDraft,
    quirks: DraftFileQuirks,
    hidden: usize,
    vocab: usize,
    target_layers: usize,
    theta: f32,
    window: Option<i32>,
    causal: Option<bool>,
    mask: u32,
    capture_layers: Vec<i32>,
}

impl DraftFileContents<'_> {
    fn new<'a>(
        draft: &'a RandomDraft,
        quirks: DraftFileQuirks,
        target: &ModelSpec,
    ) -> DraftFileContents<'a> {
        let slides = draft.layer_masks.contains(&LayerMask::Sliding);
        DraftFileContents {
            draft,
            quirks,
            hidden: target.hidden,
            vocab: target.vocab,
            target_layers: target.layers.len(),
            theta: match quirks.theta_factor {
                0.0 => draft.theta,
                off => draft.theta * off,
            },
            window: draft
                .window
                .map(|window| window as i32 + quirks.window_offset),
            causal: if quirks.flip_causal {
                Some(!draft.causal.unwrap_or(slides))
            } else {
                draft.causal
            },
            mask: quirks.mask.unwrap_or(draft.mask),
            capture_layers: draft.capture_layers.iter().map(|tap| *tap as i32).collect(),
        }
    }

    fn capture_layers(&self, shift: i32) -> Vec<i32> {
        let off = shift + self.quirks.capture_layers_offset;
        self.capture_layers.iter().map(|tap| tap + off).collect()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let tensor = |name: String, rows, cols| Tensor { name, rows, cols };
        let (hidden, ffn) = (self.hidden, self.draft.ffn);
        let (heads, kv_heads, dim) = self.draft.heads;
        let mut all = vec![
            tensor("fc".to_owned(), hidden, self.capture_layers.len() * hidden),
            tensor("hidden_norm".to_owned(), 1, hidden),
            tensor("norm".to_owned(), 1, hidden),
        ];
        for i in 0..self.draft.layer_masks.len() {
            let mut put = |name: &str, rows, cols| {
                all.push(tensor(format!("layers.{i}.{name}"), rows, cols));
            };
            put("input_layernorm", 1, hidden);
            put("post_attention_layernorm", 1, hidden);
            put("self_attn.q_proj", heads * dim, hidden);
            put("self_attn.k_proj", kv_heads * dim, hidden);
            put("self_attn.v_proj", kv_heads * dim, hidden);
            put("self_attn.o_proj", hidden, heads * dim);
            put("self_attn.q_norm", 1, dim);
            put("self_attn.k_norm", 1, dim);
            put("mlp.gate_proj", ffn, hidden);
            put("mlp.up_proj", ffn, hidden);
            put("mlp.down_proj", hidden, ffn);
        }
        all
    }

    fn gguf(&self, file_format: DraftFileFormat) -> Result<Vec<u8>, GgufError> {
        let draft = self.draft;
        let (heads, kv_heads, dim) = draft.heads;
        let a = file_format.architecture();
        let u = |n: usize| Value::U32(n as u32);
        let ids = |ids: Vec<i32>| Value::Array(Array::I32(ids));
        let mut writer = GgufWriter::new();
        writer.meta("general.architecture", a.into())?;
        let mut put = |key: &str, value: Value| writer.meta(&format!("{a}.{key}"), value);
        put("block_count", u(draft.layer_masks.len()))?;
        put("context_length", u(4096))?;
        put("embedding_length", u(self.hidden))?;
        put("feed_forward_length", u(draft.ffn))?;
        put("attention.head_count", u(heads))?;
        put("attention.head_count_kv", u(kv_heads))?;
        put("attention.key_length", u(dim))?;
        put("attention.value_length", u(dim))?;
        put("attention.layer_norm_rms_epsilon", Value::F32(draft.eps))?;
        // The value that both converters to A write if the base is nested.
        let theta = match file_format {
            DraftFileFormat::A => 1e4,
            _ => self.theta,
        };
        put("rope.freq_base", Value::F32(theta))?;
        match file_format {
            DraftFileFormat::C => {
                put("block_size", u(draft.block))?;
                put("target_layers", ids(self.capture_layers(1)))?;
                put(
                    "rope.dimension_sections",
                    ids(vec![dim as i32 / 2, 0, 0, 0]),
                )?;
                if let Some(causal) = self.causal {
                    put("attention.causal", Value::Bool(causal))?;
                }
            }
            _ => {
                put("dflash.block_size", u(draft.block))?;
                put("dflash.target_layer_ids", ids(self.capture_layers(0)))?;
                put("dflash.mask_token_id", Value::U32(self.mask))?;
                put("vocab_size", u(self.vocab))?;
                // Some converters write the target's depth to this key.
                put("dflash.n_target_layers", u(64))?;
            }
        }
        if let Some(window) = self.window.filter(|_| file_format != DraftFileFormat::A) {
            let slides = draft
                .layer_masks
                .iter()
                .map(|sight| *sight == LayerMask::Sliding);
            put("attention.sliding_window", Value::U32(window as u32))?;
            let pattern = Value::Array(Array::Bool(slides.collect()));
            put("attention.sliding_window_pattern", pattern)?;
        }
        if file_format == DraftFileFormat::C {
            writer.meta("tokenizer.ggml.mask_token_id", Value::U32(self.mask))?;
        }
        let matrices = self.quirks.ty.unwrap_or(QuantType::F32);
        let tensors = self.tensors();
        let ty = |tensor: &Tensor| match tensor.kind() {
            TensorKind::Norm => QuantType::F32,
            TensorKind::Matrix => matrices,
        };
        for tensor in &tensors {
            let dims = [tensor.cols as u64, tensor.rows as u64];
            let dims = if tensor.rows == 1 { &dims[..1] } else { &dims };
            writer.tensor(&tensor.in_gguf(file_format), ty(tensor), dims)?;
        }
        let mut body = writer.start(Vec::new())?;
        for tensor in &tensors {
            body.write(&tensor.bytes(draft.name, ty(tensor)))?;
        }
        body.finish()
    }

    fn write_safetensors(&self, folder: &Path) -> Result<(), GoldenError> {
        let draft = self.draft;
        let (heads, kv_heads, dim) = draft.heads;
        let kind = |sight: &LayerMask| match sight {
            LayerMask::Sliding => "\"sliding_attention\"",
            LayerMask::Full => "\"full_attention\"",
        };
        let kinds: Vec<&str> = draft.layer_masks.iter().map(kind).collect();
        let window = self.window.map_or("null".to_owned(), |n| n.to_string());
        let causal = self.causal.map_or("null".to_owned(), |c| c.to_string());
        let config = format!(
            r#"{{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": {hidden},
 "num_hidden_layers": {layers}, "intermediate_size": {ffn}, "num_attention_heads": {heads},
 "num_key_value_heads": {kv_heads}, "head_dim": {dim}, "vocab_size": {vocab}, "rms_norm_eps": {eps},
 "rope_parameters": {{"rope_theta": {theta}, "rope_type": "default"}}, "num_target_layers": {target_layers},
 "use_sliding_window": false, "sliding_window": {window}, "is_causal": {causal}, "layer_types": [{kinds}],
 "dflash_config": {{"mask_token_id": {mask}, "target_layer_ids": {capture_layers:?}, "block_size": {block}}}}}"#,
            hidden = self.hidden,
            layers = draft.layer_masks.len(),
            ffn = draft.ffn,
            vocab = self.vocab,
            eps = draft.eps,
            theta = self.theta,
            target_layers = self.target_layers,
            kinds = kinds.join(", "),
            mask = self.mask,
            capture_layers = self.capture_layers(0),
            block = draft.block,
        );
        write(folder, "config.json", config.as_bytes())?;
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        for tensor in self.tensors() {
            let begin = data.len();
            data.extend(tensor.bytes(draft.name, QuantType::BF16));
            let shape = match tensor.rows {
                1 => format!("[{}]", tensor.cols),
                rows => format!("[{rows}, {}]", tensor.cols),
            };
            entries.push(format!(
                r#""{}.weight": {{"dtype": "BF16", "shape": {shape}, "data_offsets": [{begin}, {}]}}"#,
                tensor.name,
                data.len()
            ));
        }
        let header = format!("{{{}}}", entries.join(", "));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        write(folder, "model.safetensors", &bytes)
    }
}
