//! Responses that are not streamed.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::reply::{FinishReason, Reply, Timings, Usage};
use crate::request::ReasoningVisibility;

/// A message: the whole reply, or the start of a streamed one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MessageResponse {
    /// `msg_` and random characters.
    pub id: String,
    /// Always `message`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Always `assistant`.
    pub role: &'static str,
    /// The model as the client named it.
    pub model: String,
    /// Reasoning, text and tool uses, in this order; empty at the beginning of a stream.
    pub content: Vec<ContentBlock>,
    /// `null` at the beginning of a stream.
    pub stop_reason: Option<StopReason>,
    /// The stop string that ended the text.
    pub stop_sequence: Option<String>,
    /// Token counts.
    pub usage: MessageUsage,
}

impl MessageResponse {
    /// An empty message.
    pub fn new(id: String, model: String, usage: MessageUsage) -> MessageResponse {
        MessageResponse {
            id,
            kind: "message",
            role: "assistant",
            model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage,
        }
    }
}

/// A block of a message.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    /// Reasoning. Clients drop a turn whose reasoning has no signature.
    Thinking {
        /// The reasoning.
        thinking: String,
        /// Opaque; never empty once the block is complete.
        signature: String,
    },
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// A call.
    ToolUse {
        /// `toolu_` and 24 hexadecimal digits.
        id: String,
        /// The tool.
        name: String,
        /// Its arguments; empty when a streamed block begins.
        input: Map<String, Value>,
    },
}

/// The blocks of a whole reply.
///
/// A call cut off by the token limit has no valid arguments and is left out.
pub fn content_blocks(
    reply: Reply,
    signature: &str,
    visibility: ReasoningVisibility,
) -> Vec<ContentBlock> {
    let mut blocks = Vec::new();
    if !reply.reasoning.is_empty() && visibility != ReasoningVisibility::Excluded {
        blocks.push(ContentBlock::Thinking {
            thinking: if visibility == ReasoningVisibility::Omitted {
                String::new()
            } else {
                reply.reasoning
            },
            signature: signature.to_owned(),
        });
    }
    let is_blank = !reply.tool_calls.is_empty() && reply.content.trim().is_empty();
    if !reply.content.is_empty() && !is_blank {
        blocks.push(ContentBlock::Text {
            text: reply.content,
        });
    }
    for call in reply.tool_calls {
        if let Ok(Value::Object(input)) = serde_json::from_str(&call.arguments) {
            blocks.push(ContentBlock::ToolUse {
                id: tool_use_id(&call.id),
                name: call.name,
                input,
            });
        }
    }
    blocks
}

/// The id of a call in Anthropic's form.
pub(super) fn tool_use_id(call_id: &str) -> String {
    let digits = call_id.strip_prefix("call_").unwrap_or(call_id);
    format!("toolu_{digits}")
}

/// Why a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model ended its turn.
    EndTurn,
    /// The token limit or the end of the context.
    MaxTokens,
    /// One of the stop strings came.
    StopSequence,
    /// At least one complete tool use.
    ToolUse,
}

impl StopReason {
    /// Translates a finish reason; `stop_string` is the matched stop string.
    pub fn new(reason: FinishReason, stop_string: Option<&str>) -> StopReason {
        match reason {
            FinishReason::ToolCalls => StopReason::ToolUse,
            FinishReason::Length => StopReason::MaxTokens,
            FinishReason::Stop if stop_string.is_some() => StopReason::StopSequence,
            FinishReason::Stop => StopReason::EndTurn,
        }
    }
}

/// Token counts in Anthropic's form: cached tokens are not input tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MessageUsage {
    /// Tokens of the prompt that had to be computed.
    pub input_tokens: usize,
    /// Always 0: storing a prefix costs nothing here.
    pub cache_creation_input_tokens: usize,
    /// Tokens of the prompt that were restored.
    pub cache_read_input_tokens: usize,
    /// Generated tokens, reasoning and hidden ones included.
    pub output_tokens: usize,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

impl MessageUsage {
    /// Translates token counts.
    pub fn new(usage: Usage, timings: Option<Timings>) -> MessageUsage {
        let cached = usage.cached_tokens;
        MessageUsage {
            input_tokens: usage.prompt_tokens.saturating_sub(cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
            timings,
        }
    }
}
