//! Reads a draft's file and makes a [`contract::DraftSpec`] for its target.
//!
//! Drafts have four file formats: the publisher's safetensors with a `config.json`, and three kinds
//! of GGUF metadata. All become one [`DraftMetadata`]. Tensor shapes take precedence over keys. A
//! mismatch with the target is refused by name.
//!
//! Reading order: [`kind`] (which of three kinds), [`gguf_metadata`] and [`config`] (the file
//! formats), [`metadata`] (the common form), [`match_target`], [`layer`] and [`heads`] (the
//! checks).

mod config;
mod gguf_metadata;
mod heads;
mod kind;
mod layer;
mod match_target;
mod metadata;
mod safetensors;
mod tensor_names;
mod tensors;

use std::path::Path;
use std::sync::Arc;

use contract::{DraftSpec, ModelHash, ModelSpec, WeightSource};
use gguf::{FileBytes, GgufFile};

use crate::ModelError;
use crate::hash::{bytes_hash, model_hash};
use crate::reader::key_error;
use safetensors::Safetensors;
use tensors::DraftTensors;

pub use metadata::{DraftFormat, DraftKind, DraftMetadata};

/// A user's options for a draft, besides its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftOptions {
    /// The sliding window of all layers but the last, for files without one.
    pub window: Option<usize>,
    /// Rows of a pass, from the file's block to twice as many; `None` for the block.
    pub width: Option<usize>,
}

/// A draft's file that is read but not yet checked against a target.
pub struct DraftFile {
    /// The draft's metadata.
    pub metadata: DraftMetadata,
    /// The draft's own name, or the file's stem.
    pub name: String,
    /// The path, or the name of bytes in memory.
    pub file: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    hash: ModelHash,
    directory: DraftTensors,
    /// The target's id of each token of the draft, if it has a part of the vocabulary.
    vocab_map: Option<Vec<i64>>,
    weights: Arc<dyn WeightSource>,
}

/// A draft that matches its target. Its weights stay in the file and are read in place.
#[derive(Clone)]
pub struct LoadedDraft {
    /// The spec for a device.
    pub spec: Arc<DraftSpec>,
    /// Source of the weights; keeps the file's map alive.
    pub weights: Arc<dyn WeightSource>,
    /// The file's metadata.
    pub metadata: DraftMetadata,
}

/// Loads the draft of `target`: a GGUF file, a `.safetensors` file beside its `config.json`, or the
/// folder of both.
///
/// # Errors
/// [`ModelError`] with the file and the invalid or mismatched part.
pub fn load_draft(
    path: &Path,
    target: &ModelSpec,
    options: DraftOptions,
) -> Result<LoadedDraft, ModelError> {
    DraftFile::open(path)?.fit(target, options)
}

/// Loads a draft from a GGUF container in memory, such as the bundled one.
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
    /// Opens a draft's file and reads its metadata.
    ///
    /// # Errors
    /// As [`load_draft`], except for mismatches with a target.
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
        let kind = kind::of_gguf(&file, &directory)?;
        let metadata = gguf_metadata::read(&file, kind)?;
        let name = file
            .meta()
            .text("general.name")
            .map_err(|e| key_error(&file, e))?
            .filter(|name| !name.trim().is_empty())
            .unwrap_or(stem)
            .to_owned();
        Ok(DraftFile {
            metadata,
            name,
            file: file.name().to_owned(),
            bytes: directory.bytes(),
            hash: model_hash(&file),
            directory,
            vocab_map: file.integers("d2t"),
            weights: Arc::new(file),
        })
    }

    fn of_safetensors(path: &Path, stem: &str) -> Result<DraftFile, ModelError> {
        let (config, file) = Safetensors::open(path)?;
        let directory = file.directory();
        let kind = kind::of_config(&config, &directory)?;
        let metadata = config::read(&config, kind)?;
        // The publisher stores how far a target's id is from the draft's.
        let offsets = file.integers("d2t");
        let absolute = |(id, offset): (usize, i64)| offset.saturating_add(id as i64);
        let vocab_map = offsets.map(|offsets| offsets.into_iter().enumerate().map(absolute));
        let vocab_map = vocab_map.map(Iterator::collect);
        Ok(DraftFile {
            metadata,
            name: stem.to_owned(),
            file: file.name().to_owned(),
            bytes: directory.bytes(),
            hash: bytes_hash(&config.text, file.samples()),
            directory,
            vocab_map,
            weights: Arc::new(file),
        })
    }

    /// Checks the draft against its target and builds its spec.
    ///
    /// # Errors
    /// [`ModelError::DraftMismatch`] if the two do not belong together; other variants if the file
    /// is invalid.
    pub fn fit(
        &self,
        target: &ModelSpec,
        options: DraftOptions,
    ) -> Result<LoadedDraft, ModelError> {
        Ok(LoadedDraft {
            spec: Arc::new(match_target::fit(self, target, options)?),
            weights: Arc::clone(&self.weights),
            metadata: self.metadata.clone(),
        })
    }
}
