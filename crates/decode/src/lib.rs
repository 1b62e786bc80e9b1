//! The decoding algorithm: who runs when, what is asked of the device, which token comes next.
//!
//! [`Scheduler`] owns one [`Runner`](contract::Runner) and many jobs. Its caller submits [`Job`]s, calls
//! [`Scheduler::step`] in a loop and carries the [`Event`]s away; everything else follows from that.
//!
//! What this crate must not know: devices, files, clocks, threads, futures, text. `step()` is a plain call.
//!
//! Start reading at [`scheduler`], then `round` (draft, tree, verify, accept, commit) and `sample`.

#![forbid(unsafe_code)]

mod accept;
mod admission;
mod ahead;
mod cancel;
pub mod constraint;
pub mod costs;
mod doubt;
pub mod error;
pub mod event;
pub mod grow;
mod habit;
pub mod job;
mod parking;
mod prefill;
pub mod prefix;
mod queue;
#[cfg(test)]
mod regret;
mod round;
mod running;
mod sample;
pub mod scheduler;
mod sequence;
pub mod stats;
pub mod tree_build;

pub use ahead::NextPrompt;
pub use constraint::{
    Constraint, Constraints, ForcedText, Grammar, GrammarCompiler, GrammarError, InitialPhase,
    LogitBoost, ReasoningBudget, ReasoningConfig, ReasoningEnd, ReasoningHandle, ReasoningMachine,
    ReasoningTags, VocabEntry,
};
pub use costs::{Clock, CostTable};
pub use error::{JobError, SubmitError};
pub use event::{ChoiceStats, Event, FinishReason, Logprobs, OutputToken};
pub use grow::TreeInit;
pub use job::{GenerationParams, Job, JobId, Sampling};
pub use prefix::{PrefixConfig, PrefixStats, SavePointConfig, Store};
pub use scheduler::{Progress, Scheduler, SchedulerConfig};
pub use stats::{AcceptanceByDepth, Cancellations, Stats, StepTimes};
pub use tree_build::{MIN_SPEEDUP, Speculation, TreeRequest, TreeResult, TreeSource};
