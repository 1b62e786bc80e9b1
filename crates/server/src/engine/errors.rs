//! Errors of the engine: refused admissions and requests that ended early.

use std::sync::Arc;
use std::time::Duration;

use decode::SubmitError;

use crate::engine::EnginePhase;
use crate::error::ApiError;

/// Terminal error of an admitted request.
#[derive(Debug, Clone)]
pub enum TerminalError {
    /// The scheduler rejects it.
    Rejected(SubmitError),
    /// It exceeded the queue timeout.
    QueueTimeout(Duration),
    /// The server shuts down.
    Draining,
    /// The engine thread ended.
    EngineLost(Arc<str>),
}

/// Admission error: the request was not queued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdmissionError {
    /// The queue is full.
    QueueFull {
        /// Queue length.
        waiting: usize,
    },
    /// The engine is loading, draining or gone.
    NotReady(EnginePhase),
}

impl From<TerminalError> for ApiError {
    fn from(error: TerminalError) -> ApiError {
        match error {
            TerminalError::Rejected(reject) => reject.into(),
            TerminalError::QueueTimeout(after) => ApiError::unavailable(format!(
                "the request waited {} s for its turn and was given up",
                after.as_secs_f64()
            )),
            TerminalError::Draining => ApiError::unavailable("the server is shutting down"),
            TerminalError::EngineLost(detail) => {
                ApiError::internal(format!("the engine was lost: {detail}"))
            }
        }
    }
}

impl From<AdmissionError> for ApiError {
    fn from(error: AdmissionError) -> ApiError {
        match error {
            AdmissionError::QueueFull { waiting } => ApiError::QueueFull { waiting },
            AdmissionError::NotReady(phase) => phase_error(&phase),
        }
    }
}

/// Error while the engine admits no requests.
pub fn phase_error(phase: &EnginePhase) -> ApiError {
    match phase {
        EnginePhase::Loading => ApiError::unavailable("the model is still loading"),
        EnginePhase::Draining | EnginePhase::Stopped => {
            ApiError::unavailable("the server is shutting down")
        }
        EnginePhase::Ready => ApiError::unavailable("the server is busy"),
        EnginePhase::Failed(detail) => ApiError::internal(format!("the engine was lost: {detail}")),
    }
}
