//! A job: a prompt, how to continue it, and how often.

use std::fmt;
use std::sync::Arc;

use contract::{AttentionWindow, TokenId};

use crate::constraint::Constraints;

/// A job's id; chosen by the caller, unique among live jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {}", self.0)
    }
}

/// One request: a prompt and one or more continuations.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Identifies the job in its events.
    pub id: JobId,
    /// The prompt: at least one token, and fewer than the context holds.
    pub prompt: Arc<[TokenId]>,
    /// Number of continuations, 1 to [`Job::MAX_CHOICES`]. Choice `i` samples with `seed + i`.
    pub choices: usize,
    /// How to continue.
    pub params: GenerationParams,
    /// Higher runs first; equal priorities keep their order of arrival.
    pub priority: i32,
}

impl Job {
    /// Maximum number of continuations of one prompt.
    pub const MAX_CHOICES: usize = 128;
}

/// How a prompt is continued and reported.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Maximum number of generated tokens per choice; the context may end a choice earlier. With 0
    /// the prompt is only prefilled, for its logprobs.
    pub max_tokens: usize,
    /// End tokens are masked until this many tokens are generated.
    pub min_tokens: usize,
    /// Tokens that end a choice, besides [`SchedulerConfig::eos`](crate::SchedulerConfig::eos).
    pub stop_tokens: Vec<TokenId>,
    /// The only tokens that are generated; `None` allows all. A constraint's forced tokens come
    /// nevertheless, and where it allows none of these, it alone decides.
    pub allowed_tokens: Option<Arc<[TokenId]>>,
    /// Token sequences that the output does not contain, unless nothing else may follow.
    pub bad_words: Arc<[Vec<TokenId>]>,
    /// Treats [`SchedulerConfig::eos`](crate::SchedulerConfig::eos) as ordinary tokens.
    pub ignore_eos: bool,
    /// With `Some(n)`, each generated token has its logprob and the `n` likeliest.
    pub logprobs: Option<usize>,
    /// With `Some(n)`, the same for the prompt's tokens, in one event before the first token.
    pub prompt_logprobs: Option<usize>,
    /// Whether to speculate. Without, a decode step yields one token or a run of forced tokens.
    pub speculate: bool,
    /// The attention window while decoding. The prompt is prefilled with full attention.
    pub window: AttentionWindow,
    /// Constraints, one per choice.
    pub constraints: Option<Constraints>,
    /// The conversation, if the caller knows it. A hint: it protects the conversation's longest
    /// cached prefix from side requests.
    pub session: Option<Arc<str>>,
    /// Whether to look up and to save cached prefixes.
    pub use_prefix_cache: bool,
}

impl GenerationParams {
    /// Maximum number of alternatives of a logprob.
    pub const MAX_LOGPROBS: usize = 20;

    /// Whether its prompt may resume from a cached prefix. With prompt logprobs it cannot: a
    /// snapshot has no logits.
    pub(crate) fn reuses_prefixes(&self) -> bool {
        self.use_prefix_cache && self.prompt_logprobs.is_none()
    }
}

impl Default for GenerationParams {
    fn default() -> GenerationParams {
        GenerationParams {
            sampling: Sampling::default(),
            max_tokens: usize::MAX,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            allowed_tokens: None,
            bad_words: Arc::default(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            speculate: true,
            window: AttentionWindow::FULL,
            constraints: None,
            session: None,
            use_prefix_cache: true,
        }
    }
}

/// How a token is sampled from a row of logits.
///
/// Order: bias, repetition, frequency and presence penalties, all on the device. Then, at
/// temperature 0, the argmax with ties to the lower id. Otherwise top-k, temperature, softmax,
/// top-p, min-p, and one draw keyed by `(seed, absolute position)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the `k` highest logits; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest best tokens whose mass reaches this; 1.0 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the best; 0.0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the window; 1.0 is off.
    pub repetition: f32,
    /// Subtracted per earlier generation of a token; 0.0 is off.
    pub frequency: f32,
    /// Subtracted once from generated tokens; 0.0 is off.
    pub presence: f32,
    /// Latest tokens, prompt included, that `repetition` covers; `None` for all.
    pub window: Option<usize>,
    /// Added to single logits; each token at most once.
    pub bias: Vec<(TokenId, f32)>,
    /// Seed of the draws.
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
    /// Always the argmax.
    pub fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            ..Sampling::default()
        }
    }

    /// Whether sampling is greedy.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}
