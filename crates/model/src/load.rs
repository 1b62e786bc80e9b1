//! Loads a model file. All checks precede any device.

use std::path::Path;
use std::sync::Arc;

use contract::{ModelSpec, QuantType, Vocab, WeightRef, WeightSource};
use gguf::{FileBytes, GgufFile};

use crate::card::{CardSampling, ModelCard};
use crate::file_type::file_type_name;
use crate::hash::model_hash;
use crate::names::{EMBEDDING, FINAL_NORM, HEAD};
use crate::reader::{Reader, key_error};
use crate::{ModelError, family, vocab};

/// Models that a file may say it was made from.
const MAX_BASE_MODELS: usize = 8;

/// A model read from a file. Its weights stay in the file and are read in place.
#[derive(Clone)]
pub struct LoadedModel {
    /// The spec for a device.
    pub spec: Arc<ModelSpec>,
    /// The data of the tokenizer.
    pub vocab: Vocab,
    /// Source of the weights; keeps the file's map alive.
    pub weights: Arc<dyn WeightSource>,
    /// Defaults of the family, with the sampling that the file recommends; a model card may replace
    /// them.
    pub card: ModelCard,
    /// Display information.
    pub info: ModelInfo,
}

impl LoadedModel {
    /// Leaves the multi-token-prediction head unused.
    pub fn drop_mtp(&mut self) {
        if self.spec.mtp.is_some() {
            Arc::make_mut(&mut self.spec).mtp = None;
        }
    }
}

/// Display information of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// The model's own name, or the file's stem.
    pub name: String,
    /// Names by which the file says what kind of model it is: those of the models it comes from.
    pub other_names: Vec<String>,
    /// The family's name in the file.
    pub architecture: String,
    /// Number of weights that the model reads; a tied head counts once.
    pub parameters: u64,
    /// Stored bytes of those weights.
    pub bytes: u64,
    /// Bytes of all parts.
    pub file_bytes: u64,
    /// Number of files.
    pub n_parts: usize,
    /// Types of the weights that the model reads, most bytes first.
    pub types: Vec<TypeShare>,
    /// Name of the quantisation, such as `Q4_K_M`: by `general.file_type`, else the type of most
    /// bytes.
    pub quantization: String,
    /// Number of weights of the multi-token-prediction head, if the file has one.
    pub mtp_parameters: Option<u64>,
    /// Tensors of the file that are not read.
    pub ignored: Vec<Arc<str>>,
}

/// The part of a model that has one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeShare {
    /// The type.
    pub ty: QuantType,
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Loads a GGUF file; for a split one, pass the first part.
///
/// # Errors
/// [`ModelError`] with the file and the key or tensor at fault.
pub fn load(path: &Path) -> Result<LoadedModel, ModelError> {
    let stem = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or("model");
    from_file(GgufFile::open(path)?, stem)
}

/// Loads a model in memory, such as the bundled one; `name` is used in messages.
///
/// # Errors
/// As [`load`].
pub fn load_bytes(name: &str, bytes: FileBytes) -> Result<LoadedModel, ModelError> {
    from_file(GgufFile::from_bytes(name, bytes)?, name)
}

/// Reads only the vocabulary. Works for files of unsupported models and files without a model.
///
/// # Errors
/// As [`load`].
pub fn load_vocab(path: &Path) -> Result<Vocab, ModelError> {
    let file = GgufFile::open(path)?;
    let rows = file
        .tensor(EMBEDDING)
        .and_then(|t| t.dims().get(1).copied());
    vocab::read(&file, rows)
}

fn from_file(file: GgufFile, stem: &str) -> Result<LoadedModel, ModelError> {
    let reader = Reader::new(&file)?;
    let architecture = reader.architecture.to_owned();
    let trunk = family::read(&reader)?;
    let rows = file
        .tensor(EMBEDDING)
        .and_then(|t| t.dims().get(1).copied());
    let vocab = vocab::read(&file, rows)?;
    let (n_vocab, hidden) = (vocab.tokens.len(), trunk.hidden);
    let embedding = reader.matrix(EMBEDDING, n_vocab, hidden)?;
    let final_norm = reader.vector(FINAL_NORM, hidden)?;
    let head = if reader.has(HEAD) {
        reader.matrix(HEAD, n_vocab, hidden)?
    } else {
        embedding.clone()
    };
    let n_blocks = trunk.layers.len() + usize::from(trunk.mtp.is_some());
    let ignored = reader.unused_tensors(n_blocks)?;
    if !ignored.is_empty() {
        tracing::info!(
            tensors = ignored.len(),
            file = file.name(),
            "tensors outside the model ignored"
        );
    }
    let name = match file
        .meta()
        .text("general.name")
        .map_err(|e| key_error(&file, e))?
    {
        Some(name) if !name.trim().is_empty() => name.to_owned(),
        _ => stem.to_owned(),
    };
    let spec = ModelSpec {
        name: name.clone(),
        hash: model_hash(&file),
        vocab: n_vocab,
        hidden,
        trained_context: trunk.trained_context,
        norm_eps: trunk.norm_eps,
        embedding,
        embedding_scale: trunk.embedding_scale,
        layers: trunk.layers,
        final_norm,
        head,
        mtp: trunk.mtp,
    };
    let types = type_shares(&spec);
    let values = |weights: Vec<&WeightRef>| weights.iter().map(|w| w.values() as u64).sum();
    let info = ModelInfo {
        name,
        // A key of another type says as little as none.
        other_names: other_names(|key| {
            let text = file.meta().text(key).ok().flatten()?;
            (!text.trim().is_empty()).then(|| text.to_owned())
        }),
        quantization: quantization(&file, &types),
        mtp_parameters: spec.mtp.as_ref().map(|mtp| values(mtp.weights(&spec))),
        parameters: values(spec.weights()),
        bytes: types.iter().map(|share| share.bytes).sum(),
        file_bytes: file.size_bytes(),
        n_parts: file.n_parts(),
        types,
        architecture,
        ignored,
    };
    let card = ModelCard {
        sampling: CardSampling::of_file(&file),
        ..ModelCard::of_architecture(&info.architecture)
    };
    Ok(LoadedModel {
        spec: Arc::new(spec),
        vocab,
        weights: Arc::new(file),
        card,
        info,
    })
}

/// The model's basename with its size and finetune, and the models that it was made from, by the
/// text of a key.
fn other_names(text: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let parts = ["basename", "size_label", "finetune"];
    let parts: Vec<String> = parts
        .iter()
        .filter_map(|part| text(&format!("general.{part}")))
        .collect();
    let own = text("general.basename").map(|_| parts.join("-"));
    let bases = (0..MAX_BASE_MODELS).map_while(|i| text(&format!("general.base_model.{i}.name")));
    own.into_iter().chain(bases).collect()
}

fn quantization(file: &GgufFile, types: &[TypeShare]) -> String {
    // A key of another type says as little as none.
    let stated = file.meta().integer("general.file_type").ok().flatten();
    let stated = stated.and_then(|value| file_type_name(u32::try_from(value).ok()?));
    match (stated, types.first()) {
        (Some(name), _) => name.to_owned(),
        (None, Some(share)) => format!("{:?}", share.ty),
        (None, None) => String::new(),
    }
}

fn type_shares(spec: &ModelSpec) -> Vec<TypeShare> {
    let mut shares: Vec<TypeShare> = Vec::new();
    for weight in spec.weights() {
        let bytes = weight.bytes() as u64;
        match shares.iter_mut().find(|share| share.ty == weight.ty) {
            Some(share) => {
                share.tensors += 1;
                share.bytes += bytes;
            }
            None => shares.push(TypeShare {
                ty: weight.ty,
                tensors: 1,
                bytes,
            }),
        }
    }
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_are_the_basename_with_its_parts_and_the_base_models() {
        let of = |keys: &[(&str, &str)]| {
            other_names(|key| {
                let found = keys.iter().find(|(known, _)| *known == key);
                found.map(|(_, text)| (*text).to_owned())
            })
        };
        let all = [
            ("general.basename", "Qwen3"),
            ("general.finetune", "Instruct-2507"),
            ("general.size_label", "4B"),
            ("general.base_model.0.name", "Qwen3 4B Base"),
            ("general.base_model.1.name", "Other"),
        ];
        let expected = ["Qwen3-4B-Instruct-2507", "Qwen3 4B Base", "Other"];
        assert_eq!(of(&all), expected);
        assert_eq!(of(&all[1..3]), Vec::<String>::new());
    }
}
