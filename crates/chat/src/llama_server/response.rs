//! Replies and stream events.

use serde::Serialize;
use serde_json::Value;

use crate::openai::response::MatchedStop;
use crate::openai::stream::PromptProgress;
use crate::reply::{FinishReason, Timings, TopLogprob};

/// A whole completion, or one event of a stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LlamaCompletion {
    /// Which of the prompts and their completions.
    pub index: usize,
    /// The text, or more of it.
    pub content: String,
    /// Ids of its tokens; empty in a whole reply that does not ask for them.
    pub tokens: Vec<u32>,
    /// The slot that the request asked for, or -1.
    pub id_slot: i64,
    /// Whether the completion has ended.
    pub stop: bool,
    /// Tokens generated so far.
    pub tokens_predicted: usize,
    /// Tokens of the prompt.
    pub tokens_evaluated: usize,
    /// How it ended.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub ending: Option<LlamaEnding>,
    /// Logprobs of its tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_probabilities: Option<Vec<TokenProbability>>,
    /// On the last event, or on all when asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// Prefill progress, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<PromptProgress>,
}

/// What only a completion that has ended shows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LlamaEnding {
    /// The model as the client named it.
    pub model: String,
    /// Sampling parameters that were used.
    pub generation_settings: Value,
    /// The prompt, decoded from its tokens.
    pub prompt: String,
    /// Whether the text has more than one line.
    pub has_new_line: bool,
    /// Whether the context was full.
    pub truncated: bool,
    /// Why it ended.
    pub stop_type: StopType,
    /// The stop string that ended it, or nothing.
    pub stopping_word: String,
    /// Tokens of prompt and reply that the KV cache held at the end.
    pub tokens_cached: usize,
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StopType {
    /// By an end token.
    Eos,
    /// By the token limit or the context.
    Limit,
    /// By a stop string.
    Word,
}

impl StopType {
    /// From the finish reason and what of the request ended the text.
    pub fn new(reason: FinishReason, matched: Option<&MatchedStop>) -> StopType {
        match (reason, matched) {
            (_, Some(MatchedStop::Text(_))) => StopType::Word,
            (FinishReason::Length, _) => StopType::Limit,
            (FinishReason::Stop | FinishReason::ToolCalls, _) => StopType::Eos,
        }
    }
}

/// A token with its log-probability and its alternatives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenProbability {
    /// The token.
    #[serde(flatten)]
    pub token: TokenEntry,
    /// Alternatives, best first.
    pub top_logprobs: Vec<TokenEntry>,
}

/// A token with its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenEntry {
    /// Its id.
    pub id: u32,
    /// Its text, bytes and log-probability.
    #[serde(flatten)]
    pub logprob: TopLogprob,
}
