//! Responses that are not streamed.

use serde::{Serialize, Serializer};

use crate::reply::{FinishReason, Reply, ReplyToolCall, Timings, TokenLogprob, Usage};

impl Serialize for FinishReason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        })
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        UsageObject {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.total_tokens(),
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: self.cached_tokens,
            },
            completion_tokens_details: CompletionTokensDetails {
                reasoning_tokens: self.reasoning_tokens,
                accepted_prediction_tokens: self.accepted_draft_tokens,
                rejected_prediction_tokens: self.rejected_draft_tokens,
            },
        }
        .serialize(serializer)
    }
}

/// The `usage` object.
#[derive(Serialize)]
struct UsageObject {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: CompletionTokensDetails,
}

#[derive(Serialize)]
struct PromptTokensDetails {
    cached_tokens: usize,
}

#[derive(Serialize)]
struct CompletionTokensDetails {
    reasoning_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted_prediction_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rejected_prediction_tokens: Option<usize>,
}

/// What of the request ended a choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum MatchedStop {
    /// A stop string.
    Text(String),
    /// A stop token, by its id.
    Token(u32),
}

/// The log-probability of a prompt token, or of one that might have been in its place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// Natural logarithm; -9999 for minus infinity.
    pub logprob: f32,
    /// Place among all tokens from 1, if it is among the alternatives that were asked for.
    pub rank: Option<usize>,
    /// Its text; bytes that are not UTF-8 by themselves show as U+FFFD.
    pub decoded_token: String,
}

/// A prompt token and its alternatives by token id, written as one object.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptTokenLogprobs(pub Vec<(u32, PromptLogprob)>);

impl Serialize for PromptTokenLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, logprob)| (id, logprob)))
    }
}

/// The response to a chat completion request.
#[derive(Debug, Clone, Serialize)]
pub struct ChatCompletion {
    /// `chatcmpl-` and random characters.
    pub id: String,
    /// Always `chat.completion`.
    pub object: &'static str,
    /// Seconds since 1970-01-01 UTC.
    pub created: i64,
    /// The model as the client named it.
    pub model: String,
    /// Identifies the build and its settings.
    pub system_fingerprint: Option<String>,
    /// One per `n`.
    pub choices: Vec<ChatChoice>,
    /// Token counts over all choices.
    pub usage: Usage,
    /// Logprobs of the prompt, if requested; `null` for its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptTokenLogprobs>>>,
    /// Token ids of the prompt, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

impl ChatCompletion {
    /// The value of `object`.
    pub const OBJECT: &'static str = "chat.completion";
}

/// A choice.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChoice {
    /// Which of the `n`.
    pub index: usize,
    /// The message.
    pub message: AssistantMessage,
    /// Always present, possibly `null`.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The stop string or stop token of the request that ended it; `null` if none did.
    pub stop_reason: Option<MatchedStop>,
    /// Ids of all its tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// How reasoning ended, if the request enabled it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_details: Option<FinishDetails>,
}

/// The message of the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AssistantMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// `null` if there are only tool calls.
    pub content: Option<String>,
    /// Reasoning.
    #[serde(flatten)]
    pub reasoning: ReasoningText,
    /// Absent, not empty, if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallOut>,
}

impl AssistantMessage {
    /// The message of a reply, with its reasoning in `field`.
    pub fn new(reply: Reply, field: ReasoningField) -> AssistantMessage {
        let only_calls = reply.content.trim().is_empty() && !reply.tool_calls.is_empty();
        AssistantMessage {
            role: "assistant",
            content: (!only_calls).then_some(reply.content),
            reasoning: ReasoningText::new(field, reply.reasoning),
            tool_calls: reply
                .tool_calls
                .into_iter()
                .map(ToolCallOut::from)
                .collect(),
        }
    }
}

/// The field that carries reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningField {
    /// `reasoning_content`: the name that the clients of `harness/clients` have in common.
    #[default]
    ReasoningContent,
    /// `reasoning`: the name of vLLM since 0.12.
    Reasoning,
    /// Both, for clients that read one of them; some then show the text twice.
    Both,
}

/// Reasoning in the field, or the fields, that carry it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ReasoningText {
    /// Absent, not empty, if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
}

impl ReasoningText {
    /// `text` in `field`; nothing if it is empty.
    pub fn new(field: ReasoningField, text: String) -> ReasoningText {
        if text.is_empty() {
            return ReasoningText::default();
        }
        let (reasoning_content, reasoning) = match field {
            ReasoningField::ReasoningContent => (Some(text), None),
            ReasoningField::Reasoning => (None, Some(text)),
            ReasoningField::Both => (Some(text.clone()), Some(text)),
        };
        ReasoningText {
            reasoning_content,
            reasoning,
        }
    }
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCallOut {
    /// `call_` and 24 hexadecimal digits.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The function.
    pub function: FunctionOut,
}

/// The function part of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionOut {
    /// The tool.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl From<ReplyToolCall> for ToolCallOut {
    fn from(call: ReplyToolCall) -> ToolCallOut {
        ToolCallOut {
            id: call.id,
            kind: "function",
            function: FunctionOut {
                name: call.name,
                arguments: call.arguments,
            },
        }
    }
}

/// How reasoning ended, and its token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct FinishDetails {
    /// Who ended reasoning.
    pub close_kind: CloseKind,
    /// Reasoning tokens.
    pub thinking_tokens: usize,
    /// Other tokens.
    pub content_tokens: usize,
    /// All tokens.
    pub total_tokens: usize,
    /// Whether the reply was stopped because it repeated itself.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub degenerate_decode: bool,
}

/// Who ended reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CloseKind {
    /// The model.
    Natural,
    /// The model, with a logit boost on the closing tag.
    Soft,
    /// The server.
    Hard,
}

/// Log-probabilities of one choice.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ChatLogprobs {
    /// Of content tokens; their bytes join to the content.
    pub content: Vec<TokenLogprob>,
    /// Of reasoning tokens.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasoning_content: Vec<TokenLogprob>,
}

/// The response to a text completion request.
#[derive(Debug, Clone, Serialize)]
pub struct TextCompletion {
    /// `cmpl-` and random characters.
    pub id: String,
    /// Always `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970-01-01 UTC.
    pub created: i64,
    /// The model as the client named it.
    pub model: String,
    /// Which build and settings made this.
    pub system_fingerprint: Option<String>,
    /// One per prompt and choice.
    pub choices: Vec<TextChoice>,
    /// Token counts over all choices; absent on events that carry none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

impl TextCompletion {
    /// The value of `object`, in responses and events.
    pub const OBJECT: &'static str = "text_completion";
}

/// A choice.
#[derive(Debug, Clone, Serialize)]
pub struct TextChoice {
    /// Index over prompts and choices.
    pub index: usize,
    /// The text.
    pub text: String,
    /// Always present, possibly `null`.
    pub logprobs: Option<CompletionLogprobs>,
    /// `null` on all events but the last.
    pub finish_reason: Option<FinishReason>,
    /// The stop string or stop token of the request that ended it; `null` if none did.
    pub stop_reason: Option<MatchedStop>,
    /// Ids of the tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Token ids of the prompt, if requested; on a choice's first event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Logprobs of the prompt, if requested; `null` for its first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptTokenLogprobs>>>,
}

/// Logprobs in the layout of text completions: four parallel arrays.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct CompletionLogprobs {
    /// Token texts.
    pub tokens: Vec<String>,
    /// `null` for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The token and its alternatives by text; `null` where there is no row.
    pub top_logprobs: Vec<Option<TopLogprobsByText>>,
    /// Start of each token in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// Alternatives in order, written as one object.
#[derive(Debug, Clone, PartialEq)]
pub struct TopLogprobsByText(pub Vec<(String, f32)>);

impl Serialize for TopLogprobsByText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// The body of an error response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// An error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorDetail {
    /// The message.
    pub message: String,
    /// The class of the error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// A code, where the protocol names one.
    pub code: Option<&'static str>,
}
