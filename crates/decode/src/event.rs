//! Events of a job.

use contract::TokenId;

use crate::error::JobError;
use crate::stats::{AcceptanceByDepth, StepTimes, TokensBySource};

/// An event of one job, in order of occurrence.
///
/// A job's last event is the `Finished` of its last open choice, or `Failed`. Then the job is gone.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The job left the queue.
    Started {
        /// Prompt tokens taken from a cached prefix.
        cached: usize,
    },
    /// A chunk of the prompt was prefilled.
    Prefill {
        /// Prompt tokens prefilled or cached so far.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// Logprobs of the prompt's tokens, `[prompt]`; the first token has none.
    PromptLogprobs(Vec<Option<Logprobs>>),
    /// New tokens of one choice, at least one. An end token is the last.
    Tokens {
        /// The choice.
        choice: usize,
        /// The tokens, oldest first.
        tokens: Vec<OutputToken>,
    },
    /// A choice is complete; it has no further events.
    Finished {
        /// The choice.
        choice: usize,
        /// Why it ended.
        reason: FinishReason,
        /// Its counters.
        stats: ChoiceStats,
    },
    /// The job failed; none of its choices has further events.
    Failed {
        /// The error.
        error: JobError,
    },
}

/// A generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub id: TokenId,
    /// Its logprob, if the job requested it.
    pub logprobs: Option<Logprobs>,
}

/// The probability of a token by the raw logits, before bias, penalties and temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of the token's probability; may be minus infinity.
    pub logprob: f32,
    /// The likeliest tokens and their logprobs, best first, ties to the lower id.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// It generated an end token.
    Eos,
    /// It reached `max_tokens`.
    Length,
    /// Prompt and output filled the context.
    ContextFull,
    /// The caller cancelled it.
    Cancelled,
}

/// Counters of one choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChoiceStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens taken from a cached prefix.
    pub cached_tokens: usize,
    /// Tokens generated, the end token included.
    pub generated_tokens: usize,
    /// Decode steps it took part in.
    pub decode_steps: usize,
    /// Drafted tree nodes, without roots.
    pub drafted_tokens: usize,
    /// Drafted nodes that were accepted.
    pub accepted_tokens: usize,
    /// Both by source.
    pub by_source: TokensBySource,
    /// Forced tokens.
    pub forced_tokens: usize,
    /// Accepted tokens by depth.
    pub depths: AcceptanceByDepth,
    /// Time of its decode steps, other sequences included.
    pub times: StepTimes,
}
