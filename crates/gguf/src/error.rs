//! Why a file was refused or could not be written, sorted by what the caller can do about it.

use std::io;
use std::path::PathBuf;

/// An error of this crate. Every variant about a file names it.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system refused; fix the path, the rights or the disk.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's words.
        source: io::Error,
    },
    /// This is some other kind of file.
    #[error("{file} is not a GGUF file: it begins with {found}, not \"GGUF\"")]
    NotGguf {
        /// The file.
        file: String,
        /// The first bytes, escaped.
        found: String,
    },
    /// A GGUF file of a version this reader does not know; convert it again with current tools.
    #[error("{file} is GGUF version {version}; versions 2 and 3 are supported, convert it again")]
    Version {
        /// The file.
        file: String,
        /// The version it says.
        version: u32,
    },
    /// A GGUF file written for big-endian machines.
    #[error("{file} is a big-endian GGUF file; convert it to little-endian")]
    BigEndian {
        /// The file.
        file: String,
    },
    /// The bytes do not make sense; the file is damaged or hostile.
    #[error("{file}: {place}, field {field} at byte {offset}: {detail}")]
    Malformed {
        /// The file.
        file: String,
        /// Which part: the header, a key, a tensor.
        place: String,
        /// Which field of that part.
        field: &'static str,
        /// Where the field begins, in bytes from the start of the file.
        offset: u64,
        /// What was found and what the limit is.
        detail: String,
    },
    /// The parts of a split file do not fit together; get all parts from one place.
    #[error("{file}: {detail}")]
    Split {
        /// The part at fault.
        file: String,
        /// What does not fit.
        detail: String,
    },
    /// A key holds something else than was asked for.
    #[error("key {key} holds {found}, expected {expected}")]
    Meta {
        /// The key.
        key: String,
        /// What a reader of this key needs.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// The writer was asked for something the format cannot hold. A defect in the caller.
    #[error("{what} cannot be written: {detail}")]
    Unwritable {
        /// The key or tensor.
        what: String,
        /// Why not.
        detail: String,
    },
    /// Writing failed.
    #[error("writing the file: {0}")]
    Write(#[source] io::Error),
}
