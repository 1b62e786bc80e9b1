//! What can go wrong on a device, sorted by what the caller can do about it.

use crate::{SeqId, SnapshotId, WeightError};

/// An error of a [`Backend`](crate::Backend) or a [`Runner`](crate::Runner).
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This request does not fit now; others go on. Wait, shrink, or evict.
    #[error("no room for {what}: {wanted} wanted, {free} free")]
    OutOfMemory {
        /// The resource, with its unit, such as `"context tokens"` or `"memory bytes"`.
        what: &'static str,
        /// How much was asked for, in the unit of `what`.
        wanted: u64,
        /// How much is left, in the unit of `what`.
        free: u64,
    },
    /// The plan asks for something this device does not do. Arises from `estimate` and `open` only.
    #[error("{what} is not supported by {device}; {instead}")]
    Unsupported {
        /// What was asked for, by its user-visible name.
        what: String,
        /// The device's name.
        device: String,
        /// What to use instead.
        instead: String,
    },
    /// A weight is missing, of a wrong shape, or unreadable.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// No open sequence has this id.
    #[error("{0} is not open")]
    UnknownSequence(SeqId),
    /// No snapshot has this id.
    #[error("{0} does not exist")]
    UnknownSnapshot(SnapshotId),
    /// The calling protocol was broken; see [`Runner`](crate::Runner). A defect in the caller.
    #[error("misuse of {call}: {detail}")]
    InvalidCall {
        /// The method called.
        call: &'static str,
        /// What was wrong with the call.
        detail: String,
    },
    /// Bytes given to `import` are not a snapshot of this model on this layout. Treat as a cache miss.
    #[error("snapshot refused: {detail}")]
    InvalidSnapshot {
        /// Which field or section did not fit, and how.
        detail: String,
    },
    /// Reading or writing snapshot bytes failed.
    #[error("snapshot bytes could not be moved: {0}")]
    SnapshotIo(#[from] std::io::Error),
    /// The device can no longer be trusted; every sequence on it is gone.
    #[error("device lost in {during}: {detail}")]
    DeviceLost {
        /// The call or kernel that failed.
        during: &'static str,
        /// The driver's words.
        detail: String,
    },
}
