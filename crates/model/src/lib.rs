//! Reads a model file to a [`contract::ModelSpec`]: families, vocabularies, cards. Also writes
//! models: quantisation recipes and synthetic models.
//!
//! One module per family turns keys and tensors into layers; its checks fail before a device sees
//! anything. Recipes choose each tensor's type. Synthetic models have exact shapes and random
//! weights, for tests and measurements.
//!
//! This crate has no devices, tokenizers or settings. Family names occur only here.
//!
//! Start with [`load`].

#![forbid(unsafe_code)]

mod card;
mod draft;
mod error;
mod family;
mod file_type;
mod fim;
mod hash;
pub mod importance;
mod load;
pub mod markup;
mod names;
pub mod quantize;
mod reader;
pub mod recipe;
pub mod synth;
mod vocab;

pub use card::{CardDraft, CardSampling, ModelCard};
pub use draft::{
    DraftFile, DraftFormat, DraftKind, DraftMetadata, DraftOptions, LoadedDraft, load_draft,
    load_draft_bytes,
};
pub use error::ModelError;
pub use gguf::FileBytes;
pub use importance::ImportanceMatrix;
pub use load::{LoadedModel, ModelInfo, TypeShare, load, load_bytes, load_vocab};
