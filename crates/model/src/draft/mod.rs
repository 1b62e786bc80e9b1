//! From a draft's file to a [`contract::DraftSpec`] that fits its target.
//!
//! Drafts come in two containers and four file formats: the publisher's safetensors with a
//! `config.json` beside them, and three dialects of GGUF. What the four say is brought into one
//! form, [`DraftMetadata`]; shapes of tensors are believed before keys are; what does not fit the
//! target is refused by name.
//!
//! Reading order: [`dialect`] and [`config`] (what the file formats are), `facts` (the one form),
//! `fit` (the checks).

mod config;
mod gguf_metadata;
mod match_target;
mod metadata;
mod safetensors;
mod tensors;
mod unsupported;

use std::path::Path;
use std::sync::Arc;

use contract::{DraftSpec, ModelHash, ModelSpec, WeightSource};
use gguf::{FileBytes, GgufFile};

use crate::ModelError;
use crate::hash::{bytes_hash, model_hash};
use crate::reader::key_error;
use safetensors::Safetensors;
use tensors::DraftTensors;

pub use metadata::{DraftFormat, DraftMetadata};

/// What a user may say about a draft beyond what its file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftOptions {
    /// The sliding window of all layers but the last, for files whose converter dropped it.
    pub window: Option<usize>,
}

/// A draft's file, read but not yet held against a target.
pub struct DraftFile {
    /// What the file says of the draft.
    pub facts: DraftMetadata,
    /// The draft's own name, or the file's stem.
    pub name: String,
    /// The path as given, or the name given to bytes in memory.
    pub file: String,
    /// Bytes of the tensors, all together.
    pub bytes: u64,
    hash: ModelHash,
    directory: DraftTensors,
    weights: Arc<dyn WeightSource>,
}

/// A draft that fits its target. Its weights stay in the file and are read in place.
#[derive(Clone)]
pub struct LoadedDraft {
    /// What a device needs to run it beside the target.
    pub spec: Arc<DraftSpec>,
    /// Where the weights are; keeps the map of the file alive.
    pub weights: Arc<dyn WeightSource>,
    /// What the file said.
    pub facts: DraftMetadata,
}

/// Loads the draft of `target`: a GGUF file, a `.safetensors` file with its `config.json` beside
/// it, or the folder of the two.
///
/// # Errors
/// [`ModelError`], naming the file and what in it is at fault or does not fit.
pub fn load_draft(
    path: &Path,
    target: &ModelSpec,
    options: DraftOptions,
) -> Result<LoadedDraft, ModelError> {
    DraftFile::open(path)?.fit(target, options)
}

/// Loads a draft that is in memory, in a GGUF container, such as the one in the executable.
///
/// # Errors
/// As [`load_draft`].
pub fn load_draft_bytes(
    name: &str,
    bytes: FileBytes,
    target: &ModelSpec,
    options: DraftOptions,
) -> Result<LoadedDraft, ModelError> {
    DraftFile::of_gguf(GgufFile::from_bytes(name, bytes)?, name)?.fit(target, options)
}

impl DraftFile {
    /// Opens a draft's file and reads what it says.
    ///
    /// # Errors
    /// As [`load_draft`], but for what takes a target to see.
    pub fn open(path: &Path) -> Result<DraftFile, ModelError> {
        let stem = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or("draft");
        let is_tensors = path.extension().is_some_and(|end| end == "safetensors");
        if path.is_dir() || is_tensors {
            DraftFile::of_safetensors(path, stem)
        } else {
            DraftFile::of_gguf(GgufFile::open(path)?, stem)
        }
    }

    fn of_gguf(file: GgufFile, stem: &str) -> Result<DraftFile, ModelError> {
        let directory = DraftTensors::of_gguf(&file);
        unsupported::refuse_gguf(&file, &directory)?;
        let facts = gguf_metadata::read(&file)?;
        let name = file
            .meta()
            .text("general.name")
            .map_err(|e| key_error(&file, e))?
            .filter(|name| !name.trim().is_empty())
            .unwrap_or(stem)
            .to_owned();
        Ok(DraftFile {
            facts,
            name,
            file: file.name().to_owned(),
            bytes: directory.bytes(),
            hash: model_hash(&file),
            directory,
            weights: Arc::new(file),
        })
    }

    fn of_safetensors(path: &Path, stem: &str) -> Result<DraftFile, ModelError> {
        let (config, file) = Safetensors::open(path)?;
        let directory = file.directory();
        unsupported::refuse_config(&config, &directory)?;
        let facts = config::read(&config)?;
        Ok(DraftFile {
            facts,
            name: stem.to_owned(),
            file: file.name().to_owned(),
            bytes: directory.bytes(),
            hash: bytes_hash(&config.text, file.samples()),
            directory,
            weights: Arc::new(file),
        })
    }

    /// Checks the draft against its target and says how to run it.
    ///
    /// # Errors
    /// [`ModelError::Misfit`] where the two do not belong together; others where the file is at
    /// fault.
    pub fn fit(
        &self,
        target: &ModelSpec,
        options: DraftOptions,
    ) -> Result<LoadedDraft, ModelError> {
        Ok(LoadedDraft {
            spec: Arc::new(match_target::fit(self, target, options)?),
            weights: Arc::clone(&self.weights),
            facts: self.facts.clone(),
        })
    }
}
