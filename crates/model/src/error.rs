//! Errors of loading and making models, one variant per remedy of the caller.

use gguf::GgufError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container was refused; the error names file, position and field.
    #[error(transparent)]
    Container(#[from] GgufError),
    /// An unsupported family or variant. Use another file.
    #[error("{file}: {what} is not supported; {instead}")]
    Unsupported {
        /// The file.
        file: String,
        /// The family or variant.
        what: String,
        /// An alternative.
        instead: String,
    },
    /// A metadata key is missing or invalid.
    #[error("{file}: key {key}: {detail}")]
    Key {
        /// The file.
        file: String,
        /// The key, with the element's index if an element is invalid.
        key: String,
        /// The expected and the found value.
        detail: String,
    },
    /// A tensor is missing or unexpected, or has a wrong shape or an unsupported type.
    #[error("{file}: tensor {tensor}: {detail}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The expected and the found tensor.
        detail: String,
    },
    /// An importance matrix that cannot be used: unreadable, damaged or of another model.
    #[error("{file}: {detail}")]
    Importance {
        /// The file.
        file: String,
        /// The fault, with the tensor where there is one.
        detail: String,
    },
    /// A draft and a target that do not belong together. Use the draft that was made for the
    /// target.
    #[error("{draft} does not draft for {target}: {detail}")]
    DraftMismatch {
        /// The draft's file.
        draft: String,
        /// The target's name.
        target: String,
        /// The mismatch, with both values.
        detail: String,
    },
    /// No recipe or synthetic model has this name.
    #[error("{what} {given}: unknown, use one of {known}")]
    Unknown {
        /// The kind of name.
        what: &'static str,
        /// The given name.
        given: String,
        /// The known names.
        known: String,
    },
}
