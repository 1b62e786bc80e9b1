//! Replies and lines of a stream.

use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::reply::{FinishReason, TokenLogprob};

/// A whole reply, or one line of a stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OllamaReply {
    /// The model as the client named it.
    pub model: String,
    /// The time in RFC 3339.
    pub created_at: String,
    /// The text, or more of it.
    #[serde(flatten)]
    pub content: OllamaContent,
    /// Log-probabilities of its tokens, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprob>,
    /// Whether the reply has ended.
    pub done: bool,
    /// How it ended.
    #[serde(flatten)]
    pub ending: Option<OllamaEnding>,
}

/// The text of a reply, in the form of its route.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum OllamaContent {
    /// Of `POST /api/chat`.
    Chat {
        /// The message.
        message: OllamaMessage,
    },
    /// Of `POST /api/generate`.
    Generate {
        /// The text.
        response: String,
        /// The reasoning.
        #[serde(skip_serializing_if = "String::is_empty")]
        thinking: String,
    },
}

/// A message of the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OllamaMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// The text.
    pub content: String,
    /// The reasoning.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thinking: String,
    /// Complete calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<OllamaToolCall>,
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OllamaToolCall {
    /// `call_` and 24 hexadecimal digits.
    pub id: String,
    /// The function.
    pub function: OllamaFunction,
}

/// The function part of a call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OllamaFunction {
    /// Which call of the reply.
    pub index: usize,
    /// The tool.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// How a reply ended, and its statistics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OllamaEnding {
    /// Why it ended.
    pub done_reason: DoneReason,
    /// From the request to the end.
    #[serde(serialize_with = "nanoseconds")]
    pub total_duration: Duration,
    /// Time in which the request waited for the model to be loaded.
    #[serde(serialize_with = "nanoseconds")]
    pub load_duration: Duration,
    /// Tokens of the prompt.
    pub prompt_eval_count: usize,
    /// Time of the prefill.
    #[serde(serialize_with = "nanoseconds")]
    pub prompt_eval_duration: Duration,
    /// Tokens of the reply.
    pub eval_count: usize,
    /// Time of the decode steps.
    #[serde(serialize_with = "nanoseconds")]
    pub eval_duration: Duration,
}

/// Why a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DoneReason {
    /// By itself, by a stop string or with its calls.
    Stop,
    /// By a limit of tokens.
    Length,
    /// The model was loaded.
    Load,
    /// The model was unloaded.
    Unload,
}

impl From<FinishReason> for DoneReason {
    fn from(reason: FinishReason) -> DoneReason {
        match reason {
            FinishReason::Length => DoneReason::Length,
            FinishReason::Stop | FinishReason::ToolCalls => DoneReason::Stop,
        }
    }
}

fn nanoseconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
