//! The right to use a loaded model.

use std::sync::Arc;

use crate::engine::handle::EngineHandle;

/// A model in use: it is not unloaded before the lease is dropped.
pub struct Lease {
    name: String,
    engine: EngineHandle,
    /// Gives the lease back; called once.
    release: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// Why there is no lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// The model cannot be loaded.
    #[error("the model cannot be loaded: {0}")]
    NotLoaded(Arc<str>),
    /// The server shuts down.
    #[error("the server is shutting down")]
    Draining,
}

impl Lease {
    /// A lease that `release` gives back.
    pub(super) fn new(
        name: &str,
        engine: EngineHandle,
        release: impl FnOnce() + Send + Sync + 'static,
    ) -> Lease {
        Lease {
            name: name.to_owned(),
            engine,
            release: Some(Box::new(release)),
        }
    }

    /// The model's engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// The model's id.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}
