//! What all dialects read alike from a request body.

pub(crate) mod fields;
mod media;
mod reasoning;
mod response_format;
mod sampling;
mod token_options;
mod tools;

use serde_json::{Map, Value};

use self::fields::Fields;
pub(crate) use self::media::{is_media, media_placeholder, refuse_media};
pub(crate) use self::sampling::{asks_for_something, refuse_completions_only, token_id};
pub(crate) use self::tools::{ToolFields, choice as tool_choice, items as tool_items};
use crate::conversation::Message;
use crate::error::ChatError;
use crate::request::{
    CacheHints, ChatRequest, CompressionMode, MAX_TOP_LOGPROBS, ReasoningFormat, ReasoningOptions,
    ResponseFormat, SamplingParams, StreamOptions, TokenOptions,
};

/// Fields that each dialect reads in its own way.
pub(crate) struct DialectFields {
    pub(crate) messages: Vec<Message>,
    pub(crate) sampling: SamplingParams,
    pub(crate) logprobs: Option<usize>,
    pub(crate) tools: ToolFields,
    pub(crate) response_format: ResponseFormat,
    pub(crate) continue_final_message: bool,
}

/// Builds the request from the dialect's own fields and the shared fields of `body`.
pub(crate) fn chat_request(
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
        tokens: TokenOptions::read_truncation(body)?,
        echo: false,
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
        compression: compression(body)?,
        priority: priority(body)?,
        return_progress: false,
        timings_per_token: false,
    })
}

/// The alternatives per token that a chat request asks for, if it asks for logprobs.
pub(crate) fn logprobs(body: &Fields<'_>) -> Result<Option<usize>, ChatError> {
    let wanted = body.flag("logprobs", false)?;
    let top = body.count("top_logprobs", MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(body.error("top_logprobs", "needs logprobs to be true")),
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

/// The part of a hint that is used.
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

pub(crate) fn compression(body: &Fields<'_>) -> Result<Option<CompressionMode>, ChatError> {
    let Some(name) = body.string("prefill_compression")? else {
        return Ok(None);
    };
    let mode = CompressionMode::ALL
        .into_iter()
        .find(|mode| mode.name() == name);
    mode.map(Some).ok_or_else(|| {
        let message = format!("must be off, auto or always, not {name:?}");
        body.error("prefill_compression", message)
    })
}

pub(crate) fn priority(body: &Fields<'_>) -> Result<i32, ChatError> {
    let priority = body
        .int("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?
        .unwrap_or(0);
    Ok(i32::try_from(priority).expect("the range was checked"))
}
