//! Errors of submission and of running jobs.

use contract::DeviceError;

use crate::job::JobId;

/// A job that was rejected before it was queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt leaves no space for an answer.
    #[error(
        "the prompt has {prompt_tokens} tokens; the context holds {context_tokens}, answer included"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Maximum number of tokens of a sequence.
        context_tokens: usize,
    },
    /// The prompt is empty.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The queue is full. Retry later.
    #[error("the queue is full: {queued} of {limit} jobs wait")]
    QueueFull {
        /// Jobs waiting.
        queued: usize,
        /// The limit.
        limit: usize,
    },
    /// A parameter is out of range or not supported.
    #[error("{field}: {detail}")]
    Invalid {
        /// The parameter, as requests name it.
        field: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// A live job has this id: a bug in the caller.
    #[error("{0} is already there")]
    Duplicate(JobId),
    /// The device is lost; this scheduler runs nothing more.
    #[error("the device was lost in {during}: {detail}")]
    DeviceLost {
        /// The call that failed.
        during: &'static str,
        /// The driver's message.
        detail: String,
    },
}

/// Why a running job failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The device lacks a resource, and no other job's end would free it.
    #[error("no room for {what}: {wanted} wanted, {free} free")]
    OutOfMemory {
        /// The resource with its unit.
        what: &'static str,
        /// The requested amount.
        wanted: u64,
        /// The free amount.
        free: u64,
    },
    /// The device is lost, and every job with it.
    #[error("the device was lost in {during}: {detail}")]
    DeviceLost {
        /// The call that failed.
        during: &'static str,
        /// The driver's message.
        detail: String,
    },
    /// The constraint exceeds a limit of the grammar engine; a simpler grammar may work.
    #[error("the grammar cannot be followed: {detail}")]
    Constraint {
        /// The limit.
        detail: String,
    },
    /// A call failed half-way through this job's sequence. Other jobs are not affected.
    #[error("the sequence was lost in {during}: {detail}")]
    SequenceLost {
        /// The call that failed.
        during: &'static str,
        /// Where it failed, and why.
        detail: String,
    },
    /// The device rejected a call: a bug.
    #[error("the device refused a call: {detail}")]
    Device {
        /// The device's message.
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
            DeviceError::SequenceLost { during, detail, .. } => JobError::SequenceLost {
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
    /// The rejection by a scheduler whose device is lost.
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
