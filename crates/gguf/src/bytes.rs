//! The bytes of a file: memory-mapped or already in memory.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};

use crate::GgufError;
use crate::truncation::WatchedMap;

/// The bytes of one file, read in place.
///
/// # A file that changes while it is mapped
/// The map is a view of the file, not a copy. If a mapped file is *shortened*, reading a lost page
/// ends the process with `SIGBUS`, unless [`watch_truncation`](crate::watch_truncation) was
/// called. If a mapped file is *overwritten in place*, the reader sees the change. Replace a model
/// file by writing a new one and renaming it over the old file: the map then keeps the old content.
#[derive(Debug)]
pub struct FileBytes(Backing);

#[derive(Debug)]
enum Backing {
    Map(MappedFile),
    Shared(Arc<[u8]>),
    Static(&'static [u8]),
    /// Anonymous memory. Unmapped when dropped.
    Anonymous(Mmap),
}

/// A mapped file. Fields are dropped in this order: the watch ends before the map.
#[derive(Debug)]
struct MappedFile {
    _watch: WatchedMap,
    /// Unmapped when dropped.
    map: Mmap,
}

impl FileBytes {
    /// Maps a file.
    ///
    /// # Errors
    /// [`GgufError::Io`] if it cannot be opened or mapped, or is not a regular file.
    pub fn open(path: &Path) -> Result<FileBytes, GgufError> {
        let io = |source| GgufError::Io {
            path: path.to_owned(),
            source,
        };
        // Checked before opening, because opening a pipe waits for a writer.
        let metadata = fs::metadata(path).map_err(io)?;
        if !metadata.is_file() {
            return Err(io(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "not a plain file",
            )));
        }
        if metadata.len() == 0 {
            // An empty file cannot be mapped on every system.
            return Ok(FileBytes(Backing::Static(&[])));
        }
        let file = File::open(path).map_err(io)?;
        let map = map(&file).map_err(io)?;
        let _watch = WatchedMap::new(path, &map);
        Ok(FileBytes(Backing::Map(MappedFile { _watch, map })))
    }

    /// Bytes that are already in memory and shared.
    pub fn shared(bytes: Arc<[u8]>) -> FileBytes {
        FileBytes(Backing::Shared(bytes))
    }

    /// Bytes that are part of the executable.
    pub fn embedded(bytes: &'static [u8]) -> FileBytes {
        FileBytes(Backing::Static(bytes))
    }

    /// `head` followed by zeros, `len` bytes in total: a file of which only the head matters. Zeros
    /// take no memory until they are read.
    ///
    /// # Errors
    /// [`GgufError::Write`] if the system has no such address range.
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

    /// Whether the bytes are those of a mapped file.
    pub fn is_file(&self) -> bool {
        matches!(self.0, Backing::Map(_))
    }
}

#[allow(unsafe_code, reason = "the one map call of this crate")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and owned by `FileBytes`, so no reference outlives it. Changes
    // of the file meanwhile cannot be prevented; `FileBytes` documents their effect. All bytes are
    // checked as they are read, so other contents are refused.
    unsafe { Mmap::map(file) }
}

impl std::ops::Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Backing::Map(file) => &file.map,
            Backing::Anonymous(map) => map,
            Backing::Shared(bytes) => bytes,
            Backing::Static(bytes) => bytes,
        }
    }
}
