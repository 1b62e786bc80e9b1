//! From a GGUF file to a model as data.
//!
//! What is here: reading a file's metadata and tensor names, one small module per family, into a
//! [`contract::ModelSpec`] and a [`contract::Vocab`]; model cards; the recipes that say which weight type
//! each tensor gets; files with random weights.
//!
//! What must not be here: arithmetic on activations, devices, chat.
//!
//! Start with [`load()`].

#![forbid(unsafe_code)]

mod card;
mod error;
mod family;
mod hash;
mod load;
pub mod recipe;
mod source;
pub mod synth;
mod vocab;

pub use card::{Card, CardSampling};
pub use error::ModelError;
pub use load::{Facts, Loaded, load, load_bytes};
