//! Responses that are kept by their ids: in memory within a bound, and on request in a folder
//! within a budget.
//!
//! A kept response holds its request's own input and names the response before it, so a
//! conversation is a chain. The least recently used responses go first; a use of a response is one
//! of all before it, so a chain loses its end before its start.

mod folder;
mod memory;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chat::responses::stored::{StoredTurn, item_by_id};
use serde::{Deserialize, Serialize};

use folder::ResponseFolder;
use memory::ResponseMemory;

/// The most responses of one conversation.
const MAX_CHAIN: usize = 4_096;

/// A response that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptResponse {
    /// `resp_` and random characters.
    pub id: String,
    /// The response before it.
    pub previous: Option<String>,
    /// The request's own input, as JSON.
    pub input: String,
    /// The `output` of the response, as JSON.
    pub output: String,
    /// The whole response, as JSON.
    pub response: String,
}

impl KeptResponse {
    fn bytes(&self) -> u64 {
        let texts = [&self.id, &self.input, &self.output, &self.response];
        texts.iter().map(|text| text.len() as u64).sum()
    }
}

/// All kept responses. A clone is another reference to them.
#[derive(Clone)]
pub struct ResponseStore(Arc<StoreParts>);

struct StoreParts {
    memory: Mutex<ResponseMemory>,
    folder: Option<Mutex<ResponseFolder>>,
}

impl fmt::Debug for ResponseStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseStore")
    }
}

impl ResponseStore {
    /// A store of at most `bytes` in memory; 0 keeps nothing.
    pub fn in_memory(bytes: u64) -> ResponseStore {
        ResponseStore(Arc::new(StoreParts {
            memory: Mutex::new(ResponseMemory::new(bytes)),
            folder: None,
        }))
    }

    /// A store that also keeps its responses in a folder, with files of at most `budget` bytes.
    ///
    /// # Errors
    /// If the folder cannot be made or read, or others may write to it.
    pub fn with_folder(bytes: u64, folder: &Path, budget: u64) -> io::Result<ResponseStore> {
        let folder = ResponseFolder::open(folder, budget)?;
        Ok(ResponseStore(Arc::new(StoreParts {
            memory: Mutex::new(ResponseMemory::new(bytes)),
            folder: Some(Mutex::new(folder)),
        })))
    }

    /// Whether any response is kept.
    pub fn is_on(&self) -> bool {
        self.0.folder.is_some() || self.memory().is_on()
    }

    /// Keeps a response. Its file is written later, on the blocking pool.
    pub fn keep(&self, response: KeptResponse) {
        let response = Arc::new(response);
        self.memory().insert(Arc::clone(&response));
        if self.0.folder.is_some() {
            let store = self.clone();
            tokio::task::spawn_blocking(move || {
                if let Some(mut folder) = store.folder() {
                    folder.write(&response);
                }
            });
        }
    }

    /// A kept response. May read a file.
    pub fn get(&self, id: &str) -> Option<Arc<KeptResponse>> {
        if let Some(found) = self.memory().get(id) {
            return Some(found);
        }
        let found = Arc::new(self.folder()?.read(id)?);
        self.memory().insert(Arc::clone(&found));
        Some(found)
    }

    /// Forgets a response; whether it was kept. May remove a file.
    pub fn forget(&self, id: &str) -> bool {
        let in_memory = self.memory().remove(id);
        let on_disk = self.folder().is_some_and(|mut folder| folder.remove(id));
        in_memory || on_disk
    }

    /// The turns of a conversation up to the response with this id, the first one first. The error
    /// is the id that is not kept.
    ///
    /// # Errors
    /// If a response of the conversation is not kept, or it has too many.
    pub fn history(&self, id: &str) -> Result<Vec<StoredTurn>, String> {
        let mut turns = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next.take() {
            let Some(found) = self.get(&id).filter(|_| turns.len() < MAX_CHAIN) else {
                return Err(id);
            };
            turns.push(StoredTurn {
                input: found.input.clone(),
                output: found.output.clone(),
            });
            next.clone_from(&found.previous);
        }
        turns.reverse();
        Ok(turns)
    }

    /// The JSON of an item of a kept response that is in memory.
    pub fn item(&self, id: &str) -> Option<String> {
        let holder = self.memory().holder_of(id)?;
        item_by_id(&holder.output, id).or_else(|| item_by_id(&holder.input, id))
    }

    fn memory(&self) -> MutexGuard<'_, ResponseMemory> {
        // No code panics while it is locked.
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn folder(&self) -> Option<MutexGuard<'_, ResponseFolder>> {
        let folder = self.0.folder.as_ref()?;
        Some(folder.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests;
