//! Errors of reading and writing, one variant per remedy of the caller.

use std::io;
use std::path::PathBuf;

/// An error of this crate. Errors about a file name it.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// An error of the operating system: fix the path, the permissions or the disk.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file has another format.
    #[error("{file} is not a GGUF file: it begins with {found}, not \"GGUF\"")]
    NotGguf {
        /// The file.
        file: String,
        /// The first bytes, escaped.
        found: String,
    },
    /// A GGUF version that this reader does not support; convert the file again with current tools.
    #[error("{file} is GGUF version {version}; versions 2 and 3 are supported, convert it again")]
    Version {
        /// The file.
        file: String,
        /// Its version.
        version: u32,
    },
    /// A GGUF file written for big-endian machines.
    #[error("{file} is a big-endian GGUF file; convert it to little-endian")]
    BigEndian {
        /// The file.
        file: String,
    },
    /// Invalid bytes: the file is damaged or hostile.
    #[error("{file}: {place}, field {field} at byte {offset}: {detail}")]
    Malformed {
        /// The file.
        file: String,
        /// The part: the header, a key or a tensor.
        place: String,
        /// The field of that part.
        field: &'static str,
        /// Where the field begins, in bytes from the start of the file.
        offset: u64,
        /// The found value and the limit.
        detail: String,
    },
    /// The parts of a split file do not belong together; get all parts from one source.
    #[error("{file}: {detail}")]
    Split {
        /// The inconsistent part.
        file: String,
        /// The inconsistency.
        detail: String,
    },
    /// A key holds another type than expected.
    #[error("key {key} holds {found}, expected {expected}")]
    Meta {
        /// The key.
        key: String,
        /// The expected type.
        expected: &'static str,
        /// The found type or value.
        found: String,
    },
    /// The format cannot hold the given data. A defect in the caller.
    #[error("{what} cannot be written: {detail}")]
    Unwritable {
        /// The key or tensor.
        what: String,
        /// The reason.
        detail: String,
    },
    /// Writing failed.
    #[error("writing the file: {0}")]
    Write(#[source] io::Error),
}
