//! Why a job was not taken, and why one could not go on.

use contract::DeviceError;

use crate::job::JobId;

/// A job that was refused before anything was queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt_tokens} tokens; the context holds {context_tokens}, answer included"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens of the longest sequence.
        context_tokens: usize,
    },
    /// There is nothing to continue.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// Too many jobs wait already. Try again later.
    #[error("the queue is full: {queued} of {limit} jobs wait")]
    QueueFull {
        /// Jobs waiting.
        queued: usize,
        /// The most that may wait.
        limit: usize,
    },
    /// A setting is out of its range, or not supported.
    #[error("{field}: {detail}")]
    Invalid {
        /// The setting, by the name requests use.
        field: &'static str,
        /// What was wrong with it.
        detail: String,
    },
    /// A live job has this id. A defect in the caller.
    #[error("{0} is already there")]
    Duplicate(JobId),
    /// The device was lost; nothing will ever run again on this scheduler.
    #[error("the device was lost in {during}: {detail}")]
    DeviceLost {
        /// The call that failed.
        during: &'static str,
        /// The driver's words.
        detail: String,
    },
}

/// Why a running job ended without its answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The device has not enough of something, and no neighbour whose end would free it.
    #[error("no room for {what}: {wanted} wanted, {free} free")]
    OutOfMemory {
        /// The resource, with its unit.
        what: &'static str,
        /// How much was asked for.
        wanted: u64,
        /// How much is left.
        free: u64,
    },
    /// The device was lost, and every job with it.
    #[error("the device was lost in {during}: {detail}")]
    DeviceLost {
        /// The call that failed.
        during: &'static str,
        /// The driver's words.
        detail: String,
    },
    /// What the answer must obey is beyond what can be followed; a simpler grammar may go.
    #[error("the grammar cannot be followed: {detail}")]
    Constraint {
        /// Which limit was met.
        detail: String,
    },
    /// The device refused a call; a defect.
    #[error("the device refused a call: {detail}")]
    Device {
        /// The device's words.
        detail: String,
    },
}

impl From<&DeviceError> for JobError {
    fn from(error: &DeviceError) -> JobError {
        match error {
            DeviceError::PoolExhausted { wanted, free } => JobError::OutOfMemory {
                what: "pages of keys and values",
                wanted: *wanted as u64,
                free: *free as u64,
            },
            DeviceError::OutOfMemory { what, wanted, free } => JobError::OutOfMemory {
                what,
                wanted: *wanted,
                free: *free,
            },
            DeviceError::DeviceLost { during, detail } => JobError::DeviceLost {
                during,
                detail: detail.clone(),
            },
            other => JobError::Device {
                detail: other.to_string(),
            },
        }
    }
}

impl SubmitError {
    /// The refusal of a scheduler whose device is gone.
    pub(crate) fn device_lost(error: &DeviceError) -> SubmitError {
        match JobError::from(error) {
            JobError::DeviceLost { during, detail } => SubmitError::DeviceLost { during, detail },
            other => SubmitError::DeviceLost {
                during: "an earlier call",
                detail: other.to_string(),
            },
        }
    }
}
