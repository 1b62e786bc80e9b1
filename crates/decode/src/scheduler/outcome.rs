//! The results of one scheduler step.

use crate::event::Event;
use crate::job::JobId;

/// Whether a scheduler has more work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerState {
    /// Work was done; call `step` again.
    Working,
    /// No job is left; nothing happens until one is submitted.
    Idle,
}

/// Events of jobs, oldest first.
pub(super) type Events = Vec<(JobId, Event)>;

/// The result of an attempt to advance a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepOutcome {
    /// No job needs this kind of work.
    NothingToDo,
    /// A job advanced or ended.
    Advanced,
    /// The device had too little memory.
    OutOfMemory,
}
