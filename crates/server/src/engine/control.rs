//! Requests that can still be told something: by the id their answer carries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use decode::ReasoningHandle;

/// Answers under way that have reins.
#[derive(Debug, Clone, Default)]
pub struct ControlRegistry {
    handles: Arc<Mutex<HashMap<String, Vec<Arc<ReasoningHandle>>>>>,
}

/// Keeps an answer listed while it lives.
#[derive(Debug)]
pub struct ControlGuard {
    registry: ControlRegistry,
    id: String,
}

impl ControlRegistry {
    /// Lists an answer until what is returned is dropped.
    pub fn register(
        &self,
        id: &str,
        handles_of_request: Vec<Arc<ReasoningHandle>>,
    ) -> ControlGuard {
        self.map(|handles| handles.insert(id.to_owned(), handles_of_request));
        ControlGuard {
            registry: self.clone(),
            id: id.to_owned(),
        }
    }

    /// Closes the thinking of an answer; `false` if none of that id is under way.
    pub fn end_reasoning(&self, id: &str) -> bool {
        self.map(|handles| match handles.get(id) {
            Some(handles_of_request) => {
                handles_of_request
                    .iter()
                    .for_each(|handles_of_request| handles_of_request.end_reasoning());
                true
            }
            None => false,
        })
    }

    fn map<T>(&self, work: impl FnOnce(&mut HashMap<String, Vec<Arc<ReasoningHandle>>>) -> T) -> T {
        work(&mut self.handles.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for ControlGuard {
    fn drop(&mut self) {
        self.registry.map(|handles| handles.remove(&self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_listed_while_it_lives() {
        let registry = ControlRegistry::default();
        let guard = registry.register("a", vec![Arc::default()]);
        assert!(registry.end_reasoning("a"));
        assert!(!registry.end_reasoning("b"));
        drop(guard);
        assert!(!registry.end_reasoning("a"));
    }
}
