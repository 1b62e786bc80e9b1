//! Device errors, with one variant per action that a caller can take.

use std::io;
use std::sync::Arc;

use crate::{PlacementError, SeqId, SnapshotId, WeightError};

/// An error of a [`Backend`](crate::Backend) or a [`Runner`](crate::Runner).
#[derive(Debug, Clone, thiserror::Error)]
pub enum DeviceError {
    /// The shared KV pool has too few free pages. Preempt a sequence or evict snapshots, then
    /// retry.
    #[error("no room for pages of keys and values: {wanted} wanted, {free} free")]
    PoolExhausted {
        /// Pages that the call needs.
        wanted: usize,
        /// Pages that are free.
        free: usize,
    },
    /// The request does not fit a fixed limit or the memory. Other requests are not affected.
    #[error("no room for {what}: {wanted} wanted, {free} free")]
    OutOfMemory {
        /// The resource with its unit, such as `"context tokens"` or `"memory bytes"`. For display
        /// only.
        what: &'static str,
        /// The requested amount, in the unit of `what`.
        wanted: u64,
        /// The free amount, in the unit of `what`.
        free: u64,
    },
    /// The device cannot run the model as configured. Returned by `estimate` and `open` only.
    #[error("{what} is not supported by {device}; {instead}")]
    Unsupported {
        /// The unsupported feature, by its user-visible name.
        what: String,
        /// The device's name.
        device: String,
        /// What to use instead.
        instead: String,
    },
    /// The model cannot be placed on these devices. Returned by `estimate` and `open` only.
    #[error(transparent)]
    Placement(Box<PlacementError>),
    /// A weight is missing, has the wrong shape, or cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// No open sequence has this id.
    #[error("{0} is not open")]
    UnknownSequence(SeqId),
    /// No snapshot has this id.
    #[error("{0} does not exist")]
    UnknownSnapshot(SnapshotId),
    /// The caller broke the calling protocol of [`Runner`](crate::Runner): a bug in the caller.
    #[error("misuse of {call}: {detail}")]
    InvalidCall {
        /// The method called.
        call: &'static str,
        /// What was wrong with the call.
        detail: String,
    },
    /// Imported bytes are damaged or belong to another model or layout. Treat as a cache miss.
    #[error("snapshot refused: {detail}")]
    InvalidSnapshot {
        /// The field or section that did not match, and how.
        detail: String,
    },
    /// Reading or writing snapshot bytes failed.
    #[error("snapshot bytes could not be moved: {0}")]
    SnapshotIo(Arc<io::Error>),
    /// A call failed half-way through a sequence, whose state is incomplete. Close it; other
    /// sequences are not affected.
    #[error("{seq} is lost in {during}: {detail}; close it and prefill again")]
    SequenceLost {
        /// The sequence.
        seq: SeqId,
        /// The call that failed.
        during: &'static str,
        /// Where it failed, and why.
        detail: String,
    },
    /// A part of a model could not be opened on its device. Returned by `estimate` and `open` only.
    #[error("{part}: {error}")]
    Part {
        /// The device and its part of the model.
        part: String,
        /// Why not.
        error: Box<DeviceError>,
    },
    /// The device failed and must not be used again. All of its sequences are lost.
    #[error("device lost in {during}: {detail}")]
    DeviceLost {
        /// The call or kernel that failed.
        during: &'static str,
        /// The driver's message.
        detail: String,
    },
}

impl From<PlacementError> for DeviceError {
    fn from(error: PlacementError) -> DeviceError {
        DeviceError::Placement(Box::new(error))
    }
}

impl DeviceError {
    /// Whether the call failed for lack of memory and changed nothing, so that it can be retried.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            DeviceError::PoolExhausted { .. } | DeviceError::OutOfMemory { .. }
        )
    }

    /// Whether the call was refused before it changed anything: for lack of memory, or because the
    /// caller broke the protocol.
    pub fn is_refusal(&self) -> bool {
        self.is_out_of_memory()
            || matches!(
                self,
                DeviceError::InvalidCall { .. }
                    | DeviceError::UnknownSequence(_)
                    | DeviceError::UnknownSnapshot(_)
            )
    }

    /// The error of a device among several, with its name and its part of the model.
    pub(crate) fn named(self, part: &str) -> DeviceError {
        match self {
            DeviceError::DeviceLost { during, detail } => DeviceError::DeviceLost {
                during,
                detail: format!("{part}: {detail}"),
            },
            other => other,
        }
    }

    /// The error of a device that cannot open its part. Those that name the device stay as they
    /// are.
    pub(crate) fn at_open(self, part: &str) -> DeviceError {
        match self {
            DeviceError::DeviceLost { .. } => self.named(part),
            DeviceError::Unsupported { .. } | DeviceError::Placement(_) => self,
            error => DeviceError::Part {
                part: part.to_owned(),
                error: Box::new(error),
            },
        }
    }
}

impl From<io::Error> for DeviceError {
    fn from(error: io::Error) -> DeviceError {
        DeviceError::SnapshotIo(Arc::new(error))
    }
}
