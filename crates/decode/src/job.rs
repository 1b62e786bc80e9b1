//! What a caller asks for: a prompt, how to continue it, and how often.

use std::fmt;
use std::sync::Arc;

use contract::{AttentionWindow, TokenId};

use crate::constraint::Constraints;

/// Names a job; chosen by the caller, unique among live jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {}", self.0)
    }
}

/// One request: a prompt and one or more continuations of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Names the job in every event.
    pub id: JobId,
    /// The tokens to continue, at least one and fewer than the context holds.
    pub prompt: Arc<[TokenId]>,
    /// How many continuations, 1 to [`Job::MAX_CHOICES`]. Choice `i` draws with `seed + i`.
    pub choices: usize,
    /// How to continue.
    pub params: GenerationParams,
    /// Higher goes first; equal priorities keep their order of arrival.
    pub priority: i32,
}

impl Job {
    /// The most continuations of one prompt.
    pub const MAX_CHOICES: usize = 8;
}

/// How a prompt is continued, and what is told about it.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// How each token is chosen.
    pub sampling: Sampling,
    /// The most tokens generated per choice; the context may end a choice earlier. With 0 the prompt is
    /// read, its logprobs are told if wanted, and nothing is generated.
    pub max_tokens: usize,
    /// No token that would end the choice is chosen before this many tokens have been.
    pub min_tokens: usize,
    /// Tokens that end a choice, besides those of [`SchedulerConfig::eos`](crate::SchedulerConfig::eos).
    pub stop_tokens: Vec<TokenId>,
    /// Treats the tokens of [`SchedulerConfig::eos`](crate::SchedulerConfig::eos) as any other.
    pub ignore_eos: bool,
    /// With `Some(n)`, every generated token comes with its logprob and the `n` best ones.
    pub logprobs: Option<usize>,
    /// With `Some(n)`, the same for the tokens of the prompt, in one event before the first token.
    pub prompt_logprobs: Option<usize>,
    /// Whether tokens may be drafted. Without, a round gives one token, or a run of what is forced.
    pub speculate: bool,
    /// What of the context is seen in attention once the prompt is read; the prompt itself is read in full.
    pub window: AttentionWindow,
    /// What may or must come, one for each choice.
    pub constraints: Option<Constraints>,
    /// Which conversation this belongs to, if its caller knows. Only ever a hint: it protects the longest saved
    /// state of a conversation from requests on the side.
    pub session: Option<Arc<str>>,
    /// Whether saved states may be looked up for its prompt, and states of it saved.
    pub use_saved: bool,
}

impl GenerationParams {
    /// The most alternatives a logprob may come with.
    pub const MAX_LOGPROBS: usize = 20;

    /// Whether its prompt may begin with a saved state. One whose logprobs are told is read whole: a state has no rows.
    pub(crate) fn reuses_prefixes(&self) -> bool {
        self.use_saved && self.prompt_logprobs.is_none()
    }
}

impl Default for GenerationParams {
    fn default() -> GenerationParams {
        GenerationParams {
            sampling: Sampling::default(),
            max_tokens: usize::MAX,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            speculate: true,
            window: AttentionWindow::FULL,
            constraints: None,
            session: None,
            use_saved: true,
        }
    }
}

/// How a token is chosen from a row of logits.
///
/// Order: bias, repetition, frequency and presence (these four on the device); then, at temperature 0, the
/// best token, ties to the lower id; otherwise top-k, temperature, softmax, top-p, min-p, and one draw keyed
/// by `(seed, absolute position)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 for greedy; logits are divided by it.
    pub temperature: f32,
    /// Keeps the `k` best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest best tokens whose mass reaches this; 1.0 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the best; 0.0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in the window; 1.0 for none.
    pub repetition: f32,
    /// Subtracted per earlier generation of a token; 0.0 for none.
    pub frequency: f32,
    /// Subtracted once from tokens that were generated; 0.0 for none.
    pub presence: f32,
    /// How many of the latest tokens, prompt included, `repetition` looks at; `None` for all.
    pub window: Option<usize>,
    /// Added to single logits; each token at most once.
    pub bias: Vec<(TokenId, f32)>,
    /// Names the sequence of draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
            window: None,
            bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Always the best token.
    pub fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            ..Sampling::default()
        }
    }

    /// Whether the best token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}
