//! Turns input items into messages: the items of one assistant turn become one message.

use serde_json::{Map, Value};

use super::summary;
use super::tools::qualified_name;
use crate::conversation::{Message, Role, ToolCall, parse_arguments};
use crate::dialect::fields::{Fields, must_be};
use crate::dialect::{is_media, media_placeholder, refuse_media};
use crate::error::ChatError;
use crate::request::MAX_MESSAGES;

/// Reads `input`: a string or items. If absent, there are no messages.
pub(super) fn read(body: &Fields<'_>) -> Result<Vec<Message>, ChatError> {
    let mut history = InputHistory::default();
    match body.get("input") {
        None => {}
        Some(Value::String(text)) => history.messages.push(Message::new(Role::User, text)),
        Some(Value::Array(items)) if items.len() <= MAX_MESSAGES => {
            for (index, item) in items.iter().enumerate() {
                history.item(&Fields::of(item, format!("input[{index}]"))?)?;
            }
        }
        Some(Value::Array(items)) => {
            let n = items.len();
            let message = format!("must hold at most {MAX_MESSAGES} items, not {n}");
            return Err(body.error("input", message));
        }
        Some(other) => {
            return Err(body.error("input", must_be("a string or an array of items", other)));
        }
    }
    Ok(history.messages)
}

#[derive(Default)]
struct InputHistory {
    messages: Vec<Message>,
    /// Reasoning whose turn has not started.
    reasoning: Option<String>,
}

impl InputHistory {
    fn item(&mut self, item: &Fields<'_>) -> Result<(), ChatError> {
        match item.string("type")?.unwrap_or("message") {
            "message" => self.message(item),
            "reasoning" => self.thinking(item),
            "function_call" => {
                let name = name(item)?;
                let arguments = match item.get("arguments") {
                    None => Map::new(),
                    Some(Value::Object(map)) => map.clone(),
                    Some(Value::String(text)) => parse_arguments(text, &name),
                    Some(other) => return Err(item.error("arguments", must_be("a string", other))),
                };
                self.call(item, name, arguments)
            }
            "custom_tool_call" => {
                let input = item.string("input")?.unwrap_or_default();
                let arguments = Map::from_iter([("input".to_owned(), Value::from(input))]);
                self.call(item, name(item)?, arguments)
            }
            "local_shell_call" => {
                let action = item.object("action")?;
                let arguments = action.map(|action| action.map().clone());
                self.call(
                    item,
                    "local_shell".to_owned(),
                    arguments.unwrap_or_default(),
                )
            }
            "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" => {
                self.result(item)
            }
            "compaction" | "compaction_summary" => {
                self.reasoning = None;
                self.messages.push(summary::message(item)?);
                Ok(())
            }
            "compaction_trigger" => {
                let message = "is not supported; compact the conversation by /v1/responses/compact";
                Err(item.error("type", format!("compaction_trigger {message}")))
            }
            "item_reference" => Err(unknown_item(item)),
            other => {
                tracing::debug!(kind = other, at = item.own_path(), "input item skipped");
                Ok(())
            }
        }
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<(), ChatError> {
        let role = match item.string("role")? {
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("system" | "developer") => Role::System,
            Some(other) => {
                return Err(item.error(
                    "role",
                    format!("unknown role '{other}'; use user, assistant, system or developer"),
                ));
            }
            None => return Err(item.error("role", "is missing")),
        };
        let text = texts(item, "content", Media::Refused)?.unwrap_or_default();
        if role != Role::Assistant {
            self.reasoning = None;
            self.messages.push(Message::new(role, text));
            return Ok(());
        }
        let turn = self.assistant_message();
        if turn.content.is_empty() {
            turn.content = text;
        } else {
            self.messages.push(Message::new(Role::Assistant, text));
        }
        Ok(())
    }

    fn thinking(&mut self, item: &Fields<'_>) -> Result<(), ChatError> {
        let mut thought = texts(item, "content", Media::Refused)?.filter(|text| !text.is_empty());
        if thought.is_none() {
            thought = texts(item, "summary", Media::Refused)?.filter(|text| !text.is_empty());
        }
        if let Some(thought) = thought {
            self.reasoning.get_or_insert_default().push_str(&thought);
        }
        Ok(())
    }

    fn call(
        &mut self,
        item: &Fields<'_>,
        name: String,
        arguments: Map<String, Value>,
    ) -> Result<(), ChatError> {
        let id = item.string("call_id")?.or(item.string("id")?);
        let id = id.map(str::to_owned);
        self.assistant_message().tool_calls.push(ToolCall {
            id,
            name,
            arguments,
        });
        Ok(())
    }

    fn result(&mut self, item: &Fields<'_>) -> Result<(), ChatError> {
        let text = match item.get("output") {
            Some(Value::Object(map)) => match map.get("content") {
                Some(Value::String(text)) => text.clone(),
                Some(Value::Array(_)) => {
                    let output = Fields::of(&item.map()["output"], item.path("output"))?;
                    texts(&output, "content", Media::LeftOut)?.unwrap_or_default()
                }
                _ => Value::Object(map.clone()).to_string(),
            },
            _ => texts(item, "output", Media::LeftOut)?.unwrap_or_default(),
        };
        self.reasoning = None;
        let mut message = Message::new(Role::Tool, text);
        message.tool_call_id = item.string("call_id")?.map(str::to_owned);
        self.messages.push(message);
        Ok(())
    }

    /// The assistant message that the next item belongs to. Reasoning starts a new one.
    fn assistant_message(&mut self) -> &mut Message {
        let goes_on = self.reasoning.is_none()
            && matches!(self.messages.last(), Some(last) if last.role == Role::Assistant);
        if !goes_on {
            let mut message = Message::new(Role::Assistant, "");
            message.reasoning = self.reasoning.take();
            self.messages.push(message);
        }
        self.messages.last_mut().expect("there is a turn by now")
    }
}

/// The tool's name as the model knows it.
fn name(item: &Fields<'_>) -> Result<String, ChatError> {
    let name = item.string("name")?;
    let name = name.ok_or_else(|| item.error("name", "is missing"))?;
    Ok(match item.string("namespace")? {
        Some(space) if !space.is_empty() => qualified_name(space, name),
        _ => name.to_owned(),
    })
}

/// Items are not kept, so none can be referred to; the words are OpenAI's own.
fn unknown_item(item: &Fields<'_>) -> ChatError {
    let id = item.string("id").ok().flatten().unwrap_or_default();
    ChatError::not_found(
        "input",
        format!(
            "Item with id '{id}' not found. Items are not persisted when `store` is set to false: \
            put the item itself into the input, or remove it"
        ),
    )
}

/// What becomes of media among parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Media {
    Refused,
    /// A text stands for them: in a tool's result.
    LeftOut,
}

/// The text of a field that is a string or an array of parts, joined.
fn texts(fields: &Fields<'_>, key: &str, media: Media) -> Result<Option<String>, ChatError> {
    let parts = match fields.get(key) {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text.clone())),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            return Err(fields.error(key, must_be("a string or an array of parts", other)));
        }
    };
    let mut all = String::new();
    for (index, part) in parts.iter().enumerate() {
        if let Value::String(text) = part {
            all.push_str(text);
            continue;
        }
        let part = Fields::of(part, format!("{}[{index}]", fields.path(key)))?;
        if let Some(kind) = part.string("type")?.filter(|kind| is_media(kind)) {
            if media == Media::Refused {
                return Err(refuse_media(&part, kind));
            }
            all.push_str(&media_placeholder(kind));
            continue;
        }
        let key = match part.string("type")? {
            None | Some("input_text" | "output_text" | "text") => "text",
            Some("summary_text" | "reasoning_text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                return Err(ChatError::field(
                    part.own_path(),
                    format!("unsupported content part '{other}'"),
                ));
            }
        };
        let text = part.string(key)?;
        all.push_str(text.ok_or_else(|| part.error(key, "is missing"))?);
    }
    Ok(Some(all))
}
