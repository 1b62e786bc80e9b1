//! Models by name: from the cache, or downloaded into it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use gguf::GgufFile;
use hub::{Hub, ModelName, PullEvent, Pulled};
use tempfile::TempDir;

use crate::config;
use crate::open::model_path::name_of;
use crate::progress::{TaskProgress, percent};

/// The file of a name that is in the cache; any other path as it is. No request is sent.
pub(crate) fn in_cache(path: &Path) -> PathBuf {
    let found = || {
        let name = name_of(path.to_str()?)?;
        config::hub::of_user().ok()?.find(&name)
    };
    found().unwrap_or_else(|| path.to_owned())
}

/// Beginnings of a file that are tried for its header, in bytes. Vocabularies take about 10 MiB.
const HEADS: [u64; 2] = [32 << 20, 256 << 20];

/// A model's file, or one that holds only its header.
pub(crate) struct Header {
    /// The file to open.
    pub(crate) path: PathBuf,
    /// Deleted with it.
    _folder: Option<TempDir>,
}

/// The file of a name in the cache, else the header of its files, which is read without a download;
/// any other path as it is. Weights of a header are zeros.
///
/// # Errors
/// If the hub refuses, or the file has no header.
pub(crate) fn header(path: &Path) -> anyhow::Result<Header> {
    let as_it_is = |path: PathBuf| Header {
        path,
        _folder: None,
    };
    let Some(name) = path.to_str().and_then(name_of) else {
        return Ok(as_it_is(path.to_owned()));
    };
    let hub = config::hub::of_user()?;
    if let Some(found) = hub.find(&name) {
        return Ok(as_it_is(found));
    }
    if hub.is_offline() {
        return Ok(as_it_is(path.to_owned()));
    }
    tracing::info!("{name} is not in the cache; reading its header only");
    let shown = PullProgress {
        current: Mutex::new(None),
        progress: &|_| {},
    };
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut opened = Ok(());
    for head in HEADS {
        let path = hub.preview(&name, head, folder.path(), &|event| shown.show(&event))?;
        opened = GgufFile::open(&path).map(|_| ());
        if opened.is_ok() {
            return Ok(Header {
                path,
                _folder: Some(folder),
            });
        }
    }
    opened.with_context(|| name.to_string())?;
    Ok(as_it_is(path.to_owned()))
}

/// The file of a name, downloaded if it is not in the cache; any other path as it is. `progress`
/// gets percentages.
///
/// # Errors
/// If the name's files cannot be downloaded.
pub(crate) fn pulled(path: &Path, progress: &(dyn Fn(u64) + Sync)) -> anyhow::Result<PathBuf> {
    let Some(name) = path.to_str().and_then(name_of) else {
        return Ok(path.to_owned());
    };
    let hub = config::hub::of_user()?;
    if let Some(found) = hub.find(&name) {
        tracing::info!("{name} is {}", found.display());
        return Ok(found);
    }
    Ok(pull(&hub, &name, progress)?.path)
}

/// Downloads what is missing of a name, with progress on standard error.
///
/// # Errors
/// If it cannot be downloaded.
pub(crate) fn pull(
    hub: &Hub,
    name: &ModelName,
    progress: &(dyn Fn(u64) + Sync),
) -> anyhow::Result<Pulled> {
    tracing::info!("pulling {name} into {}", hub.cache().root().display());
    let shown = PullProgress {
        current: Mutex::new(None),
        progress,
    };
    Ok(hub.pull(name, &|event| shown.show(&event))?)
}

/// The display of a pull.
struct PullProgress<'a> {
    /// The label and the bar of what is going on.
    current: Mutex<Option<(String, TaskProgress)>>,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl PullProgress<'_> {
    /// Shows an event; called from several threads.
    fn show(&self, event: &PullEvent<'_>) {
        match *event {
            PullEvent::Start {
                file,
                size_bytes,
                have_bytes,
                hash: _,
            } => {
                if have_bytes > 0 {
                    let percent = percent(have_bytes, size_bytes);
                    tracing::info!("{file}: continuing at {percent} %");
                }
                self.set(file_name(file), have_bytes, size_bytes);
            }
            PullEvent::Progress {
                file,
                size_bytes,
                done_bytes,
            } => {
                self.set(file_name(file), done_bytes, size_bytes);
                (self.progress)(percent(done_bytes, size_bytes));
            }
            PullEvent::Checking {
                file,
                size_bytes,
                done_bytes,
            } => {
                let label = format!("checking {}", file_name(file));
                self.set(&label, done_bytes, size_bytes);
                (self.progress)(100);
            }
            PullEvent::Waiting { file } => {
                tracing::info!("{file}: another program is downloading it; waiting for its end");
            }
            PullEvent::Retrying { error, wait } => {
                tracing::warn!("{error}; trying again in {:.1} s", wait.as_secs_f64());
            }
            PullEvent::Done { .. } => {
                *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
    }

    fn set(&self, label: &str, done_bytes: u64, size_bytes: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match &*current {
            Some((shown, task)) if shown == label => task.set(done_bytes, size_bytes),
            _ => {
                let task = TaskProgress::continuing(label, done_bytes, size_bytes);
                *current = Some((label.to_owned(), task));
            }
        }
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
