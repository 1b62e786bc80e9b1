//! Short texts beside the states: what prompt compression kept of a prompt or a message.
//!
//! ```text
//! DIR/texts/KEY.text        blake3 of the text (32 bytes), then the text
//! ```
//!
//! They count for the folder's budget and are bounded by their number. Failures are misses: an
//! unwritable folder or a damaged file costs the time of scoring only.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::file::PART_EXT;
use crate::compression::TextStore;
use crate::guarded;

/// Files beyond this number are removed, the least recently used first.
const MOST_FILES: usize = 1024;
/// Extension of a complete file.
const TEXT_EXT: &str = "text";
const HASH: usize = 32;

/// The texts of one folder.
#[derive(Debug)]
pub struct TextFiles {
    dir: PathBuf,
}

impl TextFiles {
    /// Opens the texts of a store's folder.
    ///
    /// # Errors
    /// If the folder cannot be made, belongs to another user, or may be written by everyone.
    pub fn open(root: &Path) -> io::Result<TextFiles> {
        let dir = root.join("texts");
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        // A folder that cannot be written to may still hold texts to read.
        let created = builder.create(&dir);
        let found = fs::metadata(root).map_err(|error| created.err().unwrap_or(error))?;
        guarded::check_folder(root, &found)?;
        if let Ok(found) = fs::symlink_metadata(&dir) {
            guarded::check_folder(&dir, &found)?;
        }
        Ok(TextFiles { dir })
    }

    fn path(&self, key: &[u8; 32]) -> PathBuf {
        let name = blake3::Hash::from_bytes(*key).to_hex();
        self.dir.join(format!("{name}.{TEXT_EXT}"))
    }

    fn read(&self, key: &[u8; 32]) -> io::Result<String> {
        let mut file = guarded::open(&self.path(key), true)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let damaged = || io::Error::from(io::ErrorKind::InvalidData);
        let (hash, text) = bytes.split_at_checked(HASH).ok_or_else(damaged)?;
        if hash != blake3::hash(text).as_bytes() {
            return Err(damaged());
        }
        file.set_modified(SystemTime::now())?;
        String::from_utf8(text.to_vec()).map_err(|_| damaged())
    }

    fn write(&self, key: &[u8; 32], text: &str) -> io::Result<()> {
        // Mode 0600; removed on drop unless it is persisted.
        let mut part = tempfile::Builder::new()
            .prefix("")
            .suffix(&format!(".{PART_EXT}"))
            .tempfile_in(&self.dir)?;
        part.as_file().lock()?;
        part.write_all(blake3::hash(text.as_bytes()).as_bytes())?;
        part.write_all(text.as_bytes())?;
        part.as_file().sync_all()?;
        part.persist(self.path(key)).map_err(|error| error.error)?;
        File::open(&self.dir)?.sync_all()?;
        self.evict()
    }

    /// Removes the least recently used files beyond the bound.
    fn evict(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, PathBuf)> = fs::read_dir(&self.dir)?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|ending| ending == TEXT_EXT))
            .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
            .collect();
        files.sort();
        let excess = files.len().saturating_sub(MOST_FILES);
        for (_, path) in &files[..excess] {
            // Another process may have removed it.
            let _ = fs::remove_file(path);
        }
        Ok(())
    }
}

impl TextStore for TextFiles {
    fn get(&self, key: &[u8; 32]) -> Option<String> {
        let text = self.read(key);
        if let Err(error) = &text
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path(key).display(), %error, "a kept text is of no use");
        }
        text.ok()
    }

    fn put(&self, key: &[u8; 32], text: &str) {
        if let Err(error) = self.write(key, text) {
            tracing::warn!(path = %self.path(key).display(), %error, "a kept text is not stored");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_again_and_damaged_ones_are_misses() {
        let dir = tempfile::tempdir().unwrap();
        let key = [7; 32];
        TextFiles::open(dir.path()).unwrap().put(&key, "käpt");
        let files = TextFiles::open(dir.path()).unwrap();
        assert_eq!(files.get(&key).as_deref(), Some("käpt"));
        assert_eq!(files.get(&[8; 32]), None);
        let mut bytes = fs::read(files.path(&key)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(files.path(&key), &bytes).unwrap();
        assert_eq!(files.get(&key), None);
        fs::write(files.path(&key), "x").unwrap();
        assert_eq!(files.get(&key), None);
    }

    #[test]
    fn the_least_recently_used_file_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let files = TextFiles::open(dir.path()).unwrap();
        let key = |i: usize| *blake3::hash(&i.to_le_bytes()).as_bytes();
        for i in 0..MOST_FILES {
            fs::write(files.path(&key(i)), "x").unwrap();
        }
        let old = File::options().write(true).open(files.path(&key(5)));
        old.unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        files.put(&key(MOST_FILES), "new");
        assert!(!files.path(&key(5)).exists());
        assert_eq!(fs::read_dir(&files.dir).unwrap().count(), MOST_FILES);
    }
}
