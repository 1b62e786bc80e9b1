//! Where the bytes of a file are: in a map of it, or already in memory.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};

use crate::GgufError;

/// The bytes of one whole file, read in place.
///
/// # A file that changes while it is mapped
/// The map is a view of the file, not a copy. A file that is *shortened* while it is mapped takes
/// pages away: the operating system ends the process (`SIGBUS`) when such a page is read, and
/// nothing here can prevent that. A file that is *overwritten in place* changes under the reader.
/// Replace model files by writing a new one and renaming it over the old, which leaves the map as
/// it was.
#[derive(Debug)]
pub struct FileBytes(Backing);

#[derive(Debug)]
enum Backing {
    /// Unmapped when dropped.
    Map(Mmap),
    Shared(Arc<[u8]>),
    Static(&'static [u8]),
    /// Memory of no file. Unmapped when dropped.
    Anonymous(Mmap),
}

impl FileBytes {
    /// Maps a file.
    ///
    /// # Errors
    /// [`GgufError::Io`] when it cannot be opened or mapped, or is not a plain file.
    pub fn open(path: &Path) -> Result<FileBytes, GgufError> {
        let io = |source| GgufError::Io {
            path: path.to_owned(),
            source,
        };
        // Asked before opening: opening a pipe waits for somebody to write into it.
        let facts = fs::metadata(path).map_err(io)?;
        if !facts.is_file() {
            return Err(io(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "not a plain file",
            )));
        }
        if facts.len() == 0 {
            // There is nothing to map, and systems differ in whether they allow it.
            return Ok(FileBytes(Backing::Static(&[])));
        }
        let file = File::open(path).map_err(io)?;
        Ok(FileBytes(Backing::Map(map(&file).map_err(io)?)))
    }

    /// Bytes that are already in memory and shared.
    pub fn shared(bytes: Arc<[u8]>) -> FileBytes {
        FileBytes(Backing::Shared(bytes))
    }

    /// Bytes that are part of the executable.
    pub fn embedded(bytes: &'static [u8]) -> FileBytes {
        FileBytes(Backing::Static(bytes))
    }

    /// `head` and then zeros, `len` bytes in all: a file of which only the front matters. Zeros
    /// take no memory until they are read.
    ///
    /// # Errors
    /// [`GgufError::Write`] when the system has no such run of addresses.
    ///
    /// # Panics
    /// If `head` is longer than `len`.
    pub fn zeros_after(head: &[u8], len: usize) -> Result<FileBytes, GgufError> {
        let mut map = MmapOptions::new()
            .len(len)
            .no_reserve_swap()
            .map_anon()
            .map_err(GgufError::Write)?;
        map[..head.len()].copy_from_slice(head);
        let map = map.make_read_only().map_err(GgufError::Write)?;
        Ok(FileBytes(Backing::Anonymous(map)))
    }

    /// Whether reading the bytes reads a file.
    pub fn is_file(&self) -> bool {
        matches!(self.0, Backing::Map(_))
    }
}

#[allow(unsafe_code, reason = "the one map call of this crate")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and lives inside `FileBytes`, which owns it, so no reference
    // outlives it. That nothing shortens or rewrites the file meanwhile cannot be enforced;
    // `FileBytes` documents what happens then. All bytes are checked as they are read, so other
    // contents are refused, not misused.
    unsafe { Mmap::map(file) }
}

impl std::ops::Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Backing::Map(map) | Backing::Anonymous(map) => map,
            Backing::Shared(bytes) => bytes,
            Backing::Static(bytes) => bytes,
        }
    }
}
