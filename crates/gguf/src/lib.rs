//! The GGUF container: validated reading, and writing.
//!
//! This crate has the memory map, the header, the metadata, the tensor directory, split files and a
//! streaming writer. A [`GgufFile`] is a [`contract::WeightSource`], so devices read weights in
//! place.
//!
//! It knows no model; the meaning of keys and tensors is `model`'s.
//!
//! Every value is checked before use: counts and lengths against the remaining bytes, dimensions
//! against overflow, offsets against the file and each other. Every refusal is a [`GgufError`] that
//! names the file, the key or tensor, the field and its byte offset.
//!
//! Start with [`GgufFile::open`] and [`GgufWriter`].

#![deny(unsafe_code)]

mod bytes;
mod cursor;
mod error;
mod file;
mod meta;
mod parse;
mod split;
mod tensors;
mod truncation;
mod value;
mod write;

pub use bytes::FileBytes;
pub use error::GgufError;
pub use file::GgufFile;
pub use meta::Meta;
pub use tensors::{TensorInfo, TensorType};
pub use truncation::{OnTruncation, TRUNCATED_EXIT, truncated_file, watch_truncation};
pub use value::{Array, GgufString, Value};
pub use write::{GgufBody, GgufWriter};
