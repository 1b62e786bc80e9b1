//! Why a model was not loaded or made, sorted by what the caller can do about it.

use std::io;
use std::path::PathBuf;

use gguf::GgufError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container was refused; the error names file, place and field.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file is of a family, or of a variant of one, that cannot be run. Use another file.
    #[error("{file}: {detail}")]
    Family {
        /// The file.
        file: String,
        /// Which family or variant, and what is supported instead.
        detail: String,
    },
    /// A metadata key is missing or makes no sense.
    #[error("{file}: key {key}: {detail}")]
    Key {
        /// The file.
        file: String,
        /// The key, with an element's index where it is about one.
        key: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A tensor is missing, of a wrong shape, of a type that cannot be read, or unexpected.
    #[error("{file}: tensor {tensor}: {detail}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A model card is not a JSON object. A card never prevents a start: warn and go on without it.
    #[error("the model card is not usable: {detail}")]
    Card {
        /// What was wrong.
        detail: String,
    },
    /// There is no recipe or synthetic model of this name.
    #[error("{name} is not a {what}; there are {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What it should have been.
        what: &'static str,
        /// The names there are.
        known: String,
    },
    /// An output file could not be written.
    #[error("{path}: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's words.
        source: io::Error,
    },
}
