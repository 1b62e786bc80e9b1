//! Stream events.

use serde::{Serialize, Serializer};

use super::response::{ChatLogprobs, FinishDetails, MatchedStop, ReasoningField, ReasoningText};
use crate::reply::{FinishReason, ReplyDelta, Timings, Usage};

/// One event of a chat completion.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChunk<'a> {
    /// The same in all events of a reply.
    pub id: &'a str,
    /// Always `chat.completion.chunk`.
    pub object: &'static str,
    /// Seconds since 1970-01-01 UTC; the same in all events of a reply.
    pub created: i64,
    /// The model as the client named it.
    pub model: &'a str,
    /// Identifies the build and its settings.
    pub system_fingerprint: Option<&'a str>,
    /// One; none in the event that carries only usage.
    pub choices: Vec<ChunkChoice>,
    /// Absent, `null` or counts.
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    pub usage: UsageField,
    /// On the last event, or on all when asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// Token ids of the prompt, on the first event if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Prefill progress, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<PromptProgress>,
}

impl ChatChunk<'_> {
    /// The value of `object`.
    pub const OBJECT: &'static str = "chat.completion.chunk";
}

/// The `usage` of an event. If the request asks for the usage event, all earlier events carry
/// `null`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UsageField {
    /// No such key.
    #[default]
    Absent,
    /// `null`.
    Null,
    /// Counts.
    Counts(Usage),
}

impl UsageField {
    /// Whether the key is left out.
    pub fn is_absent(&self) -> bool {
        *self == UsageField::Absent
    }
}

impl Serialize for UsageField {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            UsageField::Absent | UsageField::Null => serializer.serialize_none(),
            UsageField::Counts(usage) => usage.serialize(serializer),
        }
    }
}

/// A choice of an event.
#[derive(Debug, Clone, Serialize)]
pub struct ChunkChoice {
    /// Which of the `n`.
    pub index: usize,
    /// The delta.
    pub delta: Delta,
    /// Logprobs of this event's tokens.
    pub logprobs: Option<ChatLogprobs>,
    /// `null` on all events but the last.
    pub finish_reason: Option<FinishReason>,
    /// On the last event: the stop string or stop token of the request that ended it, or `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Option<MatchedStop>>,
    /// Ids of the tokens since the last event, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// How reasoning ended, if the request enabled it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_details: Option<FinishDetails>,
}

impl ChunkChoice {
    /// An event in the middle of choice `index`.
    pub fn new(index: usize, delta: Delta) -> ChunkChoice {
        ChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            finish_details: None,
        }
    }
}

/// The increment of an event; an empty one is `{}`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Delta {
    /// On the first event only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Reasoning.
    #[serde(flatten)]
    pub reasoning: ReasoningText,
    /// A call's head, or more of its arguments.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

impl Delta {
    /// The first event of a choice.
    pub fn first() -> Delta {
        Delta {
            role: Some("assistant"),
            content: Some(String::new()),
            ..Delta::default()
        }
    }
}

impl Delta {
    /// An increment of the reply, with reasoning in `field`.
    pub fn new(piece: ReplyDelta, field: ReasoningField) -> Delta {
        match piece {
            ReplyDelta::Content(text) => Delta {
                content: Some(text),
                ..Delta::default()
            },
            ReplyDelta::Reasoning(text) => Delta {
                reasoning: ReasoningText::new(field, text),
                ..Delta::default()
            },
            ReplyDelta::ToolCall { index, id, name } => Delta {
                tool_calls: vec![ToolCallDelta {
                    index,
                    id: Some(id),
                    kind: Some("function"),
                    function: FunctionDelta {
                        name: Some(name),
                        arguments: String::new(),
                    },
                }],
                ..Delta::default()
            },
            ReplyDelta::ToolArguments { index, fragment } => Delta {
                tool_calls: vec![ToolCallDelta {
                    index,
                    id: None,
                    kind: None,
                    function: FunctionDelta {
                        name: None,
                        arguments: fragment,
                    },
                }],
                ..Delta::default()
            },
        }
    }
}

/// A call's head (with `id`, `type` and `name`), or more of its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCallDelta {
    /// Which call of the reply.
    pub index: usize,
    /// On the head only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// On the head only.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// Name or arguments.
    pub function: FunctionDelta,
}

/// The function part of a call's event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionDelta {
    /// On the head only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All fragments of a call joined are one JSON object.
    pub arguments: String,
}

/// Prefill progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    pub total: usize,
    /// Tokens that came from a cache.
    pub cache: usize,
    /// Tokens done, cached ones included.
    pub processed: usize,
    /// Milliseconds since the start.
    pub time_ms: u64,
}

#[cfg(test)]
mod tests;
