//! What a caller is told about a job.

use contract::TokenId;

use crate::error::JobError;
use crate::stats::{AcceptanceByDepth, StepTimes};

/// One piece of news about one job, in the order things happened.
///
/// A job's last event is the `Finished` of its last open choice, or a `Failed`; after that it is gone.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The job left the queue.
    Started {
        /// Prompt tokens that need not be read because a saved state held them.
        cached: usize,
    },
    /// Another chunk of the prompt has been read.
    Prefill {
        /// Prompt tokens read or cached so far.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// Logprobs of the prompt's tokens, `[prompt]`; the first token has none.
    PromptLogprobs(Vec<Option<Logprobs>>),
    /// New tokens of one choice, at least one. A token that ends the choice is the last of its tokens.
    Tokens {
        /// Which choice.
        choice: usize,
        /// The tokens, oldest first.
        tokens: Vec<OutputToken>,
    },
    /// A choice is complete; nothing more comes for it.
    Finished {
        /// Which choice.
        choice: usize,
        /// Why it ended.
        reason: FinishReason,
        /// What it took.
        stats: ChoiceStats,
    },
    /// The job could not go on; nothing more comes for any of its choices.
    Failed {
        /// Why.
        error: JobError,
    },
}

/// A generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub id: TokenId,
    /// Its logprob, if the job asked for it.
    pub logprobs: Option<Logprobs>,
}

/// How likely a token was, by the raw logits: before bias, penalties and temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of the token's probability; minus infinity is possible.
    pub logprob: f32,
    /// The likeliest tokens with theirs, best first, ties to the lower id.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// It chose a token that ends it.
    Eos,
    /// It reached the most tokens it was allowed.
    Length,
    /// Prompt and output filled the context.
    ContextFull,
    /// Its caller did not want more.
    Cancelled,
}

/// What one choice took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChoiceStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that a saved state held.
    pub cached_tokens: usize,
    /// Tokens generated, the ending one included.
    pub generated_tokens: usize,
    /// Verify passes it took part in.
    pub decode_steps: usize,
    /// Tree nodes proposed beyond the roots; 0 where nothing was drafted.
    pub drafted_tokens: usize,
    /// Of these, nodes that stood on the path kept.
    pub accepted_tokens: usize,
    /// Tokens that were forced upon it.
    pub forced_tokens: usize,
    /// How deep its drafts came true.
    pub depths: AcceptanceByDepth,
    /// Time of the rounds it took part in, with whatever others did in them.
    pub times: StepTimes,
}
