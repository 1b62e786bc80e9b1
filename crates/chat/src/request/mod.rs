//! A request as all dialects mean it: messages, tools, sampling and the form of the reply.
//!
//! [`openai`](crate::openai), [`anthropic`](crate::anthropic) and [`responses`](crate::responses)
//! translate their JSON into these types.

mod compression;
mod normalize;
mod response_format;
mod sampling;
mod token_options;

use serde_json::{Map, Value};

pub use self::compression::CompressionMode;
pub(crate) use self::normalize::is_billing;
pub use self::normalize::{LATE_SYSTEM_MARKER, LateSystem};
pub use self::response_format::{ResponseFormat, SchemaStrictness};
pub use self::sampling::{RepetitionWindow, SamplingParams};
pub use self::token_options::{PromptTruncation, TokenOptions, TruncationSide};
use crate::conversation::{Conversation, Message, ReasoningEffort, Role};
use crate::error::ChatError;
use crate::tools::{Tool, ToolSet};

/// Maximum number of messages in a request.
pub const MAX_MESSAGES: usize = 16_384;
/// Maximum number of tools in a request.
pub const MAX_TOOLS: usize = 1_024;
/// Maximum number of stop strings, and of stop token ids.
pub const MAX_STOPS: usize = 1_024;
/// Maximum number of allowed token ids: more than any vocabulary has.
pub const MAX_ALLOWED_TOKENS: usize = 1 << 20;
/// Maximum number of bad words.
pub const MAX_BAD_WORDS: usize = 1_024;
/// Maximum number of choices per prompt.
pub const MAX_CHOICES: usize = 128;
/// Maximum number of alternatives per token.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// A chat request with every field in range.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The requested model; echoed in the reply.
    pub model: Option<String>,
    /// Messages as sent: contents flattened to text, order not yet normalised.
    pub messages: Vec<Message>,
    /// Whether to stream the reply.
    pub stream: bool,
    /// What stream events carry besides text.
    pub stream_options: StreamOptions,
    /// Sampling, lengths, stops and choices.
    pub sampling: SamplingParams,
    /// Alternatives per token (0..=20) if logprobs are requested.
    pub logprobs: Option<usize>,
    /// How the prompt is cut, and which tokens the reply lists.
    pub tokens: TokenOptions,
    /// Whether the content of a reply begins with the message it continues.
    pub echo: bool,
    /// Declared tools; all of them appear in the prompt.
    pub tools: Vec<Tool>,
    /// Whether and which tools the model may call.
    pub tool_choice: ToolChoice,
    /// Names of the callable tools, if the request narrows them.
    pub allowed_tools: Option<Vec<String>>,
    /// Whether a reply may hold several calls.
    pub parallel_tool_calls: bool,
    /// Required form of the reply.
    pub response_format: ResponseFormat,
    /// Whether and how much to reason.
    pub thinking: ReasoningOptions,
    /// Extra template variables (`chat_template_kwargs`).
    pub template_variables: Map<String, Value>,
    /// Whether reasoning is split from the content.
    pub reasoning_format: ReasoningFormat,
    /// Whether the prompt ends with the header of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the model continues the last message, which is the assistant's.
    pub continue_final_message: bool,
    /// Hints for the prefix cache.
    pub cache: CacheHints,
    /// Whether the prompt is compressed; `None` leaves it to the server.
    pub compression: Option<CompressionMode>,
    /// Higher values are scheduled first.
    pub priority: i32,
    /// Whether to send progress events during prefill.
    pub return_progress: bool,
    /// Whether every event carries timings.
    pub timings_per_token: bool,
}

/// What stream events carry besides text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// A last event carries the usage.
    pub include_usage: bool,
    /// Every event carries the running usage.
    pub continuous_usage_stats: bool,
}

/// Whether reasoning is split from the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningFormat {
    /// Reasoning has a field of its own.
    #[default]
    Split,
    /// Everything is content, tags included.
    Raw,
}

/// Whether and which tools the model may call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls. The tools stay in the prompt, so a cached prefix still matches.
    None,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(String),
}

/// Reasoning options of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReasoningOptions {
    /// On or off; `None` leaves it to the server's default, then to the template.
    pub enable: Option<bool>,
    /// Requested effort.
    pub effort: Option<ReasoningEffort>,
    /// Maximum number of reasoning tokens.
    pub budget_tokens: Option<usize>,
    /// Tokens reserved for the reply after reasoning.
    pub reply_budget: Option<usize>,
    /// Whether the reply shows reasoning.
    pub visibility: ReasoningVisibility,
}

/// Whether a reply shows its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningVisibility {
    /// With its text.
    #[default]
    Shown,
    /// That it happened, without its text.
    Omitted,
    /// Not at all.
    Excluded,
}

impl ReasoningOptions {
    /// Whether the request itself enables reasoning, which also asks for `finish_details`.
    pub fn opted_in(&self) -> bool {
        self.enable == Some(true)
    }

    /// Leaves reasoning out where a protocol has no sign for omitted text.
    pub(crate) fn exclude_omitted(&mut self) {
        if self.visibility == ReasoningVisibility::Omitted {
            self.visibility = ReasoningVisibility::Excluded;
        }
    }

    /// Whether the request asks for reasoning in any way: by a switch, an effort or a budget.
    pub fn is_requested(&self) -> bool {
        match self.enable {
            Some(enable) => enable,
            None => self.budget_tokens.is_some(),
        }
    }
}

/// Hints for the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheHints {
    /// Whether to look up and to store prefixes.
    pub enabled: bool,
    /// The conversation's id; at most 256 characters.
    pub session: Option<String>,
    /// A key shared by requests with a common prefix; at most 256 characters.
    pub group: Option<String>,
}

/// Server settings that apply to every conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConversationPolicy {
    /// What to do with a system message after the first turn.
    pub late_system: LateSystem,
    /// Whether to reason if the request does not say.
    pub thinking_default: Option<bool>,
    /// Seconds since 1970-01-01 UTC, for templates that print the date.
    pub now_unix: i64,
}

impl ChatRequest {
    /// Text that the content of a reply begins with: the last message, if the request wants it
    /// echoed and the reply has its role.
    pub fn echoed(&self) -> Option<&str> {
        let last = self.messages.last().filter(|_| self.echo)?;
        // Without a generation prompt, the reply is the rest of the last message.
        let same_role = !self.add_generation_prompt || last.role == Role::Assistant;
        Some(last.content.as_str()).filter(|text| same_role && !text.is_empty())
    }

    /// The conversation that a template renders.
    ///
    /// Fails only if `policy` refuses a late system message.
    pub fn conversation(&self, policy: &ConversationPolicy) -> Result<Conversation, ChatError> {
        Ok(Conversation {
            messages: normalize::normalise(&self.messages, policy.late_system)?,
            tools: self
                .tools
                .iter()
                .map(|tool| tool.declaration.clone())
                .collect(),
            variables: self.template_variables.clone(),
            enable_thinking: self.thinking.enable.or(policy.thinking_default),
            effort: self.thinking.effort,
            add_generation_prompt: self.add_generation_prompt && !self.continue_final_message,
            continue_final_message: self.continue_final_message,
            now_unix: policy.now_unix,
        })
    }

    /// Tools whose calls are recognised in the reply; empty if no call is allowed.
    pub fn callable_tools(&self) -> ToolSet {
        if self.tool_choice == ToolChoice::None {
            return ToolSet::default();
        }
        let allowed = |tool: &&Tool| {
            self.allowed_tools
                .as_ref()
                .is_none_or(|names| names.contains(&tool.name))
        };
        ToolSet::new(self.tools.iter().filter(allowed).cloned())
    }
}
