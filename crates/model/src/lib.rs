//! From a model file to a [`contract::ModelSpec`], and back: families, vocabularies, cards,
//! quantisation recipes, synthetic models.
//!
//! What is here: one small module per family that turns keys and tensors into layers, with checks
//! that fail before a device sees anything; which type each tensor gets when a file is quantized;
//! model files with exact shapes and random weights, for tests and measurements.
//!
//! What is not here: devices, tokenizers, settings. Family names occur here and nowhere else.
//!
//! Start with [`load`].

#![forbid(unsafe_code)]

mod card;
mod draft;
mod error;
mod family;
mod hash;
mod load;
mod names;
pub mod quantize;
mod reader;
pub mod recipe;
pub mod synth;
mod vocab;

pub use card::{CardSampling, ModelCard};
pub use draft::{
    DraftFile, DraftFormat, DraftMetadata, DraftOptions, LoadedDraft, load_draft, load_draft_bytes,
};
pub use error::ModelError;
pub use gguf::FileBytes;
pub use load::{LoadedModel, ModelInfo, TypeShare, load, load_bytes, load_vocab};
