//! Reads messages into [`Message`]s.

use serde_json::{Map, Value};

use crate::conversation::{Message, Role, ToolCall, parse_arguments};
use crate::dialect::fields::{Fields, must_be};
use crate::dialect::{is_media, media_placeholder, refuse_media};
use crate::error::ChatError;
use crate::request::MAX_MESSAGES;

pub(crate) fn read(body: &Fields<'_>) -> Result<Vec<Message>, ChatError> {
    let items = body
        .array("messages")?
        .ok_or_else(|| body.error("messages", "is missing"))?;
    if items.is_empty() {
        return Err(body.error("messages", "must hold at least one message"));
    }
    if items.len() > MAX_MESSAGES {
        return Err(body.error(
            "messages",
            format!(
                "must hold at most {MAX_MESSAGES} messages, not {}",
                items.len()
            ),
        ));
    }
    items
        .iter()
        .enumerate()
        .map(|(index, item)| message(&Fields::of(item, format!("messages[{index}]"))?))
        .collect()
}

fn message(fields: &Fields<'_>) -> Result<Message, ChatError> {
    let role = match fields.string("role")? {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool" | "function") => Role::Tool,
        Some(other) => {
            return Err(fields.error(
                "role",
                format!(
                    "unknown role '{other}'; use system, developer, user, assistant, tool or function"
                ),
            ));
        }
        None => return Err(fields.error("role", "is missing")),
    };
    let content = content(fields, role)?;
    let mut message = Message::new(role, content.text);
    message.name = fields.string("name")?.map(str::to_owned);
    match role {
        Role::Assistant => {
            message.reasoning = reasoning(fields, content.thinking)?;
            message.tool_calls = tool_calls(fields)?;
        }
        Role::Tool => message.tool_call_id = fields.string("tool_call_id")?.map(str::to_owned),
        Role::System | Role::User => {}
    }
    Ok(message)
}

/// The text of a message and of its reasoning parts.
struct Content {
    text: String,
    thinking: Option<String>,
}

fn content(fields: &Fields<'_>, role: Role) -> Result<Content, ChatError> {
    match fields.get("content") {
        None => Ok(Content {
            text: fields.string("refusal")?.unwrap_or_default().to_owned(),
            thinking: None,
        }),
        Some(Value::String(text)) => Ok(Content {
            text: text.clone(),
            thinking: None,
        }),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            let mut thinking: Option<String> = None;
            for (index, part) in parts.iter().enumerate() {
                let path = format!("{}[{index}]", fields.path("content"));
                match part {
                    Value::String(plain) => text.push_str(plain),
                    part => {
                        let part = Fields::of(part, path)?;
                        if role == Role::Tool
                            && let Some(kind) = part.string("type")?.filter(|kind| is_media(kind))
                        {
                            text.push_str(&media_placeholder(kind));
                            continue;
                        }
                        let (kind, words) = content_part(&part)?;
                        if kind == "thinking" {
                            thinking.get_or_insert_default().push_str(words);
                        } else {
                            text.push_str(words);
                        }
                    }
                }
            }
            Ok(Content { text, thinking })
        }
        Some(other) => {
            Err(fields.error("content", must_be("a string or an array of parts", other)))
        }
    }
}

fn content_part<'a>(part: &Fields<'a>) -> Result<(&'a str, &'a str), ChatError> {
    let kind = match part.string("type")? {
        Some(kind) => kind,
        None if part.get("text").is_some() => "text",
        None => return Err(part.error("type", "is missing")),
    };
    let key = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        media if is_media(media) => return Err(refuse_media(part, media)),
        other => {
            return Err(ChatError::field(
                part.own_path(),
                format!("unsupported content part '{other}'"),
            ));
        }
    };
    let words = part
        .string(key)?
        .ok_or_else(|| part.error(key, "is missing"))?;
    Ok((kind, words))
}

fn reasoning(fields: &Fields<'_>, thinking: Option<String>) -> Result<Option<String>, ChatError> {
    for key in ["reasoning_content", "reasoning", "reasoning_text"] {
        // Some clients send an object as `reasoning`; only text can go back to the model.
        if let Some(Value::String(text)) = fields.get(key)
            && !text.is_empty()
        {
            return Ok(Some(text.clone()));
        }
    }
    Ok(thinking)
}

fn tool_calls(fields: &Fields<'_>) -> Result<Vec<ToolCall>, ChatError> {
    let mut calls = Vec::new();
    for (index, item) in fields
        .array("tool_calls")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        let call = Fields::of(item, format!("{}[{index}]", fields.path("tool_calls")))?;
        let function = call
            .object("function")?
            .ok_or_else(|| call.error("function", "is missing"))?;
        let id = call.string("id")?.map(str::to_owned);
        calls.push(tool_call(&function, id)?);
    }
    if calls.is_empty()
        && let Some(function) = fields.object("function_call")?
    {
        calls.push(tool_call(&function, None)?);
    }
    Ok(calls)
}

fn tool_call(function: &Fields<'_>, id: Option<String>) -> Result<ToolCall, ChatError> {
    let name = function
        .string("name")?
        .ok_or_else(|| function.error("name", "is missing"))?;
    let arguments = match function.get("arguments") {
        None => Map::new(),
        Some(Value::Object(map)) => map.clone(),
        Some(Value::String(text)) => parse_arguments(text, name),
        Some(other) => {
            return Err(function.error("arguments", must_be("a string of JSON", other)));
        }
    };
    Ok(ToolCall {
        id,
        name: name.to_owned(),
        arguments,
    })
}
