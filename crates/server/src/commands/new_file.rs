//! A file that appears whole or not at all: it is written under a temporary name and then renamed.
//!
//! A signal that ends the program removes the temporary file first.

use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, bail};
use tempfile::{NamedTempFile, TempPath};
use tokio::signal::unix::{SignalKind, signal};

/// Temporary files to remove when a signal ends the program.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

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
    /// If [`check_output`] refuses `path`, or its directory cannot be written.
    pub(super) fn begin(path: &Path, force: bool) -> anyhow::Result<(NewFile, BufWriter<File>)> {
        check_output(path, force)?;
        remove_unfinished_at_signals().context("cannot listen for signals")?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or(Path::new("."));
        // Held until the name is listed, so that a signal finds every file.
        let mut unfinished = unfinished();
        // The permissions of `File::create`, less the process's umask.
        let file: NamedTempFile = tempfile::Builder::new()
            .suffix(".part")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir)
            .with_context(|| format!("cannot write a file in {}", dir.display()))?;
        let (file, partial) = file.into_parts();
        unfinished.push(partial.to_path_buf());
        drop(unfinished);
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
        // Held over the renaming: a signal comes before it or after it.
        let mut unfinished = unfinished();
        unfinished.retain(|path| path != &*self.partial);
        self.partial.persist(&self.path).with_context(cannot_write)
    }
}

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    // A panic while it was held leaves the list valid.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, a signal that ends the program removes the unfinished files first.
fn remove_unfinished_at_signals() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // Registered before the thread starts, so that no signal is lost.
    let (mut interrupt, mut terminate, mut hangup) = {
        let _guard = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        )
    };
    let wait = async move {
        tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hangup.recv() => SignalKind::hangup(),
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let received = runtime.block_on(wait);
            let unfinished = unfinished();
            for path in unfinished.iter() {
                // One that is gone already needs no removal.
                let _ = fs::remove_file(path);
            }
            exit(received);
        })?;
    Ok(())
}

/// Ends the process with the status that shells report for a signal.
#[expect(
    clippy::exit,
    reason = "the main thread is in the middle of a long write"
)]
fn exit(received: SignalKind) {
    std::process::exit(128 + received.as_raw_value());
}

/// Checks that a file may be written at `path`: it is free, or a plain file and `force` is set.
///
/// # Errors
/// Names the path, and what is there.
pub(super) fn check_output(path: &Path, force: bool) -> anyhow::Result<()> {
    // Links are not followed: renaming would replace the link and not the file.
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    if kind.is_symlink() {
        bail!(
            "{} is a symbolic link; name the file itself",
            path.display()
        );
    }
    if !kind.is_file() {
        bail!(
            "{} is not a plain file and is never replaced; name another file",
            path.display()
        );
    }
    if !force {
        bail!("{} exists; use --force to replace it", path.display());
    }
    Ok(())
}

/// Checks that `output` is not `input`, by this or another name.
///
/// # Errors
/// Names both.
pub(super) fn check_not_input(input: &Path, output: &Path) -> anyhow::Result<()> {
    // What cannot be read is reported when it is opened.
    let (Ok(from), Ok(to)) = (fs::metadata(input), fs::metadata(output)) else {
        return Ok(());
    };
    if (from.dev(), from.ino()) == (to.dev(), to.ino()) {
        bail!(
            "{} is the same file as {}, which is read meanwhile; name another output",
            output.display(),
            input.display()
        );
    }
    Ok(())
}

/// Reports a written file and its size on standard error.
pub(super) fn written_line(path: &Path) -> anyhow::Result<()> {
    let bytes = fs::metadata(path).map_or(0, |metadata| metadata.len());
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

    #[test]
    fn what_is_no_plain_file_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let socket = dir.path().join("socket");
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, part) in [
            (Path::new("/dev/null"), "not a plain file"),
            (dir.path(), "not a plain file"),
            (&socket, "not a plain file"),
            (&link, "symbolic link"),
        ] {
            let error = NewFile::begin(path, true).err().unwrap().to_string();
            assert!(error.contains(part), "{}: {error}", path.display());
        }
        assert_eq!(names(dir.path()).len(), 3, "nothing was written");
    }
}
