//! The decoding algorithm: who runs when, what is asked of the device, which token comes next.
//!
//! [`Scheduler`] owns one [`Runner`](contract::Runner) and many jobs. Its caller submits [`Job`]s, calls
//! [`Scheduler::step`] in a loop and carries the [`Event`]s away; everything else follows from that.
//!
//! What this crate must not know: devices, files, clocks, threads, futures, text. `step()` is a plain call.
//!
//! Start reading at [`scheduler`], then `round` (draft, tree, verify, accept, commit) and `sample`.

#![forbid(unsafe_code)]

mod constraint;
mod error;
mod event;
mod job;
pub mod prefix;
mod sample;
mod scheduler;
pub mod speculation;
mod stats;

pub use constraint::{
    Constraint, Constraints, Grammar, GrammarCompiler, GrammarError, InitialPhase, LogitBoost,
    ReasoningBudget, ReasoningConfig, ReasoningEnd, ReasoningHandle, ReasoningMachine,
    ReasoningTags, Tokenize, VocabEntry,
};
pub use error::{JobError, SubmitError};
pub use event::{ChoiceStats, Event, FinishReason, Logprobs, OutputToken};
pub use job::{GenerationParams, Job, JobId, Sampling};
pub use prefix::{PrefixConfig, PrefixStats, SavePointConfig, Store};
pub use scheduler::{NextPrompt, Progress, Scheduler, SchedulerConfig};
pub use speculation::{
    Clock, CostTable, MIN_SPEEDUP, Speculation, TreeInit, TreeRequest, TreeResult, TreeSource,
};
pub use stats::{AcceptanceByDepth, Cancellations, Stats, StepTimes};
