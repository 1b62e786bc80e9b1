//! Synthetic models: the exact shapes of real models with random weights, for tests and benchmarks.

mod draft;
mod in_memory;
mod presets;
mod random_blocks;
mod shape;
mod vocabulary;

use std::io::Write;

use contract::{QuantType, quant};
use gguf::{Array, GgufWriter, Value};

use crate::error::ModelError;
use crate::recipe::{self, FileShape, Recipe};
use presets::PRESETS;
use random_blocks::{BlockPool, WeightRng};
use shape::{
    CONV_TAPS, DELTA_DIM, Fill, HYBRID_ROPE_DIMS, INTERVAL, Planned, SynthDense, SynthKind,
    SynthMtp, SynthShape, UNIFORM,
};
use vocabulary::Vocabulary;

pub use draft::{SynthDraft, draft_for, draft_of};

/// The bundled model's chat template, which behaves like the family's own.
const TEMPLATE: &str = include_str!("../../../../models/ember/chat_template.jinja");
/// Bytes of a tensor that are generated and written at once.
const PIECE_BYTES: usize = 4 << 20;

/// A synthetic model: a shape, the weight types and the seed of the random weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SynthSpec {
    shape: SynthShape,
    types: WeightTypes,
    /// Another seed gives other weights.
    pub seed: u64,
}

/// Choice of the weight types.
#[derive(Debug, Clone, Copy, PartialEq)]
enum WeightTypes {
    /// The recipe's types.
    Recipe(Recipe),
    /// The types of published files of the recipe, with more bits in the delta layers; see
    /// [`published`].
    Published(Recipe),
    /// One type for all.
    Only(QuantType),
    /// Each matrix has the next type of [`QuantType::ALL`], so that a small file has all types.
    Mixed,
}

impl SynthSpec {
    /// Parses `SHAPE:TYPES`, such as `qwen3.5-0.8b:q4_k_m`, `tiny-hybrid:iq4_xs` or
    /// `tiny-dense:mixed`. `q4_k_m-published` is the mix of published files, which benchmarks use.
    /// A hybrid shape with `+mtp`, as in `tiny-hybrid+mtp:q8_0`, has a multi-token-prediction head;
    /// with `+mtp-own`, the head has its own embedding and LM head. Behind all that, `+uniform`
    /// makes the tokens of a shape with experts choose them alike.
    ///
    /// # Errors
    /// [`ModelError::Unknown`] with the known names.
    pub fn parse(text: &str) -> Result<SynthSpec, ModelError> {
        let (name, types) = text.split_once(':').unwrap_or((text, "q4_k_m"));
        let known = || {
            let known: Vec<&str> = PRESETS.iter().map(|shape| shape.name).collect();
            let suffixes = "; +mtp or +mtp-own behind a hybrid shape adds a head, +uniform behind one \
                            with experts routes tokens to them alike";
            unknown("shape", name, known.join(", ") + suffixes)
        };
        let (base, uniform_routing) = match name.strip_suffix(UNIFORM) {
            Some(base) => (base, true),
            None => (name, false),
        };
        let mtp = [SynthMtp::Own, SynthMtp::Shared];
        let mtp = mtp.into_iter().find(|mtp| base.ends_with(mtp.suffix()));
        let mtp = mtp.unwrap_or(SynthMtp::None);
        let preset = base.strip_suffix(mtp.suffix()).unwrap_or(base);
        let preset = PRESETS.into_iter().find(|shape| shape.name == preset);
        let shape = SynthShape {
            mtp,
            uniform_routing,
            ..preset.ok_or_else(known)?
        };
        let dense_head = matches!(shape.kind, SynthKind::Dense(_)) && mtp != SynthMtp::None;
        if dense_head || uniform_routing && shape.experts.is_none() {
            return Err(known());
        }
        let only = |name: &str| {
            QuantType::ALL
                .into_iter()
                .find(|ty| ty.name().eq_ignore_ascii_case(name))
        };
        let published = types.strip_suffix("-published").and_then(Recipe::parse);
        let types = match Recipe::parse(types) {
            Some(recipe) => WeightTypes::Recipe(recipe),
            None if let Some(recipe) = published => WeightTypes::Published(recipe),
            None if types == "mixed" => WeightTypes::Mixed,
            None => WeightTypes::Only(only(types).ok_or_else(|| {
                let recipes = Recipe::ALL.iter().map(|recipe| recipe.name().to_owned());
                let all = QuantType::ALL.iter().map(|ty| ty.name().to_lowercase());
                let mut known: Vec<String> =
                    recipes.chain(all).chain(["mixed".to_owned()]).collect();
                known.sort();
                known.dedup();
                unknown("recipe", types, known.join(", "))
            })?),
        };
        Ok(SynthSpec {
            shape,
            types,
            seed: 1,
        })
    }

    /// Bytes of all tensors that [`write`](SynthSpec::write) will write.
    ///
    /// # Errors
    /// As [`write`](SynthSpec::write), before anything is written.
    pub fn data_bytes(&self) -> Result<u64, ModelError> {
        Ok(self.plan()?.0.data_bytes())
    }

    /// Writes the file into `out`, which should be buffered; `progress` gets bytes of tensors
    /// written.
    ///
    /// # Errors
    /// [`ModelError::Container`] when writing fails.
    pub fn write<W: Write>(&self, out: W, progress: &mut dyn FnMut(u64)) -> Result<W, ModelError> {
        let (writer, tensors) = self.plan()?;
        let mut body = writer.start(out)?;
        let mut random = WeightRng::new(self.seed);
        let mut pools: Vec<(QuantType, u64, BlockPool)> = Vec::new();
        let mut done = 0;
        for (tensor, ty) in tensors {
            let cols = tensor.dims[0];
            let values: u64 = tensor.dims.iter().product();
            let mut left = ty.row_bytes(usize::try_from(values).unwrap_or(usize::MAX));
            let piece = PIECE_BYTES / ty.block_bytes() * ty.block_bytes();
            let mut bytes = vec![0; left.min(piece)];
            if tensor.fill == Fill::Matrix && !pools.iter().any(|(t, c, _)| (*t, *c) == (ty, cols))
            {
                pools.push((ty, cols, BlockPool::new(ty, cols, &mut random)));
            }
            while left > 0 {
                let now = &mut bytes[..left.min(piece)];
                match pools.iter().find(|(t, c, _)| (*t, *c) == (ty, cols)) {
                    Some((_, _, pool)) if tensor.fill == Fill::Matrix => {
                        pool.fill(now, &mut random)
                    }
                    _ => draw(tensor.fill, ty, now, &mut random),
                }
                body.write(now)?;
                left -= now.len();
                done += now.len() as u64;
                progress(done);
            }
        }
        Ok(body.finish()?)
    }

    /// The whole file in memory; for the tiny shapes.
    ///
    /// # Errors
    /// As [`write`](SynthSpec::write).
    pub fn bytes(&self) -> Result<Vec<u8>, ModelError> {
        self.write(Vec::new(), &mut |_| {})
    }

    /// The metadata, the directory and the content of each tensor.
    fn plan(&self) -> Result<(GgufWriter, Vec<(Planned, QuantType)>), ModelError> {
        let shape = &self.shape;
        let mut writer = GgufWriter::new();
        metadata(shape, self.types, &mut writer)?;
        let file = FileShape {
            block_count: usize::try_from(shape.blocks()).unwrap_or(usize::MAX),
            tied: shape.tied,
            is_grouped: shape.heads >= 4 * shape.kv_heads,
            has_experts: shape.experts.is_some(),
            has_importance: true,
        };
        let mut turn = 0;
        let mut all = Vec::new();
        for tensor in shape.tensors() {
            let stays = recipe::choose(Recipe::Q8_0, file, &tensor.name, &tensor.dims);
            let ty = match self.types {
                WeightTypes::Recipe(recipe) => {
                    recipe::choose(recipe, file, &tensor.name, &tensor.dims)
                }
                WeightTypes::Published(recipe) => published(recipe, file, &tensor),
                _ if stays == QuantType::F32 => QuantType::F32,
                WeightTypes::Only(ty) => ty,
                WeightTypes::Mixed => {
                    turn += 1;
                    QuantType::ALL[turn % QuantType::ALL.len()]
                }
            };
            writer.tensor(&tensor.name, ty, &tensor.dims)?;
            all.push((tensor, ty));
        }
        Ok((writer, all))
    }
}

/// The type of a tensor in published files. Inputs of the delta layers' gates stay f32. With
/// `Q4_K_M`, the other matrices of the delta layers have 5 bits.
fn published(recipe: Recipe, file: FileShape, tensor: &Planned) -> QuantType {
    let is = |part: &str| tensor.name.ends_with(&format!(".{part}.weight"));
    if is("ssm_alpha") || is("ssm_beta") {
        return QuantType::F32;
    }
    if recipe == Recipe::Q4_K_M && (is("attn_qkv") || is("ssm_out")) {
        return QuantType::Q5_K;
    }
    recipe::choose(recipe, file, &tensor.name, &tensor.dims)
}

fn unknown(what: &'static str, given: &str, known: String) -> ModelError {
    ModelError::Unknown {
        what,
        given: given.to_owned(),
        known,
    }
}

/// Fills a small tensor of whole blocks from its distribution.
fn draw(fill: Fill, ty: QuantType, bytes: &mut [u8], random: &mut WeightRng) {
    let values: Vec<f32> = (0..bytes.len() / ty.block_bytes() * ty.block_values())
        .map(|_| match fill {
            Fill::Matrix => random.normal(),
            Fill::Norm => 1.0 + 0.1 * random.normal(),
            Fill::FaintNorm => 2e-3 * (1.0 + 0.1 * random.normal()),
            Fill::Vector => 0.05 * random.normal(),
            Fill::Decay => -random.between(-4.0, 1.4).exp(),
            Fill::DecayBias => random.between(-4.0, 0.5),
            Fill::Taps => 0.4 * random.normal(),
        })
        .collect();
    quant::quantize_row(ty, &values, bytes);
}

fn metadata(
    shape: &SynthShape,
    types: WeightTypes,
    writer: &mut GgufWriter,
) -> Result<(), ModelError> {
    let architecture = match (shape.kind, shape.experts) {
        (SynthKind::Hybrid { .. }, None) => "qwen35",
        (SynthKind::Hybrid { .. }, Some(_)) => "qwen35moe",
        (SynthKind::Dense(_), Some(_)) => "qwen3moe",
        (SynthKind::Dense(SynthDense::Qwen3), None) => "qwen3",
        (SynthKind::Dense(SynthDense::Qwen2), None) => "qwen2",
        (SynthKind::Dense(SynthDense::Llama { .. }), None) => "llama",
        (SynthKind::Dense(SynthDense::Gemma3 { .. }), None) => "gemma3",
    };
    let mut put = |key: &str, value: Value| writer.meta(key, value);
    put("general.architecture", architecture.into())?;
    put("general.name", shape.title().as_str().into())?;
    if let WeightTypes::Recipe(recipe) | WeightTypes::Published(recipe) = types {
        put("general.file_type", Value::U32(recipe.file_type()))?;
    }
    put("general.quantization_version", Value::U32(2))?;
    let count = |n: u64| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut put = |key: &str, value: Value| writer.meta(&format!("{architecture}.{key}"), value);
    put("block_count", count(shape.blocks()))?;
    if shape.mtp != SynthMtp::None {
        put("nextn_predict_layers", Value::U32(1))?;
    }
    put("context_length", Value::U32(shape.context))?;
    put("embedding_length", count(shape.hidden))?;
    match shape.experts {
        None => put("feed_forward_length", count(shape.ffn))?,
        Some(experts) => {
            put("expert_count", count(experts.count))?;
            put("expert_used_count", count(experts.used))?;
            put("expert_feed_forward_length", count(experts.width))?;
            if experts.shared_width > 0 {
                let width = count(experts.shared_width);
                put("expert_shared_feed_forward_length", width)?;
            }
        }
    }
    put("attention.head_count", count(shape.heads))?;
    put("attention.head_count_kv", count(shape.kv_heads))?;
    put("attention.key_length", count(shape.head_dim))?;
    put("attention.value_length", count(shape.head_dim))?;
    put("attention.layer_norm_rms_epsilon", Value::F32(1e-6))?;
    put("rope.freq_base", Value::F32(shape.theta))?;
    match shape.kind {
        SynthKind::Dense(SynthDense::Gemma3 { window }) => {
            put("attention.sliding_window", Value::U32(window))?;
        }
        SynthKind::Dense(_) => {}
        SynthKind::Hybrid { k_heads, v_heads } => {
            put("rope.dimension_count", Value::U32(HYBRID_ROPE_DIMS))?;
            put(
                "rope.dimension_sections",
                Value::Array(Array::I32(vec![11, 11, 10, 0])),
            )?;
            put("full_attention_interval", count(INTERVAL))?;
            put("ssm.conv_kernel", count(CONV_TAPS))?;
            put("ssm.state_size", count(DELTA_DIM))?;
            put("ssm.group_count", count(k_heads))?;
            put("ssm.time_step_rank", count(v_heads))?;
            put("ssm.inner_size", count(v_heads * DELTA_DIM))?;
        }
    }
    let vocabulary = Vocabulary::new(shape.vocab);
    let texts = |all: &[String]| {
        Value::Array(Array::String(
            all.iter().map(|text| text.as_str().into()).collect(),
        ))
    };
    let pre = if architecture.starts_with("qwen35") {
        "qwen35"
    } else {
        "qwen2"
    };
    let mut put = |key: &str, value: Value| writer.meta(&format!("tokenizer.{key}"), value);
    put("ggml.model", "gpt2".into())?;
    put("ggml.pre", pre.into())?;
    put("ggml.tokens", texts(&vocabulary.tokens))?;
    put(
        "ggml.token_type",
        Value::Array(Array::I32(vocabulary.kinds.clone())),
    )?;
    put("ggml.merges", texts(&vocabulary.merges))?;
    for (key, token) in [("eos", "<|im_end|>"), ("padding", "<|endoftext|>")] {
        if let Some(id) = vocabulary.id(token) {
            put(&format!("ggml.{key}_token_id"), Value::U32(id))?;
        }
    }
    put("ggml.add_bos_token", Value::Bool(false))?;
    put("chat_template", TEMPLATE.into())?;
    Ok(())
}

#[cfg(test)]
mod tests;
