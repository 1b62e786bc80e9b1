//! Responses as files of one folder, the least recently used ones out first.
//!
//! Each file is the JSON of one response under its id. Only this process writes to the folder.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::KeptResponse;
use crate::guarded;

/// The longest id, in bytes.
const MAX_ID: usize = 128;

pub(super) struct ResponseFolder {
    dir: PathBuf,
    budget: u64,
    /// Size and last use of each file, by id.
    files: HashMap<String, (u64, SystemTime)>,
}

impl ResponseFolder {
    /// Makes the folder if it is missing, lists its files and removes those over the budget.
    pub(super) fn open(dir: &Path, budget: u64) -> io::Result<ResponseFolder> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(dir)?;
        guarded::check_folder(dir, &fs::metadata(dir)?)?;
        let mut folder = ResponseFolder {
            dir: dir.to_path_buf(),
            budget,
            files: HashMap::new(),
        };
        for entry in fs::read_dir(dir)?.flatten() {
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
            if let (Some(id), Ok(found)) = (id.filter(|id| is_id(id)), entry.metadata()) {
                let used = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                folder.files.insert(id.to_owned(), (found.len(), used));
            }
        }
        folder.evict();
        Ok(folder)
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// Writes a response. A failure is logged: the response was sent already.
    pub(super) fn write(&mut self, response: &KeptResponse) {
        if !is_id(&response.id) {
            return;
        }
        match self.try_write(response) {
            Ok(bytes) => {
                let now = SystemTime::now();
                self.files.insert(response.id.clone(), (bytes, now));
                self.evict();
            }
            Err(error) => {
                let folder = self.dir.display();
                tracing::warn!(%error, "{folder}: a response cannot be kept");
            }
        }
    }

    fn try_write(&self, response: &KeptResponse) -> io::Result<u64> {
        let bytes = serde_json::to_vec(response).map_err(io::Error::other)?;
        let part = self.dir.join(format!("{}.part", response.id));
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&part)?;
        let written = file.write_all(&bytes);
        let kept = written.and_then(|()| fs::rename(&part, self.path(&response.id)));
        if kept.is_err() {
            // It may not exist.
            let _ = fs::remove_file(&part);
        }
        kept.map(|()| bytes.len() as u64)
    }

    pub(super) fn read(&mut self, id: &str) -> Option<KeptResponse> {
        if !self.files.contains_key(id) {
            return None;
        }
        let file = guarded::open(&self.path(id), true);
        let read = file.and_then(|file| {
            let now = SystemTime::now();
            // A folder that is read only still serves.
            let _ = file.set_modified(now);
            let response: KeptResponse = serde_json::from_reader(io::BufReader::new(file))?;
            Ok((response, now))
        });
        match read {
            Ok((response, now)) if response.id == id => {
                if let Some((_, used)) = self.files.get_mut(id) {
                    *used = now;
                }
                Some(response)
            }
            _ => {
                tracing::warn!("{}: a kept response is of no use", self.path(id).display());
                self.remove(id);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, id: &str) -> bool {
        // Another program may have removed the file.
        self.files.remove(id).is_some() && fs::remove_file(self.path(id)).is_ok()
    }

    /// Removes the least recently used files until the others fit.
    fn evict(&mut self) {
        let mut bytes: u64 = self.files.values().map(|(bytes, _)| bytes).sum();
        while bytes > self.budget {
            let oldest = self.files.iter().min_by_key(|(_, (_, used))| *used);
            let Some((id, size)) = oldest.map(|(id, (size, _))| (id.clone(), *size)) else {
                return;
            };
            self.remove(&id);
            bytes -= size;
        }
    }
}

/// Whether a text is an id that names a file inside the folder.
fn is_id(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    text.len() <= MAX_ID && text.starts_with("resp_") && text.bytes().all(is_plain)
}
