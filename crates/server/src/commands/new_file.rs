//! A file that appears whole or not at all: it is written under a temporary name and then renamed.

use std::fs::{self, File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use tempfile::{NamedTempFile, TempPath};

/// A file being written. Dropped before [`NewFile::keep`], it leaves nothing behind.
pub(super) struct NewFile {
    path: PathBuf,
    /// The temporary name; its file is removed on drop.
    partial: TempPath,
}

impl NewFile {
    /// Opens a file that will have the name `path`.
    ///
    /// # Errors
    /// If `path` exists and `force` is not set, or its directory cannot be written.
    pub(super) fn begin(path: &Path, force: bool) -> anyhow::Result<(NewFile, BufWriter<File>)> {
        refuse_existing(path, force)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or(Path::new("."));
        // The permissions of `File::create`, less the process's umask.
        let file: NamedTempFile = tempfile::Builder::new()
            .suffix(".part")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir)
            .with_context(|| format!("cannot write a file in {}", dir.display()))?;
        let (file, partial) = file.into_parts();
        let new = NewFile {
            path: path.to_owned(),
            partial,
        };
        Ok((new, BufWriter::with_capacity(1 << 20, file)))
    }

    /// Gives the written file its final name.
    ///
    /// # Errors
    /// Names the file if it cannot be written or renamed.
    pub(super) fn keep(self, written: BufWriter<File>) -> anyhow::Result<()> {
        let cannot_write = || format!("cannot write {}", self.path.display());
        let file = written.into_inner().with_context(cannot_write)?;
        file.sync_all().with_context(cannot_write)?;
        self.partial.persist(&self.path).with_context(cannot_write)
    }
}

/// Fails if `path` exists and `force` is not set.
pub(super) fn refuse_existing(path: &Path, force: bool) -> anyhow::Result<()> {
    if path.exists() && !force {
        bail!("{} exists; use --force to replace it", path.display());
    }
    Ok(())
}

/// Reports a written file and its size on standard error.
pub(super) fn written_line(path: &Path) -> anyhow::Result<()> {
    let bytes = fs::metadata(path).map_or(0, |facts| facts.len());
    let size = crate::progress::bytes_text(bytes);
    writeln!(std::io::stderr(), "{}: {size} written", path.display())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn file_appears_only_when_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gguf");
        let (new, mut out) = NewFile::begin(&path, false).unwrap();
        out.write_all(b"half").unwrap();
        assert!(!path.exists());
        drop((new, out));
        assert_eq!(names(dir.path()), Vec::<String>::new());
        let (new, mut out) = NewFile::begin(&path, false).unwrap();
        out.write_all(b"whole").unwrap();
        new.keep(out).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(names(dir.path()), ["a.gguf"]);
    }

    #[test]
    fn existing_file_is_replaced_only_with_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "old").unwrap();
        let error = NewFile::begin(&path, false).err().unwrap().to_string();
        assert!(error.contains("--force"), "{error}");
        let (new, out) = NewFile::begin(&path, true).unwrap();
        new.keep(out).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    }
}
