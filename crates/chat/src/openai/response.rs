//! What a client gets back in one piece, in the protocol's exact shapes.

use serde::Serialize;

use crate::reply::Reply;

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// The token limit or the end of the context.
    Length,
    /// At least one complete tool call.
    ToolCalls,
}

/// The answer to a chat completion request.
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
    /// Which build and settings made this.
    pub system_fingerprint: Option<String>,
    /// One per `n`.
    pub choices: Vec<ChatChoice>,
    /// Token counts over all choices.
    pub usage: Usage,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

impl ChatCompletion {
    /// The value of `object`.
    pub const OBJECT: &'static str = "chat.completion";
}

/// One of the answers.
#[derive(Debug, Clone, Serialize)]
pub struct ChatChoice {
    /// Which of the `n`.
    pub index: usize,
    /// What was said.
    pub message: AssistantMessage,
    /// Present, possibly `null`, in every answer.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How thinking ended, when the request asked for thinking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_details: Option<FinishDetails>,
}

/// What the model said.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AssistantMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// `null` when there were only tool calls.
    pub content: Option<String>,
    /// Reasoning; the same text under the two names clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The second name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Thinking in the shape of a third family of clients.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasoning_details: Vec<ReasoningDetail>,
    /// Absent, not empty, when there were none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallOut>,
}

impl From<Reply> for AssistantMessage {
    fn from(reply: Reply) -> AssistantMessage {
        let reasoning = Some(reply.reasoning).filter(|text| !text.is_empty());
        let only_calls = reply.content.is_empty() && !reply.tool_calls.is_empty();
        AssistantMessage {
            role: "assistant",
            content: (!only_calls).then_some(reply.content),
            reasoning_details: reasoning
                .iter()
                .map(|text| ReasoningDetail {
                    kind: "reasoning.text",
                    text: text.clone(),
                })
                .collect(),
            reasoning_content: reasoning.clone(),
            reasoning,
            tool_calls: reply.tool_calls,
        }
    }
}

/// A stretch of thinking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReasoningDetail {
    /// Always `reasoning.text`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The thinking.
    pub text: String,
}

/// A call the model made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCallOut {
    /// `call_` and 24 hexadecimal digits.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What to call.
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

/// How thinking ended, and how the tokens were spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct FinishDetails {
    /// Who closed the thinking.
    pub close_kind: CloseKind,
    /// Tokens of thinking.
    pub thinking_tokens: usize,
    /// Tokens of everything else.
    pub content_tokens: usize,
    /// All tokens.
    pub total_tokens: usize,
    /// Whether the text was ended because it said the same over and over.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub degenerate_decode: bool,
}

/// Who closed the thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CloseKind {
    /// The model.
    Natural,
    /// The model, nudged.
    Soft,
    /// The server.
    Hard,
}

/// Token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Usage {
    /// The whole prompt.
    pub prompt_tokens: usize,
    /// Every token generated, hidden ones included, over all choices.
    pub completion_tokens: usize,
    /// The sum.
    pub total_tokens: usize,
    /// Parts of the prompt.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Parts of the completion.
    pub completion_tokens_details: CompletionTokensDetails,
}

impl Usage {
    /// Counts of one answer; `cached` tokens of the prompt were not computed again.
    pub fn new(prompt: usize, cached: usize, completion: usize, reasoning: usize) -> Usage {
        Usage {
            prompt_tokens: prompt,
            completion_tokens: completion,
            total_tokens: prompt + completion,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: cached,
            },
            completion_tokens_details: CompletionTokensDetails {
                reasoning_tokens: reasoning,
                accepted_prediction_tokens: None,
                rejected_prediction_tokens: None,
            },
        }
    }
}

/// Parts of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PromptTokensDetails {
    /// Tokens restored rather than computed.
    pub cached_tokens: usize,
}

/// Parts of the completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CompletionTokensDetails {
    /// Tokens of thinking.
    pub reasoning_tokens: usize,
    /// Drafted tokens that were kept, when there is a drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_prediction_tokens: Option<usize>,
    /// Drafted tokens that were dropped, when there is a drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_prediction_tokens: Option<usize>,
}

/// How long an answer took.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Timings {
    /// Milliseconds from admission to the first row, one decimal.
    pub prefill_ms: f64,
    /// Milliseconds of decoding, one decimal.
    pub decode_ms: f64,
    /// One decimal; 0.0 when nothing was decoded.
    pub decode_tokens_per_sec: f64,
    /// On a server with a window: tokens before each new one that attention saw, 0 for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fa_window: Option<usize>,
    /// Why it saw all of them nevertheless.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fa_window_full: Option<&'static str>,
    /// How the tokens came, once the answer is complete.
    #[serde(flatten)]
    pub rounds: Option<SpeculationTimings>,
}

/// Passes over the model that an answer took, and what drafting did for it.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct SpeculationTimings {
    /// Verify passes.
    pub steps: usize,
    /// Tokens per pass after the first token, two decimals.
    pub tokens_per_step: f64,
    /// Tokens drafted, and those of them that were kept.
    pub draft_n: usize,
    /// Of these, kept.
    pub draft_n_accepted: usize,
    /// The share that was kept, three decimals; 0.0 when nothing was drafted.
    pub accept_rate: f64,
    /// Entry `i`: the share of drafted passes that kept more than `i` drafted tokens, three decimals, without
    /// the zeros at the end.
    pub accept_by_depth: Vec<f64>,
    /// Tokens that were forced.
    pub forced_n: usize,
    /// Milliseconds of drafting, verifying and committing, one decimal; with what others did in these passes.
    pub draft_ms: f64,
    /// See `draft_ms`.
    pub verify_ms: f64,
    /// See `draft_ms`.
    pub commit_ms: f64,
}

impl Timings {
    /// Rounds to one decimal; whatever is not finite becomes 0.0.
    pub fn new(prefill_ms: f64, decode_ms: f64, decoded_tokens: usize) -> Timings {
        let round = |value: f64| {
            if value.is_finite() {
                (value * 10.0).round() / 10.0
            } else {
                0.0
            }
        };
        let rate = if decode_ms > 0.0 {
            decoded_tokens as f64 * 1000.0 / decode_ms
        } else {
            0.0
        };
        Timings {
            prefill_ms: round(prefill_ms),
            decode_ms: round(decode_ms),
            decode_tokens_per_sec: round(rate),
            fa_window: None,
            fa_window_full: None,
            rounds: None,
        }
    }
}

/// Log-probabilities of one choice.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ChatLogprobs {
    /// Of the tokens whose text is content; their bytes joined are the content's bytes.
    pub content: Vec<TokenLogprob>,
    /// Of the tokens of thinking.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasoning_content: Vec<TokenLogprob>,
}

/// A token, how likely it was, and what else was likely.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token itself.
    #[serde(flatten)]
    pub token: TopLogprob,
    /// Alternatives, best first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A token and how likely it was.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopLogprob {
    /// Its text; bytes that are not UTF-8 by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm; -9999 stands for impossible.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl TopLogprob {
    /// A token by its bytes. Minus infinity and NaN become -9999.
    pub fn new(bytes: &[u8], logprob: f32) -> TopLogprob {
        TopLogprob {
            token: String::from_utf8_lossy(bytes).into_owned(),
            logprob: if logprob.is_nan() {
                -9999.0
            } else {
                logprob.max(-9999.0)
            },
            bytes: bytes.to_vec(),
        }
    }
}

/// The answer to a text completion request.
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
    /// The value of `object`, of whole answers and of events.
    pub const OBJECT: &'static str = "text_completion";
}

/// One of the continuations.
#[derive(Debug, Clone, Serialize)]
pub struct TextChoice {
    /// Which of prompts times choices.
    pub index: usize,
    /// The text.
    pub text: String,
    /// Present, possibly `null`, in every answer.
    pub logprobs: Option<CompletionLogprobs>,
    /// `null` on all events but the last.
    pub finish_reason: Option<FinishReason>,
}

/// Log-probabilities in the layout of text completions: four columns of one table.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct CompletionLogprobs {
    /// Token texts.
    pub tokens: Vec<String>,
    /// `null` for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// Alternatives by text, best first; `null` where there is no row.
    pub top_logprobs: Vec<Option<TopLogprobsByText>>,
    /// Where each token begins in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// Alternatives in order, written as one object.
#[derive(Debug, Clone, PartialEq)]
pub struct TopLogprobsByText(pub Vec<(String, f32)>);

impl Serialize for TopLogprobsByText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// The body of an error answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorDetail {
    /// For people.
    pub message: String,
    /// The class of the error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// For programs, where the protocol names one.
    pub code: Option<&'static str>,
}
