//! What compression kept of prompts and messages, by the hash of the raw text: in memory, and on
//! disk if there is a folder. So an equal text need not be scored again, and the prefix cache finds
//! the same compressed prompt after a restart.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Texts that are remembered in memory.
const REMEMBERED: usize = 256;

/// Hash of a raw text and of all that its kept text depends on.
pub(super) type TextKey = [u8; 32];

/// Texts that outlive the process. A failure is a miss.
pub trait TextStore: Send + Sync {
    /// The text of a key, if it is stored and undamaged.
    fn get(&self, key: &[u8; 32]) -> Option<String>;

    /// Stores a text.
    fn put(&self, key: &[u8; 32], text: &str);
}

/// The shortened content of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptText {
    /// Its index in the request; 0 for a message that was scored alone.
    pub(super) message: usize,
    pub(super) content: String,
}

/// Kept texts of prompts and of messages.
pub(super) struct KeptTexts {
    memory: Mutex<HashMap<TextKey, Arc<Vec<KeptText>>>>,
    store: Option<Box<dyn TextStore>>,
}

impl KeptTexts {
    pub(super) fn new(store: Option<Box<dyn TextStore>>) -> KeptTexts {
        KeptTexts {
            memory: Mutex::default(),
            store,
        }
    }

    pub(super) fn get(&self, key: &TextKey) -> Option<Arc<Vec<KeptText>>> {
        if let Some(texts) = self.lock().get(key) {
            return Some(Arc::clone(texts));
        }
        let stored = self.store.as_ref()?.get(key)?;
        // Another version of this program wrote what cannot be read.
        let texts: Arc<Vec<KeptText>> = Arc::new(serde_json::from_str(&stored).ok()?);
        self.remember(*key, Arc::clone(&texts));
        Some(texts)
    }

    pub(super) fn insert(&self, key: TextKey, texts: Vec<KeptText>) -> Arc<Vec<KeptText>> {
        if let Some(store) = &self.store
            && let Ok(text) = serde_json::to_string(&texts)
        {
            store.put(&key, &text);
        }
        let texts = Arc::new(texts);
        self.remember(key, Arc::clone(&texts));
        texts
    }

    fn remember(&self, key: TextKey, texts: Arc<Vec<KeptText>>) {
        let mut memory = self.lock();
        if memory.len() >= REMEMBERED {
            memory.clear();
        }
        memory.insert(key, texts);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TextKey, Arc<Vec<KeptText>>>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct MapStore(Arc<Mutex<HashMap<TextKey, String>>>);

    impl TextStore for MapStore {
        fn get(&self, key: &TextKey) -> Option<String> {
            self.0.lock().unwrap().get(key).cloned()
        }

        fn put(&self, key: &TextKey, text: &str) {
            self.0.lock().unwrap().insert(*key, text.to_owned());
        }
    }

    fn texts(content: &str) -> Vec<KeptText> {
        vec![KeptText {
            message: 3,
            content: content.to_owned(),
        }]
    }

    #[test]
    fn texts_outlive_the_memory_in_the_store_and_damaged_ones_are_misses() {
        let shared = Arc::<Mutex<HashMap<TextKey, String>>>::default();
        let open = || KeptTexts::new(Some(Box::new(MapStore(Arc::clone(&shared)))));
        open().insert([1; 32], texts("one"));
        let again = open();
        assert_eq!(*again.get(&[1; 32]).unwrap(), texts("one"));
        assert!(again.get(&[2; 32]).is_none());
        shared.lock().unwrap().insert([2; 32], "no JSON".to_owned());
        assert!(again.get(&[2; 32]).is_none());
        assert!(KeptTexts::new(None).get(&[1; 32]).is_none());
    }

    #[test]
    fn memory_is_bounded() {
        let kept = KeptTexts::new(None);
        for i in 0..=REMEMBERED {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&i.to_le_bytes());
            kept.insert(key, texts("a"));
        }
        assert_eq!(kept.lock().len(), 1);
    }
}
