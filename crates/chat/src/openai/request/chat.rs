//! The body of a chat completion request.

use serde_json::{Map, Value};

use super::format::ResponseFormat;
use super::sampling::SamplingParams;
use super::thinking::ReasoningOptions;
use super::tools::{ToolChoice, ToolFields};
use super::{MAX_TOP_LOGPROBS, messages};
use crate::conversation::{Conversation, Message, Role};
use crate::error::ChatError;
use crate::fields::{Fields, parse_body};
use crate::normalize::{LateSystem, normalise};
use crate::tools::{Tool, ToolSet};

/// A chat completion request whose every field is in range.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The model asked for; echoed whatever it says.
    pub model: Option<String>,
    /// Messages as sent, contents flattened, not yet normalised.
    pub messages: Vec<Message>,
    /// Whether to answer as events.
    pub stream: bool,
    /// What the events carry besides text.
    pub stream_options: StreamOptions,
    /// Sampling, lengths, stops and choices.
    pub sampling: SamplingParams,
    /// Asked for: how many alternatives per token, 0..=20.
    pub logprobs: Option<usize>,
    /// Declared tools, all of which appear in the prompt.
    pub tools: Vec<Tool>,
    /// Whether and what the model may call.
    pub tool_choice: ToolChoice,
    /// Names that may be called, if the request narrows them.
    pub allowed_tools: Option<Vec<String>>,
    /// Whether one reply may hold several calls.
    pub parallel_tool_calls: bool,
    /// The shape the reply must have.
    pub response_format: ResponseFormat,
    /// Whether and how hard to think.
    pub thinking: ReasoningOptions,
    /// Further template variables (`chat_template_kwargs`).
    pub template_variables: Map<String, Value>,
    /// Whether thinking is told apart from the reply.
    pub reasoning_format: ReasoningFormat,
    /// Whether the prompt ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the model continues the last, assistant, message.
    pub continue_final_message: bool,
    /// What a prefix cache may use.
    pub cache: CacheHints,
    /// Higher goes first.
    pub priority: i32,
    /// Send progress events during prefill.
    pub return_progress: bool,
    /// Send timings with each event.
    pub timings_per_token: bool,
}

/// What each dialect reads in its own way; all else is read alike in all of them.
pub(crate) struct DialectFields {
    pub(crate) messages: Vec<Message>,
    pub(crate) sampling: SamplingParams,
    pub(crate) logprobs: Option<usize>,
    pub(crate) tools: ToolFields,
    pub(crate) response_format: ResponseFormat,
    pub(crate) continue_final_message: bool,
}

/// What events carry besides text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// A last event with the usage.
    pub include_usage: bool,
    /// The running usage on every event.
    pub continuous_usage_stats: bool,
}

/// Whether thinking is told apart from the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningFormat {
    /// Thinking goes to its own field.
    #[default]
    Split,
    /// Everything, tags included, is content.
    Raw,
}

/// What a prefix cache may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheHints {
    /// Whether to look up and to store at all.
    pub enabled: bool,
    /// Which conversation this is, as the request says of itself; at most 256 characters.
    pub session: Option<String>,
    /// What the request is likely to have in common with others of its conversation, where nothing better is
    /// known; at most 256 characters.
    pub group: Option<String>,
}

/// What the server decides about every conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConversationPolicy {
    /// What to do with a system message in the middle.
    pub late_system: LateSystem,
    /// Whether to think when the request does not say.
    pub thinking_default: Option<bool>,
    /// Seconds since 1970-01-01 UTC, for templates that print the date.
    pub now_unix: i64,
}

impl StreamOptions {
    pub(super) fn read(body: &Fields<'_>) -> Result<StreamOptions, ChatError> {
        let Some(options) = body.object("stream_options")? else {
            return Ok(StreamOptions::default());
        };
        Ok(StreamOptions {
            include_usage: options.flag("include_usage", false)?,
            continuous_usage_stats: options.flag("continuous_usage_stats", false)?,
        })
    }
}

impl ChatRequest {
    /// Reads and checks a request body.
    ///
    /// Fails with [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest), naming the field;
    /// never panics, whatever the bytes.
    pub fn from_json(body: &[u8]) -> Result<ChatRequest, ChatError> {
        let map = parse_body(body)?;
        let body = Fields::body(&map);
        if body.get("audio").is_some() {
            return Err(body.error("audio", "audio output is not supported"));
        }
        let messages = messages::read(&body)?;
        let continue_final_message = body.flag("continue_final_message", false)?;
        if continue_final_message
            && messages
                .last()
                .is_none_or(|message| message.role != Role::Assistant)
        {
            return Err(body.error(
                "continue_final_message",
                "needs an assistant message at the end of messages",
            ));
        }
        let dialect = DialectFields {
            messages,
            sampling: SamplingParams::read(&body, "stop")?,
            logprobs: logprobs(&body)?,
            tools: ToolFields::read(&body)?,
            response_format: ResponseFormat::read(&body)?,
            continue_final_message,
        };
        let mut request = ChatRequest::from_dialect(&body, dialect)?;
        request.stream_options = StreamOptions::read(&body)?;
        request.reasoning_format = reasoning_format(&body)?;
        request.add_generation_prompt = body.flag("add_generation_prompt", true)?;
        request.return_progress = body.flag("return_progress", false)?;
        request.timings_per_token = body.flag("timings_per_token", false)?;
        Ok(request)
    }

    /// A request of any dialect: what the dialect reads in its own way, and the rest from `body`.
    pub(crate) fn from_dialect(
        body: &Fields<'_>,
        dialect: DialectFields,
    ) -> Result<ChatRequest, ChatError> {
        let template_variables = template_variables(body)?;
        Ok(ChatRequest {
            model: body.string("model")?.map(str::to_owned),
            messages: dialect.messages,
            stream: body.flag("stream", false)?,
            stream_options: StreamOptions::default(),
            sampling: dialect.sampling,
            logprobs: dialect.logprobs,
            tools: dialect.tools.tools,
            tool_choice: dialect.tools.choice,
            allowed_tools: dialect.tools.allowed,
            parallel_tool_calls: dialect.tools.parallel,
            response_format: dialect.response_format,
            thinking: ReasoningOptions::read(body, &template_variables)?,
            template_variables,
            reasoning_format: ReasoningFormat::default(),
            add_generation_prompt: true,
            continue_final_message: dialect.continue_final_message,
            cache: cache_hints(body)?,
            priority: priority(body)?,
            return_progress: false,
            timings_per_token: false,
        })
    }

    /// The conversation a template renders.
    ///
    /// Fails only where `policy` refuses a late system message.
    pub fn conversation(&self, policy: &ConversationPolicy) -> Result<Conversation, ChatError> {
        Ok(Conversation {
            messages: normalise(&self.messages, policy.late_system)?,
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

    /// The tools whose calls are to be recognised in the reply; empty when none may be called.
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

fn template_variables(body: &Fields<'_>) -> Result<Map<String, Value>, ChatError> {
    let Some(variables) = body.object("chat_template_kwargs")? else {
        return Ok(Map::new());
    };
    for reserved in ["messages", "tools", "add_generation_prompt"] {
        if variables.map().contains_key(reserved) {
            return Err(variables.error(reserved, "is reserved; use the request's own field"));
        }
    }
    Ok(variables.map().clone())
}

fn logprobs(body: &Fields<'_>) -> Result<Option<usize>, ChatError> {
    let wanted = body.flag("logprobs", false)?;
    let top = body.count("top_logprobs", MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(body.error("top_logprobs", "needs logprobs to be true")),
    }
}

fn reasoning_format(body: &Fields<'_>) -> Result<ReasoningFormat, ChatError> {
    match body.string("reasoning_format")? {
        None | Some("auto" | "deepseek") => Ok(ReasoningFormat::Split),
        Some("none") => Ok(ReasoningFormat::Raw),
        Some(other) => Err(body.error(
            "reasoning_format",
            format!("must be auto, none or deepseek, not {other:?}"),
        )),
    }
}

/// As much of a cache_hint as is looked at.
pub(crate) fn cache_hint(text: &str) -> String {
    text.chars().take(256).collect()
}

fn cache_hints(body: &Fields<'_>) -> Result<CacheHints, ChatError> {
    if let Some(prefix_cache) = body.object("prefix_cache")? {
        match prefix_cache.string("scope")? {
            None | Some("off" | "full" | "auto") => {}
            Some(other) => {
                return Err(prefix_cache
                    .error("scope", format!("must be off, full or auto, not {other:?}")));
            }
        }
        prefix_cache.int("window", 1..=1_000_000)?;
    }
    let mut session = body.string("session_id")?;
    if session.is_none()
        && let Some(extra) = body.object("extra_body")?
    {
        session = extra.string("session_id")?;
    }
    let off = body
        .object("prefix_cache")?
        .is_some_and(|cache| matches!(cache.string("scope"), Ok(Some("off"))));
    Ok(CacheHints {
        enabled: body.flag("cache_prompt", true)? && !off,
        session: session.map(cache_hint),
        group: body.string("prompt_cache_key")?.map(cache_hint),
    })
}

fn priority(body: &Fields<'_>) -> Result<i32, ChatError> {
    let priority = body
        .int("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?
        .unwrap_or(0);
    Ok(i32::try_from(priority).expect("the range was checked"))
}
