//! The body of a chat completion request.

use super::messages;
use crate::conversation::Role;
use crate::dialect::fields::{Fields, parse_body};
use crate::dialect::{DialectFields, ToolFields, logprobs};
use crate::error::ChatError;
use crate::request::{
    ChatRequest, ReasoningFormat, ResponseFormat, SamplingParams, StreamOptions, TokenOptions,
};

/// Reads and checks the body of a chat completion request.
///
/// Fails with [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest), naming the field;
/// never panics, whatever the bytes.
pub fn chat_request(body: &[u8]) -> Result<ChatRequest, ChatError> {
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
    let mut request = crate::dialect::chat_request(&body, dialect)?;
    request.thinking.exclude_omitted();
    request.tokens = TokenOptions::read(&body)?;
    request.echo = body.flag("echo", false)?;
    request.stream_options = stream_options(&body)?;
    request.reasoning_format = reasoning_format(&body)?;
    request.add_generation_prompt = body.flag("add_generation_prompt", true)?;
    request.return_progress = body.flag("return_progress", false)?;
    request.timings_per_token = body.flag("timings_per_token", false)?;
    Ok(request)
}

pub(super) fn stream_options(body: &Fields<'_>) -> Result<StreamOptions, ChatError> {
    let Some(options) = body.object("stream_options")? else {
        return Ok(StreamOptions::default());
    };
    let include_usage = options.bool("include_usage")?;
    Ok(StreamOptions {
        include_usage: include_usage == Some(true),
        // A client without the final usage gets no running usage either.
        continuous_usage_stats: options.flag("continuous_usage_stats", false)?
            && include_usage != Some(false),
    })
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
