//! A file that is not wholly downloaded: its bytes, and a record of which are there.
//!
//! The record is written after the bytes have reached the disk, so it never names bytes that a
//! power cut has lost. The names differ from those of `huggingface_hub`, which would take a file
//! with holes for one that is complete up to its size.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::HubError;
use crate::error::at;
use crate::ranges::Ranges;

/// Which bytes of which content are there, as on disk.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PartialRecord {
    /// Bytes of the whole file.
    size: u64,
    /// The content's hash or `ETag`; bytes of another content are dropped.
    tag: String,
    there: Ranges,
}

/// An incomplete file beside its final place.
pub(crate) struct Partial {
    path: PathBuf,
    record_path: PathBuf,
    file: File,
    record: PartialRecord,
    unsaved_bytes: u64,
}

impl Partial {
    /// Opens the incomplete file of `blob`, with the bytes of an earlier download of this content.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn open(blob: &Path, size: u64, tag: &str) -> Result<Partial, HubError> {
        let path = beside(blob, "hearth.incomplete");
        let record_path = beside(blob, "hearth.incomplete.json");
        let record = read(&record_path, size, tag).filter(|_| path.exists());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        let file = options
            .truncate(record.is_none())
            .open(&path)
            .map_err(at(&path))?;
        Ok(Partial {
            record: record.unwrap_or_else(|| PartialRecord {
                size,
                tag: tag.to_owned(),
                there: Ranges::default(),
            }),
            path,
            record_path,
            file,
            unsaved_bytes: 0,
        })
    }

    /// The bytes of an earlier download of `blob`, if it was of this content.
    pub(crate) fn bytes_of(blob: &Path, size: u64, tag: &str) -> u64 {
        let record = read(&beside(blob, "hearth.incomplete.json"), size, tag);
        record.map_or(0, |record| record.there.bytes())
    }

    /// A second handle of the file.
    pub(crate) fn handle(&self) -> Result<File, HubError> {
        self.file.try_clone().map_err(at(&self.path))
    }

    /// Where the bytes are.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes that are there.
    pub(crate) fn bytes(&self) -> u64 {
        self.record.there.bytes()
    }

    /// The missing bytes, in pieces of at most `most`.
    pub(crate) fn missing(&self, most: u64) -> Vec<Range<u64>> {
        self.record.there.missing(self.record.size, most)
    }

    /// Notes that bytes were written; returns how many are not yet in the record on disk.
    pub(crate) fn wrote(&mut self, range: Range<u64>) -> u64 {
        self.unsaved_bytes += range.end - range.start;
        self.record.there.add(range);
        self.unsaved_bytes
    }

    /// Writes the record, after the bytes that it names.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn save(&mut self) -> Result<(), HubError> {
        self.file.sync_data().map_err(at(&self.path))?;
        let text = serde_json::to_vec(&self.record)
            .map_err(|error| at(&self.record_path)(io::Error::other(error)))?;
        write_whole(&self.record_path, &text)?;
        self.unsaved_bytes = 0;
        Ok(())
    }

    /// Drops all bytes.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn clear(&mut self) -> Result<(), HubError> {
        self.record.there = Ranges::default();
        self.file.set_len(0).map_err(at(&self.path))?;
        self.save()
    }

    /// Moves the complete file to its place.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn finish(self, blob: &Path) -> Result<(), HubError> {
        self.file.sync_all().map_err(at(&self.path))?;
        fs::rename(&self.path, blob).map_err(at(blob))?;
        ignore_missing(fs::remove_file(&self.record_path)).map_err(at(&self.record_path))
    }

    /// Deletes the file and its record.
    ///
    /// # Errors
    /// [`HubError::File`].
    pub(crate) fn delete(self) -> Result<(), HubError> {
        ignore_missing(fs::remove_file(&self.record_path)).map_err(at(&self.record_path))?;
        ignore_missing(fs::remove_file(&self.path)).map_err(at(&self.path))
    }
}

/// Writes a file through a temporary one, so that no reader sees a part of it.
///
/// # Errors
/// [`HubError::File`].
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let temporary = temporary(path);
    fs::write(&temporary, bytes).map_err(at(&temporary))?;
    fs::rename(&temporary, path).map_err(at(path))
}

/// A name beside a file that no other thread or program uses.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    static USED: AtomicU64 = AtomicU64::new(0);
    let number = USED.fetch_add(1, Ordering::Relaxed);
    beside(path, &format!("{}-{number}.tmp", std::process::id()))
}

/// The record on disk, if it describes this content.
fn read(path: &Path, size: u64, tag: &str) -> Option<PartialRecord> {
    let record: PartialRecord = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let is_same = record.size == size && record.tag == tag && !tag.is_empty();
    (is_same && record.there.is_valid(size)).then_some(record)
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_of_the_same_content_is_taken_up() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("b");
        let mut partial = Partial::open(&blob, 10, "t").unwrap();
        partial.wrote(2..4);
        partial.save().unwrap();
        partial.wrote(6..7);
        drop(partial);
        // What was not saved is not there.
        let again = Partial::open(&blob, 10, "t").unwrap();
        assert_eq!(again.missing(100), [0..2, 4..10]);
        assert_eq!(Partial::bytes_of(&blob, 10, "t"), 2);
        for (size, tag) in [(10, "other"), (11, "t"), (10, "")] {
            assert_eq!(Partial::bytes_of(&blob, size, tag), 0, "{size} {tag}");
        }
        let other = Partial::open(&blob, 10, "other").unwrap();
        assert_eq!(other.bytes(), 0);
    }

    #[test]
    fn record_without_its_file_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("b");
        let mut partial = Partial::open(&blob, 10, "t").unwrap();
        partial.wrote(0..9);
        partial.save().unwrap();
        fs::remove_file(partial.path()).unwrap();
        assert_eq!(Partial::open(&blob, 10, "t").unwrap().bytes(), 0);
    }
}
