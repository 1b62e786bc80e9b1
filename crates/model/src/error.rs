//! Why a model was not loaded or made, sorted by what the caller can do about it.

use gguf::GgufError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container was refused; the error names file, place and field.
    #[error(transparent)]
    Container(#[from] GgufError),
    /// The file is of a family, or of a variant of one, that cannot be run. Use another file.
    #[error("{file}: {what} is not supported; {instead}")]
    Unsupported {
        /// The file.
        file: String,
        /// Which family or variant.
        what: String,
        /// What to use instead.
        instead: String,
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
    /// A draft and a target that do not belong together. Use the draft that was made for the
    /// target.
    #[error("{draft} does not draft for {target}: {detail}")]
    Misfit {
        /// The draft's file.
        draft: String,
        /// The target's name.
        target: String,
        /// What does not fit, on both sides.
        detail: String,
    },
    /// There is no recipe or synthetic model of this name.
    #[error("{what} {given}: unknown, use one of {known}")]
    Unknown {
        /// What kind of name it is.
        what: &'static str,
        /// What was given.
        given: String,
        /// The names that exist.
        known: String,
    },
}
