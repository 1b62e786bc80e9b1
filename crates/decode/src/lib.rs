//! The decoding algorithm: who runs when, what is asked of the device, which token comes next.
//!
//! [`Scheduler`] owns one [`Runner`](contract::Runner) and many jobs. Its caller submits [`Job`]s, calls
//! [`Scheduler::step`] in a loop and carries the [`Event`]s away; everything else follows from that.
//!
//! What this crate must not know: devices, files, clocks, threads, futures, text. `step()` is a plain call.
//!
//! Start reading at [`scheduler`], then [`tree_build`].

#![forbid(unsafe_code)]

pub mod error;
pub mod event;
pub mod job;
pub mod scheduler;
pub mod stats;
pub mod tree_build;

pub use error::{Failure, Reject};
pub use event::{ChoiceStats, Event, FinishReason, Logprobs, OutToken};
pub use job::{Job, JobId, Sampling, Settings};
pub use scheduler::{Progress, Scheduler, SchedulerConfig};
pub use stats::{Cancellations, Stats};
pub use tree_build::{Root, TreeSource};
