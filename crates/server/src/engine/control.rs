//! Registry of running requests that `/chat/completions/control` can address by response id.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use decode::ReasoningHandle;

/// Running responses with reasoning control.
#[derive(Debug, Clone, Default)]
pub struct ControlRegistry {
    handles: Arc<Mutex<HashMap<String, Vec<Arc<ReasoningHandle>>>>>,
}

/// Guard of a registered response: removes it on drop.
#[derive(Debug)]
pub struct ControlGuard {
    registry: ControlRegistry,
    id: String,
}

impl ControlRegistry {
    /// Registers a response until the returned guard is dropped.
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

    /// Ends the reasoning of a response; `false` if no running response has that id.
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
    fn response_is_registered_until_its_guard_drops() {
        let registry = ControlRegistry::default();
        let guard = registry.register("a", vec![Arc::default()]);
        assert!(registry.end_reasoning("a"));
        assert!(!registry.end_reasoning("b"));
        drop(guard);
        assert!(!registry.end_reasoning("a"));
    }
}
