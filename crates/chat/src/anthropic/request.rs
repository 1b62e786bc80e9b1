//! The body of a message request.

use serde_json::Value;

use super::content::MessageContent;
use crate::conversation::{Message, Role};
use crate::dialect::fields::{Fields, parse_body};
use crate::dialect::{DialectFields, ToolFields, cache_hint, refuse_completions_only, tool_items};
use crate::error::ChatError;
use crate::request::{
    ChatRequest, MAX_MESSAGES, ReasoningVisibility, ResponseFormat, SamplingParams,
    SchemaStrictness, ToolChoice,
};
use crate::tools::Tool;

pub(super) fn read(body: &[u8]) -> Result<ChatRequest, ChatError> {
    let map = parse_body(body)?;
    let body = Fields::body(&map);
    refuse_completions_only(&body)?;
    let messages = messages(&body)?;
    let last = messages.last();
    let continues = last.is_some_and(|message| message.role == Role::Assistant);
    if continues && last.is_some_and(|message| !message.tool_calls.is_empty()) {
        return Err(body.error(
            "messages",
            "the last message has tool_use blocks without tool_result blocks after it",
        ));
    }
    let dialect = DialectFields {
        messages,
        sampling: SamplingParams {
            n: 1,
            ..SamplingParams::read(&body, "stop_sequences")?
        },
        logprobs: None,
        tools: tools(&body)?,
        response_format: response_format(&body)?,
        continue_final_message: continues,
    };
    let mut request = crate::dialect::chat_request(&body, dialect)?;
    if !request.thinking.is_requested() {
        // Clients that did not ask for reasoning do not expect blocks of it.
        request.thinking.visibility = ReasoningVisibility::Excluded;
    }
    if request.cache.group.is_none()
        && let Some(metadata) = body.object("metadata")?
    {
        let user = metadata.string("user_id")?;
        request.cache.group = user.map(cache_hint);
    }
    Ok(request)
}

/// The system text and all messages. Tool results precede the text of their message.
fn messages(body: &Fields<'_>) -> Result<Vec<Message>, ChatError> {
    let items = body
        .array("messages")?
        .ok_or_else(|| body.error("messages", "is missing"))?;
    if items.is_empty() || items.len() > MAX_MESSAGES {
        return Err(body.error(
            "messages",
            format!(
                "must hold between 1 and {MAX_MESSAGES} messages, not {}",
                items.len()
            ),
        ));
    }
    let mut messages = Vec::with_capacity(items.len() + 1);
    if let Some(text) = MessageContent::system(body, "system")? {
        messages.push(Message::new(Role::System, text));
    }
    for (index, item) in items.iter().enumerate() {
        let fields = Fields::of(item, format!("messages[{index}]"))?;
        message(&fields, &mut messages)?;
    }
    Ok(messages)
}

fn message(fields: &Fields<'_>, messages: &mut Vec<Message>) -> Result<(), ChatError> {
    match fields.string("role")? {
        Some("user") => {
            let content = MessageContent::read(fields, "content")?;
            let only_results = content.text.is_none() && !content.results.is_empty();
            messages.extend(content.results);
            if !only_results {
                let text = content.text.unwrap_or_default();
                messages.push(Message::new(Role::User, text));
            }
        }
        Some("assistant") => {
            let content = MessageContent::read(fields, "content")?;
            let mut message = Message::new(Role::Assistant, content.text.unwrap_or_default());
            message.reasoning = content.thinking.filter(|text| !text.is_empty());
            message.tool_calls = content.calls;
            messages.push(message);
        }
        Some("system") => {
            if let Some(text) = MessageContent::system(fields, "content")? {
                messages.push(Message::new(Role::System, text));
            }
        }
        Some(other) => {
            return Err(fields.error(
                "role",
                format!("unknown role '{other}'; use user, assistant or system"),
            ));
        }
        None => return Err(fields.error("role", "is missing")),
    }
    Ok(())
}

fn tools(body: &Fields<'_>) -> Result<ToolFields, ChatError> {
    let mut tools = Vec::new();
    for (index, value) in tool_items(body, "tools")?.iter().enumerate() {
        let fields = Fields::of(value, format!("tools[{index}]"))?;
        let kind = fields.string("type")?.unwrap_or("custom");
        if kind != "custom" && fields.get("input_schema").is_none() {
            // Tools that Anthropic's servers run; none of them exists here.
            tracing::warn!(kind, "a tool that runs on the provider's side is left out");
            continue;
        }
        let name = fields
            .string("name")?
            .filter(|name| !name.is_empty())
            .ok_or_else(|| fields.error("name", "is missing"))?;
        let schema = fields.object("input_schema")?;
        let schema = schema.map(|schema| Value::Object(schema.map().clone()));
        let description = fields.string("description")?;
        let strict = fields.flag("strict", false)?;
        tools.push(Tool::declare(name, description, schema.as_ref(), strict));
    }
    let (choice, parallel) = match body.object("tool_choice")? {
        None => (ToolChoice::Auto, true),
        Some(fields) => (
            choice(&fields)?,
            !fields.flag("disable_parallel_tool_use", false)?,
        ),
    };
    ToolFields {
        tools,
        choice,
        allowed: None,
        parallel,
    }
    .checked()
}

fn choice(fields: &Fields<'_>) -> Result<ToolChoice, ChatError> {
    Ok(match fields.string("type")? {
        None | Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => {
            let name = fields.string("name")?;
            let name = name.ok_or_else(|| fields.error("name", "is missing"))?;
            ToolChoice::Named(name.to_owned())
        }
        Some(other) => {
            return Err(fields.error(
                "type",
                format!("must be auto, any, tool or none, not {other:?}"),
            ));
        }
    })
}

/// `output_config.format`, its older spelling, or an extension that all dialects share.
fn response_format(body: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
    let inner = match body.object("output_config")? {
        Some(config) => config.object("format")?,
        None => None,
    };
    let outer = body.object("output_format")?;
    match inner.or(outer) {
        None => ResponseFormat::read(body),
        // This protocol has no other formats than strict ones.
        Some(format) => ResponseFormat::read_format(&format, SchemaStrictness::Strict),
    }
}
