//! Opens files of stores without trusting what lies in its folder: never through a link, never
//! blocking on a pipe, and only what belongs to this user.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for another process that removes files.
const LOCK_TIME: Duration = Duration::from_secs(5);
/// Time between two attempts to lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// Opens a regular file of this user.
pub(crate) fn open(path: &Path, write: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(write);
    open_with(path, &mut options)
}

/// Opens and locks the folder's lock file; creates it if it is missing and never changes it.
///
/// Fails with [`io::ErrorKind::TimedOut`] if another process holds the lock for long.
pub(crate) fn lock(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = open_with(path, &mut options)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
            Err(std::fs::TryLockError::WouldBlock) if begun.elapsed() > LOCK_TIME => {
                let what = "another process holds the folder's lock";
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY),
        }
    }
}

/// Refuses a folder that another user owns or that everyone may write to.
///
/// `found` is its metadata, of a link itself where links are not followed.
pub(crate) fn check_folder(path: &Path, found: &Metadata) -> io::Result<()> {
    let name = path.display();
    if !found.is_dir() {
        return Err(foreign(format!("{name} is no folder, or a link to one")));
    }
    check_owner(found).map_err(|why| {
        foreign(format!(
            "{name} {why}; other users could change cached states, so use a folder of your own with mode 0700"
        ))
    })
}

fn open_with(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        // Without NONBLOCK, opening a named pipe waits for its other end.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags.cast_signed());
    }
    let file = options.open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(foreign("it is no regular file".to_owned()));
    }
    check_owner(&found).map_err(|why| foreign(format!("it {why}")))?;
    Ok(file)
}

#[cfg(unix)]
fn check_owner(found: &Metadata) -> Result<(), &'static str> {
    use std::os::unix::fs::MetadataExt;
    let this_user = rustix::process::geteuid().as_raw();
    if found.uid() != this_user && found.uid() != 0 {
        return Err("belongs to another user");
    }
    if found.mode() & 0o002 != 0 {
        return Err("may be written by everyone");
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(_: &Metadata) -> Result<(), &'static str> {
    Ok(())
}

fn foreign(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}
