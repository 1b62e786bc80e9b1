//! The body of a Responses request.

use std::sync::Arc;

use serde_json::Value;

use super::echo::EchoedFields;
use super::tools::ToolNames;
use super::{history, tools};
use crate::conversation::{Message, Role};
use crate::dialect::fields::{Fields, parse_body};
use crate::dialect::{DialectFields, refuse_completions_only};
use crate::error::ChatError;
use crate::request::{
    ChatRequest, MAX_TOP_LOGPROBS, ResponseFormat, SamplingParams, SchemaStrictness,
};

/// Fields of a request that only Responses has.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponsesRequest {
    /// The client's names of tools.
    pub names: Arc<ToolNames>,
    /// Whether reasoning is returned as a summary.
    pub summary: bool,
    /// Fields that the response repeats.
    pub echo: EchoedFields,
}

impl ResponsesRequest {
    /// Reads and checks a request body: the request all dialects share, and the rest.
    /// Errors as [`openai::chat_request`](crate::openai::request::chat_request).
    pub fn from_json(body: &[u8]) -> Result<(ChatRequest, ResponsesRequest), ChatError> {
        let map = parse_body(body)?;
        ResponsesRequest::read(&Fields::body(&map))
    }

    /// Reads the fields of a body.
    pub(super) fn read(body: &Fields<'_>) -> Result<(ChatRequest, ResponsesRequest), ChatError> {
        refuse_completions_only(body)?;
        refuse_state(body)?;
        let (tools, names) = tools::read(body)?;
        let dialect = DialectFields {
            messages: messages(body)?,
            sampling: SamplingParams {
                n: 1,
                ..SamplingParams::read(body, "stop")?
            },
            logprobs: logprobs(body)?,
            tools,
            response_format: response_format(body)?,
            continue_final_message: false,
        };
        let mut request = crate::dialect::chat_request(body, dialect)?;
        request.thinking.exclude_omitted();
        let summary = match body.get("reasoning") {
            Some(Value::Object(_)) => match body.object("reasoning")? {
                Some(reasoning) => !matches!(reasoning.string("summary")?, None | Some("none")),
                None => false,
            },
            _ => false,
        };
        let own = ResponsesRequest {
            names: Arc::new(names),
            summary,
            echo: EchoedFields::read(body)?,
        };
        Ok((request, own))
    }
}

/// Alternatives per token if logprobs are requested, by number or by name.
fn logprobs(body: &Fields<'_>) -> Result<Option<usize>, ChatError> {
    let top = body.count("top_logprobs", MAX_TOP_LOGPROBS)?;
    let included = body.array("include")?.unwrap_or_default();
    let named = included
        .iter()
        .any(|name| name == "message.output_text.logprobs");
    Ok(match top {
        Some(top) if top > 0 || named => Some(top),
        _ => named.then_some(0),
    })
}

/// Rejects requests that need stored responses.
fn refuse_state(body: &Fields<'_>) -> Result<(), ChatError> {
    if let Some(id) = body.get("previous_response_id") {
        let message =
            format!("no response {id} is kept here; send the whole conversation as input");
        return Err(body.error("previous_response_id", message));
    }
    if body.get("conversation").is_some() {
        let message = "conversations are not kept here; send the whole of it as input";
        return Err(body.error("conversation", message));
    }
    if body.get("prompt").is_some() {
        let message = "prompts are not kept here; send the text itself as instructions or input";
        return Err(body.error("prompt", message));
    }
    if body
        .array("context_management")?
        .is_some_and(|entries| !entries.is_empty())
    {
        let message = "is not supported; compact the conversation by /v1/responses/compact";
        return Err(body.error("context_management", message));
    }
    if body.flag("background", false)? {
        let message = "answers are not kept here, so none can be made in the background";
        return Err(body.error("background", message));
    }
    Ok(())
}

fn messages(body: &Fields<'_>) -> Result<Vec<Message>, ChatError> {
    let mut messages = Vec::new();
    if let Some(instructions) = body.string("instructions")? {
        messages.push(Message::new(Role::System, instructions));
    }
    messages.extend(history::read(body)?);
    if messages.is_empty() {
        return Err(body.error("input", "is missing"));
    }
    if messages.iter().all(|message| message.role == Role::System) {
        // Clients probe with instructions alone; templates need a user message.
        messages.push(Message::new(Role::User, ""));
    }
    Ok(messages)
}

/// `text.format`, or an extension that all dialects share.
fn response_format(body: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
    if let Some(text) = body.object("text")?
        && let Some(format) = text.object("format")?
    {
        return ResponseFormat::read_format(&format, SchemaStrictness::BestEffort);
    }
    ResponseFormat::read(body)
}
