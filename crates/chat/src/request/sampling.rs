//! Sampling parameters, lengths and stops.

use contract::TokenId;

/// How tokens are chosen and when a reply ends. `None` leaves the choice to the model card or the
/// server.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SamplingParams {
    /// Maximum number of tokens of the reply, reasoning included; `usize::MAX` for as many as the
    /// context holds.
    pub max_tokens: Option<usize>,
    /// 0 or more; 0 is greedy.
    pub temperature: Option<f32>,
    /// 0..=1; 0 keeps the best token alone.
    pub top_p: Option<f32>,
    /// 0 is off.
    pub top_k: Option<usize>,
    /// 0..=1.
    pub min_p: Option<f32>,
    /// Any finite value.
    pub frequency_penalty: Option<f32>,
    /// Any finite value.
    pub presence_penalty: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
    /// Tokens that penalties cover.
    pub rep_window: Option<RepetitionWindow>,
    /// `None` draws a random seed.
    pub seed: Option<u64>,
    /// Added to the logits of these tokens: -100..=100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Whether to continue after an end token.
    pub ignore_eos: bool,
    /// Fewest tokens before the reply may end.
    pub min_tokens: usize,
    /// Stop strings; none is empty.
    pub stop: Vec<String>,
    /// Stop tokens.
    pub stop_token_ids: Vec<TokenId>,
    /// Whether the text includes the stop string or the text of the stop token that ended it.
    pub include_stop: bool,
    /// The only tokens that may be generated; `None` allows all. Never empty.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Words that are not generated; none is empty.
    pub bad_words: Vec<String>,
    /// Choices per prompt, 1..=128.
    pub n: usize,
    /// Whether speculative decoding is off for this request (`speculative: false`).
    pub disable_speculation: bool,
}

/// Tokens that penalties cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepetitionWindow {
    /// The whole text.
    All,
    /// The last so many tokens.
    Last(usize),
}
