//! The decoding algorithm: which job runs when, which logits are requested, which token comes next.
//!
//! [`Scheduler`] owns one [`Runner`](contract::Runner) and many jobs. Its owner submits [`Job`]s,
//! calls [`Scheduler::step`] in a loop and delivers the [`Event`]s.
//!
//! This crate must not know devices, files, clocks, threads, futures or text. `step()` is a plain
//! call.
//!
//! | module | what it is |
//! |---|---|
//! | `scheduler` | admission, prefill, decode steps, preemption, cancellation, warm-up; start here
//! |
//! | [`speculation`] | draft trees: what is proposed, how large it is, and whether drafting pays |
//! | [`prefix`] | the prefix cache: what is saved, how it is found, what is evicted |
//! | `sample` | logits requests, logits processors and the draw |
//! | `constraint` | grammars and the reasoning state machine |
//! | `job`, `event`, `error`, `stats` | requests, results and counters |
//!
//! # A job's life
//!
//! 1. [`Scheduler::submit`] validates a job and queues it by priority.
//! 2. Once the KV pool has capacity, the job is admitted and resumes from the longest cached
//!    prefix.
//! 3. Its prompt is prefilled in chunks, which alternate with decode steps of other jobs.
//! 4. The prompt's last logits row yields the first token of each choice.
//! 5. Each decode step proposes a tree per sequence, verifies all trees in one call, samples along
//!    each tree while the sampled token is among the children, and commits the accepted path.
//! 6. If the pool runs out, the lowest-priority sequence is preempted and resumes later.
//! 7. A choice ends with an end token, a limit, a cancellation or an error, each reported as an
//!    event.

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
pub use scheduler::{NextPrompt, Scheduler, SchedulerConfig, SchedulerState};
pub use speculation::{
    Clock, CostTable, DraftSource, MIN_SPEEDUP, ProposedTree, SourceSet, SpeculationConfig,
    TreeInit, TreeProposer, TreeRequest, TreeResult,
};
pub use stats::{AcceptanceByDepth, Cancellations, Stats, StepTimes, TokensBySource};
