//! The GGUF container: reading it without trusting it, and writing it.
//!
//! What is here: the memory map, the header, the metadata, the tensor directory, split files, a
//! streaming writer. A [`GgufFile`] is a [`contract::WeightSource`], so devices read weights in
//! place.
//!
//! What is not here: any model. Which keys and tensors mean what is `model`'s business.
//!
//! Nothing in a file is accepted before it is checked: counts and lengths against the bytes that
//! are left, dimensions against overflow, offsets against the file and against each other. Every
//! refusal is a [`GgufError`] that names the file, the key or tensor, the field and its byte
//! offset.
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
mod value;
mod write;

pub use bytes::FileBytes;
pub use error::GgufError;
pub use file::GgufFile;
pub use meta::Meta;
pub use tensors::{TensorInfo, TensorType};
pub use value::{Array, GgufString, Value};
pub use write::{GgufBody, GgufWriter};
