//! From a file to everything a server needs of a model.

use std::path::Path;
use std::sync::Arc;

use contract::{ModelSpec, Vocab, WeightSource};
use gguf::{GgufFile, Mapped};

use crate::card::Card;
use crate::error::ModelError;
use crate::family::{self, Trunk};
use crate::hash;
use crate::source::Source;
use crate::vocab;

/// A model read from a file: what it is, how it speaks, and where its bytes are.
#[derive(Clone)]
pub struct Loaded {
    /// The model as data.
    pub spec: Arc<ModelSpec>,
    /// Its vocabulary and chat templates.
    pub vocab: Vocab,
    /// Its bytes.
    pub weights: Arc<dyn WeightSource>,
    /// What is known of it for people.
    pub facts: Facts,
}

/// What is known of a file for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The model's own name, or the file's stem.
    pub name: String,
    /// The architecture's name in the file.
    pub architecture: String,
    /// Weights in all.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
}

impl Loaded {
    /// The defaults of the model's family, for when there is no card.
    pub fn default_card(&self) -> Card {
        Card::of_architecture(&self.facts.architecture)
    }
}

/// Maps and reads a GGUF file, or the first of a split one.
pub fn load(path: &Path) -> Result<Loaded, ModelError> {
    from_file(GgufFile::open(path)?)
}

/// Reads a GGUF file held in memory, such as one embedded in the executable. `name` is for messages.
pub fn load_bytes(name: &str, bytes: Mapped) -> Result<Loaded, ModelError> {
    from_file(GgufFile::from_bytes(name, bytes)?)
}

fn from_file(file: GgufFile) -> Result<Loaded, ModelError> {
    let source = Source::new(&file)?;
    let family = family::of(&source)?;
    let trunk = Trunk::read(&source)?;
    let rows = match source.dims("token_embd.weight").as_deref() {
        Some([_, rows]) => usize::try_from(*rows).unwrap_or(usize::MAX),
        _ => 0,
    };
    let embedding = source.matrix("token_embd.weight", rows.max(1), trunk.hidden)?;
    let head = if source.has("output.weight") {
        source.matrix("output.weight", rows, trunk.hidden)?
    } else {
        embedding.clone()
    };
    let vocab = vocab::read(&source, rows)?;
    let name = match source.read(|meta| meta.text("general.name"))? {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => source.file_name().to_owned(),
    };
    let spec = ModelSpec {
        name: name.clone(),
        hash: hash::of(source.architecture(), &file),
        vocab: rows,
        hidden: trunk.hidden,
        trained_context: trunk.context,
        norm_eps: trunk.norm_eps,
        embedding,
        layers: family.layers(&source, &trunk)?,
        final_norm: source.vector("output_norm.weight", trunk.hidden)?,
        head,
    };
    let facts = Facts {
        name,
        architecture: source.architecture().to_owned(),
        parameters: file.tensors().iter().map(|t| t.values()).sum(),
        bytes: file
            .tensors()
            .iter()
            .filter_map(|t| t.n_bytes())
            .map(|n| n as u64)
            .sum(),
    };
    drop(source);
    Ok(Loaded {
        spec: Arc::new(spec),
        vocab,
        weights: Arc::new(file),
        facts,
    })
}
