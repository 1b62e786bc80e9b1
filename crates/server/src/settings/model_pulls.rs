//! Models that clients have pulled, and who may.

use std::fmt;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Progress of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledFile {
    /// The file's name.
    pub name: String,
    /// The hash of its content with the name of the function, `sha256:` or `sha1:`.
    pub digest: Option<String>,
    /// Its bytes.
    pub total_bytes: u64,
    /// Those that are there, or that are checked.
    pub done_bytes: u64,
    /// Whether the file is complete and its hash is computed.
    pub is_checking: bool,
}

/// Pulls the model of a name; reports progress from any thread, and often.
pub type PullModel =
    dyn Fn(&str, &(dyn Fn(PulledFile) + Sync)) -> Result<(), ApiError> + Send + Sync;

/// Whether clients may have models pulled.
#[derive(Clone)]
pub enum ModelPulls {
    /// They may, one model at a time.
    Allowed(ModelPuller),
    /// They may not, for this reason.
    Refused(&'static str),
}

/// Pulls one model at a time.
#[derive(Clone)]
pub struct ModelPuller {
    pull: Arc<PullModel>,
    turn: Arc<Semaphore>,
}

impl ModelPulls {
    /// Pulls by this function.
    pub fn by(pull: Arc<PullModel>) -> ModelPulls {
        ModelPulls::Allowed(ModelPuller {
            pull,
            turn: Arc::new(Semaphore::new(1)),
        })
    }
}

impl Default for ModelPulls {
    fn default() -> ModelPulls {
        ModelPulls::Refused("this server pulls no models")
    }
}

impl fmt::Debug for ModelPulls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ModelPulls::Allowed(_) => "Allowed",
            ModelPulls::Refused(_) => "Refused",
        })
    }
}

/// The right to pull until it is dropped.
pub struct PullPermit {
    pull: Arc<PullModel>,
    _turn: OwnedSemaphorePermit,
}

impl ModelPuller {
    /// Takes the right to pull.
    ///
    /// # Errors
    /// While another pull runs.
    pub fn begin(&self) -> Result<PullPermit, ApiError> {
        let turn = Arc::clone(&self.turn).try_acquire_owned();
        let turn = turn.map_err(|_| {
            ApiError::unavailable("another model is being pulled; try again when that is done")
        })?;
        Ok(PullPermit {
            pull: Arc::clone(&self.pull),
            _turn: turn,
        })
    }
}

impl PullPermit {
    /// Pulls; blocks until the end.
    ///
    /// # Errors
    /// If the name is none, or its files cannot be downloaded.
    pub fn pull(&self, name: &str, report: &(dyn Fn(PulledFile) + Sync)) -> Result<(), ApiError> {
        (self.pull)(name, report)
    }
}
