//! One file: ranges in parallel, continued after cuts, checked by its hash.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::client::{Answer, Client, plain};
use crate::digest::ContentId;
use crate::error::at;
use crate::partial::Partial;
use crate::{HubError, OnEvent, PullEvent};

/// Bytes read from a connection at once.
const CHUNK: usize = 128 << 10;

/// A file to download.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    /// Its name in messages.
    pub(crate) file: &'a str,
    /// Its address.
    pub(crate) url: String,
    pub(crate) size: u64,
    /// Its hash, where the server knows it.
    pub(crate) id: Option<&'a ContentId>,
    /// Names this content in the record of an incomplete file: its hash or `ETag`.
    pub(crate) tag: &'a str,
    /// Where it goes.
    pub(crate) blob: PathBuf,
    /// The lock that all programs which write the blob hold.
    pub(crate) lock: PathBuf,
}

/// Downloads a file unless it is there; returns the bytes that came over the network.
///
/// # Errors
/// Any [`HubError`] of requests, of the disk, or [`HubError::WrongHash`]. After all but the last,
/// the bytes stay for the next attempt.
pub(crate) fn download(
    client: &Client,
    target: &Target<'_>,
    report: OnEvent<'_>,
) -> Result<u64, HubError> {
    for path in [&target.blob, &target.lock] {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(at(folder))?;
    }
    // Released when it is closed.
    let _lock = lock(target, report)?;
    if is_there(target) {
        return Ok(0);
    }
    let partial = Partial::open(&target.blob, target.size, target.tag)?;
    let (have_bytes, file) = (partial.bytes(), target.file);
    report(PullEvent::Start {
        file,
        size_bytes: target.size,
        have_bytes,
        hash: target.id.map(ContentId::as_str),
    });
    let mut downloaded = 0;
    let (mut partial, result) = fetch(client, target, partial, report, &mut downloaded);
    result?;
    if let Err(mut wrong) = check(target, &mut partial, report) {
        // Bytes of an earlier run may have been damaged since, so the file gets one more chance.
        if have_bytes > 0 && matches!(wrong, HubError::WrongHash { .. }) {
            partial.clear()?;
            let (again, result) = fetch(client, target, partial, report, &mut downloaded);
            partial = again;
            result?;
            match check(target, &mut partial, report) {
                Ok(()) => return finish(target, partial, report, downloaded),
                Err(error) => wrong = error,
            }
        }
        if matches!(wrong, HubError::WrongHash { .. }) {
            partial.delete()?;
        }
        return Err(wrong);
    }
    finish(target, partial, report, downloaded)
}

fn finish(
    target: &Target<'_>,
    partial: Partial,
    report: OnEvent<'_>,
    downloaded: u64,
) -> Result<u64, HubError> {
    partial.finish(&target.blob)?;
    report(PullEvent::Done { file: target.file });
    Ok(downloaded)
}

/// Whether the file is there, by its size.
pub(crate) fn is_there(target: &Target<'_>) -> bool {
    fs::metadata(&target.blob).is_ok_and(|meta| meta.is_file() && meta.len() == target.size)
}

/// Takes the lock of a file; another program may hold it for hours.
fn lock(target: &Target<'_>, report: OnEvent<'_>) -> Result<File, HubError> {
    let path = &target.lock;
    let mut options = OpenOptions::new();
    let file = options
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(at(path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            report(PullEvent::Waiting { file: target.file });
            file.lock().map_err(at(path))?;
        }
        Err(TryLockError::Error(error)) => return Err(at(path)(error)),
    }
    Ok(file)
}

/// Compares the hash of the file with the hub's.
fn check(target: &Target<'_>, partial: &mut Partial, report: OnEvent<'_>) -> Result<(), HubError> {
    let Some(expected) = target.id else {
        return Ok(());
    };
    let mut file = partial.handle()?;
    file.rewind().map_err(at(partial.path()))?;
    let mut at_byte = |done_bytes| {
        report(PullEvent::Checking {
            file: target.file,
            size_bytes: target.size,
            done_bytes,
        });
    };
    let found = expected
        .of_file(&mut file, target.size, &mut at_byte)
        .map_err(at(partial.path()))?;
    if found == *expected {
        return Ok(());
    }
    Err(HubError::WrongHash {
        file: target.file.to_owned(),
        expected: expected.as_str().to_owned(),
        found: found.as_str().to_owned(),
    })
}

/// Downloads what is missing. The record is saved also after an error.
fn fetch(
    client: &Client,
    target: &Target<'_>,
    partial: Partial,
    report: OnEvent<'_>,
    downloaded: &mut u64,
) -> (Partial, Result<(), HubError>) {
    let file = match partial.handle() {
        Ok(file) => file,
        Err(error) => return (partial, Err(error)),
    };
    let transfer = Transfer {
        client,
        target,
        report,
        file,
        partial: Mutex::new(partial),
        queue: Mutex::new(VecDeque::new()),
        location: Mutex::new(None),
        failure: Mutex::new(None),
        is_stopped: AtomicBool::new(false),
        downloaded: AtomicU64::new(0),
    };
    let result = transfer.run();
    *downloaded += transfer.downloaded.load(Ordering::Relaxed);
    let mut partial = transfer
        .partial
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    let saved = partial.save();
    (partial, result.and(saved))
}

/// A download in progress, shared by its connections.
struct Transfer<'a> {
    client: &'a Client,
    target: &'a Target<'a>,
    report: OnEvent<'a>,
    file: File,
    partial: Mutex<Partial>,
    /// Ranges that no connection has begun.
    queue: Mutex<VecDeque<Range<u64>>>,
    /// Where the last redirect led, so that not every range asks the hub.
    location: Mutex<Option<String>>,
    /// The first error.
    failure: Mutex<Option<HubError>>,
    /// A connection failed, so the others end.
    is_stopped: AtomicBool,
    /// Bytes that came over the network.
    downloaded: AtomicU64,
}

impl Transfer<'_> {
    fn run(&self) -> Result<(), HubError> {
        let tuning = &self.client.tuning;
        self.check_space()?;
        let mut gaps: VecDeque<_> = locked(&self.partial).missing(tuning.segment_bytes).into();
        let Some(mut first) = gaps.pop_front() else {
            return Ok(());
        };
        let opened = self
            .client
            .retrying(self.report, || self.open(first.start, first.end))?;
        if opened.status == 200 {
            // A server without ranges sends the whole file, in one connection.
            first.end = self.target.size;
            gaps.clear();
        }
        let connections = tuning.connections.min(gaps.len() + 1);
        *locked(&self.queue) = gaps;
        thread::scope(|scope| {
            for _ in 1..connections {
                scope.spawn(|| self.work(None));
            }
            self.work(Some((first, opened)));
        });
        match locked(&self.failure).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Downloads ranges until none is left or a connection fails.
    fn work(&self, mut begun: Option<(Range<u64>, Answer)>) {
        loop {
            let (range, answer) = match begun.take() {
                Some((range, answer)) => (range, Some(answer)),
                None => match locked(&self.queue).pop_front() {
                    Some(range) => (range, None),
                    None => return,
                },
            };
            if self.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            if let Err(error) = self.segment(range, answer) {
                self.is_stopped.store(true, Ordering::Relaxed);
                locked(&self.failure).get_or_insert(error);
                return;
            }
        }
    }

    /// Downloads a range, with as many requests as it takes.
    fn segment(&self, range: Range<u64>, mut answer: Option<Answer>) -> Result<(), HubError> {
        let mut next = range.start;
        let mut failed = 0;
        loop {
            let before = next;
            let opened = match answer.take() {
                Some(answer) => Ok(answer),
                None => self.open(next, range.end),
            };
            let error = match opened.and_then(|answer| self.copy(answer, &mut next, range.end)) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_transient() => error,
                Err(error) => return Err(error),
            };
            if next > before {
                failed = 0;
            }
            failed += 1;
            self.client.wait(failed, error, self.report)?;
        }
    }

    /// Asks for a range. Status 200 means the whole file.
    fn open(&self, start: u64, end: u64) -> Result<Answer, HubError> {
        let range = Some((start, end));
        let direct = locked(&self.location).clone();
        let answer = match direct.map(|url| self.client.open(&url, range)) {
            None => self.client.open(&self.target.url, range)?,
            // The signature of the address has run out; the hub gives another.
            Some(Err(
                HubError::Refused { .. } | HubError::NotFound { .. } | HubError::Protocol { .. },
            )) => self.client.open(&self.target.url, range)?,
            Some(answer) => answer?,
        };
        *locked(&self.location) = (answer.url != self.target.url).then(|| answer.url.clone());
        self.check_answer(&answer, start)?;
        Ok(answer)
    }

    /// Checks that the answer is of this file and begins where it was asked to.
    fn check_answer(&self, answer: &Answer, start: u64) -> Result<(), HubError> {
        let wrong = |detail: String| HubError::Protocol {
            url: plain(&answer.url),
            detail,
        };
        let size = self.target.size;
        let (begins, total) = if answer.status == 206 {
            let range = answer.header("content-range").unwrap_or_default();
            content_range(range).ok_or_else(|| wrong(format!("Content-Range: {range}")))?
        } else {
            let length = answer.header("content-length");
            (start, length.and_then(|text| text.parse().ok()))
        };
        if begins != start {
            return Err(wrong(format!("bytes from {begins} instead of {start}")));
        }
        if total.is_some_and(|total| total != size) {
            let total = total.unwrap_or_default();
            return Err(wrong(format!("a file of {total} bytes instead of {size}")));
        }
        let etag = answer.header("etag").unwrap_or(self.target.tag);
        if self.target.id.is_none() && !self.target.tag.is_empty() && etag != self.target.tag {
            return Err(wrong("the file changed during the download".to_owned()));
        }
        Ok(())
    }

    /// Writes the body to the file, from `next` on, and moves `next`.
    fn copy(&self, answer: Answer, next: &mut u64, end: u64) -> Result<(), HubError> {
        let url = answer.url.clone();
        // The whole file begins with bytes that are there.
        let mut skip = if answer.status == 200 { *next } else { 0 };
        let mut reader = answer.reader();
        let mut chunk = vec![0; CHUNK];
        while *next < end && !self.is_stopped.load(Ordering::Relaxed) {
            let n = match reader.read(&mut chunk) {
                Ok(0) => Err(io::Error::from(ErrorKind::UnexpectedEof)),
                other => other,
            };
            let n = n.map_err(|error| self.client.broken(&url, &error))?;
            self.downloaded.fetch_add(n as u64, Ordering::Relaxed);
            let skipped = skip.min(n as u64);
            skip -= skipped;
            let most = usize::try_from(end - *next).unwrap_or(n);
            let from = usize::try_from(skipped).unwrap_or(n);
            let bytes = &chunk[from..n.min(from.saturating_add(most))];
            if bytes.is_empty() {
                continue;
            }
            self.file
                .write_all_at(bytes, *next)
                .map_err(|error| self.write_error(error))?;
            let start = *next;
            *next += bytes.len() as u64;
            self.wrote(start..*next)?;
        }
        Ok(())
    }

    /// Notes bytes, and now and then saves the record and looks at the disk.
    fn wrote(&self, range: Range<u64>) -> Result<(), HubError> {
        let mut partial = locked(&self.partial);
        let is_due = partial.wrote(range) >= self.client.tuning.record_bytes;
        if is_due {
            partial.save()?;
        }
        let done_bytes = partial.bytes();
        drop(partial);
        (self.report)(PullEvent::Progress {
            file: self.target.file,
            size_bytes: self.target.size,
            done_bytes,
        });
        if is_due { self.check_space() } else { Ok(()) }
    }

    /// An error if the missing bytes do not fit on the disk.
    fn check_space(&self) -> Result<(), HubError> {
        let missing = self.target.size - locked(&self.partial).bytes();
        let folder = self.target.blob.parent().unwrap_or(Path::new("."));
        check_space(self.client, folder, missing)
    }

    fn write_error(&self, error: io::Error) -> HubError {
        let folder = self.target.blob.parent().unwrap_or(Path::new("."));
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => HubError::DiskFull {
                path: folder.to_owned(),
                needed_bytes: self.target.size - locked(&self.partial).bytes(),
                free_bytes: (self.client.tuning.free_space)(folder).unwrap_or(0),
            },
            _ => at(&self.target.blob)(error),
        }
    }
}

/// An error if `needed_bytes` do not fit on the disk of a folder.
pub(crate) fn check_space(
    client: &Client,
    folder: &Path,
    needed_bytes: u64,
) -> Result<(), HubError> {
    // A file system that does not say is tried.
    let free_bytes = (client.tuning.free_space)(folder).unwrap_or(u64::MAX);
    if needed_bytes > free_bytes {
        return Err(HubError::DiskFull {
            path: folder.to_owned(),
            needed_bytes,
            free_bytes,
        });
    }
    Ok(())
}

/// Start and total of `bytes START-END/TOTAL`; the total may be `*`.
pub(crate) fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let start = range.split_once('-')?.0.trim().parse().ok()?;
    match total.trim() {
        "*" => Some((start, None)),
        total => Some((start, Some(total.parse().ok()?))),
    }
}

/// A lock whose holders never panic in the middle of a change.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read() {
        assert_eq!(content_range("bytes 5-9/20"), Some((5, Some(20))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, None)));
        for wrong in ["", "bytes */20", "bytes 5-9", "items 1-2/3", "bytes 5-9/x"] {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }
}
