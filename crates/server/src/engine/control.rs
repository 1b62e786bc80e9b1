//! Requests that can still be told something: by the id their answer carries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use decode::ReasoningHandle;

/// Answers under way that have reins.
#[derive(Debug, Clone, Default)]
pub struct Live {
    held: Arc<Mutex<HashMap<String, Vec<Arc<ReasoningHandle>>>>>,
}

/// Keeps an answer listed while it lives.
#[derive(Debug)]
pub struct Listed {
    live: Live,
    id: String,
}

impl Live {
    /// Lists an answer until what is returned is dropped.
    pub fn list(&self, id: &str, reins: Vec<Arc<ReasoningHandle>>) -> Listed {
        self.map(|held| held.insert(id.to_owned(), reins));
        Listed {
            live: self.clone(),
            id: id.to_owned(),
        }
    }

    /// Closes the thinking of an answer; `false` if none of that id is under way.
    pub fn close_thinking(&self, id: &str) -> bool {
        self.map(|held| match held.get(id) {
            Some(reins) => {
                reins.iter().for_each(|reins| reins.end_reasoning());
                true
            }
            None => false,
        })
    }

    fn map<T>(&self, work: impl FnOnce(&mut HashMap<String, Vec<Arc<ReasoningHandle>>>) -> T) -> T {
        work(&mut self.held.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.live.map(|held| held.remove(&self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_listed_while_it_lives() {
        let live = Live::default();
        let listed = live.list("a", vec![Arc::default()]);
        assert!(live.close_thinking("a"));
        assert!(!live.close_thinking("b"));
        drop(listed);
        assert!(!live.close_thinking("a"));
    }
}
