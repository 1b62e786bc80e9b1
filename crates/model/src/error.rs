//! Why a file is not a model we can run.

use gguf::GgufError;

/// An error of loading, judging or writing a model file. Each names the file.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container itself is broken or cannot be read.
    #[error(transparent)]
    Container(#[from] GgufError),
    /// A model of a kind this program does not run.
    #[error("{file}: {what} is not supported; {instead}")]
    Unsupported {
        /// The file.
        file: String,
        /// The architecture or variant.
        what: String,
        /// What to use instead.
        instead: String,
    },
    /// A metadata key is missing or holds something impossible.
    #[error("{file}: key {key} {detail}")]
    Key {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A tensor is missing or has another shape than the metadata says.
    #[error("{file}: tensor {tensor} {detail}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A recipe, preset or setting that does not exist.
    #[error("{what} {given}: unknown, use one of {known}")]
    Unknown {
        /// What kind of name it is.
        what: &'static str,
        /// What was given.
        given: String,
        /// The names that exist.
        known: String,
    },
    /// Writing failed.
    #[error("cannot write {file}: {source}")]
    Write {
        /// The file.
        file: String,
        /// The system's reason.
        source: std::io::Error,
    },
}
