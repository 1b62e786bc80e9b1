//! A file that appears whole or not at all: written under another name beside its place, then renamed.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// A file being written. Dropped before [`NewFile::keep`], it leaves nothing behind.
pub(super) struct NewFile {
    path: PathBuf,
    /// Where it is until it is whole; removed when dropped.
    partial: PathBuf,
    is_kept: bool,
}

impl NewFile {
    /// Begins a file that will stand at `path`; refuses to replace one unless `force` is set.
    pub(super) fn begin(path: &Path, force: bool) -> anyhow::Result<(NewFile, BufWriter<File>)> {
        refuse_existing(path, force)?;
        let Some(name) = path.file_name() else {
            bail!("{} is not a file name", path.display());
        };
        let mut partial = name.to_owned();
        partial.push(format!(".{}.part", std::process::id()));
        let partial = path.with_file_name(partial);
        let file = File::create(&partial)
            .with_context(|| format!("cannot write {}", partial.display()))?;
        let new = NewFile {
            path: path.to_owned(),
            partial,
            is_kept: false,
        };
        Ok((new, BufWriter::with_capacity(1 << 20, file)))
    }

    /// Puts what was written in its place.
    pub(super) fn keep(mut self, written: BufWriter<File>) -> anyhow::Result<()> {
        let name = self.path.display();
        let file = written
            .into_inner()
            .with_context(|| format!("cannot write {name}"))?;
        file.sync_all()
            .with_context(|| format!("cannot write {name}"))?;
        fs::rename(&self.partial, &self.path).with_context(|| format!("cannot write {name}"))?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_kept {
            // It may be gone already; there is nobody to tell.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// An error if a file would be replaced that nobody agreed to lose.
pub(super) fn refuse_existing(path: &Path, force: bool) -> anyhow::Result<()> {
    if path.exists() && !force {
        bail!(
            "{} exists already; use --force to replace it",
            path.display()
        );
    }
    Ok(())
}

/// One line on a file that was written.
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
    fn a_file_appears_only_when_it_is_whole() {
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
    fn an_existing_file_is_replaced_only_by_force() {
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
