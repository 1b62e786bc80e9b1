//! Models by name: from the cache, or downloaded into it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hub::{Hub, ModelName, PullEvent, Pulled};

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
            } => self.set(
                &format!("checking {}", file_name(file)),
                done_bytes,
                size_bytes,
            ),
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
