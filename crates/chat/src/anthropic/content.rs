//! Content blocks of one message, by kind.

use serde_json::{Map, Value};

use crate::conversation::{Message, Role, ToolCall, parse_arguments};
use crate::dialect::fields::{Fields, must_be};
use crate::dialect::{is_media, media_placeholder, refuse_media};
use crate::error::ChatError;
use crate::request::is_billing;

/// The blocks of one message.
#[derive(Debug, Default)]
pub(super) struct MessageContent {
    /// All text, blocks joined by a line break; `None` without a text block.
    pub(super) text: Option<String>,
    /// All reasoning, if there is any.
    pub(super) thinking: Option<String>,
    /// Calls the assistant made.
    pub(super) calls: Vec<ToolCall>,
    /// Tool results, each a message.
    pub(super) results: Vec<Message>,
}

impl MessageContent {
    /// Reads the field `key`: a string or an array of blocks; absent is empty.
    pub(super) fn read(fields: &Fields<'_>, key: &str) -> Result<MessageContent, ChatError> {
        MessageContent::read_kept(fields, key, |_| true)
    }

    /// System text without billing blocks.
    pub(super) fn system(fields: &Fields<'_>, key: &str) -> Result<Option<String>, ChatError> {
        let content = MessageContent::read_kept(
            fields,
            key,
            |block| !matches!(block.get("text"), Some(Value::String(text)) if is_billing(text)),
        )?;
        Ok(content.text)
    }

    fn read_kept(
        fields: &Fields<'_>,
        key: &str,
        mut keep: impl FnMut(&Fields<'_>) -> bool,
    ) -> Result<MessageContent, ChatError> {
        let mut content = MessageContent::default();
        match fields.get(key) {
            None => {}
            Some(Value::String(text)) => content.text = Some(text.clone()),
            Some(Value::Array(blocks)) => {
                for (index, block) in blocks.iter().enumerate() {
                    if let Value::String(text) = block {
                        content.add_text(text);
                        continue;
                    }
                    let path = format!("{}[{index}]", fields.path(key));
                    let block = Fields::of(block, path)?;
                    if keep(&block) {
                        content.block(&block)?;
                    }
                }
            }
            Some(other) => {
                return Err(fields.error(key, must_be("a string or an array of blocks", other)));
            }
        }
        Ok(content)
    }

    fn add_text(&mut self, text: &str) {
        match &mut self.text {
            None => self.text = Some(text.to_owned()),
            Some(all) => {
                all.push('\n');
                all.push_str(text);
            }
        }
    }

    /// Reads a tool's result, in which media become a text that stands for them.
    fn result(fields: &Fields<'_>) -> Result<MessageContent, ChatError> {
        let mut left_out = Vec::new();
        let mut content = MessageContent::read_kept(fields, "content", |block| {
            let kind = block.get("type").and_then(Value::as_str).unwrap_or("");
            let is_left_out = is_media(kind) || (kind == "document" && document(block).is_err());
            if is_left_out {
                left_out.push(media_placeholder(kind));
            }
            !is_left_out
        })?;
        left_out.iter().for_each(|text| content.add_text(text));
        Ok(content)
    }

    fn block(&mut self, block: &Fields<'_>) -> Result<(), ChatError> {
        let kind = match block.string("type")? {
            Some(kind) => kind,
            None if block.get("text").is_some() => "text",
            None => return Err(block.error("type", "is missing")),
        };
        match kind {
            "text" => self.add_text(needed(block, "text")?),
            "thinking" => {
                let thinking = block.string("thinking")?.unwrap_or_default();
                self.thinking.get_or_insert_default().push_str(thinking);
            }
            "tool_use" => self.calls.push(tool_use(block)?),
            "tool_result" => self.results.push(tool_result(block)?),
            "tool_reference" => {
                let name = block.string("tool_name")?.or(block.string("name")?);
                self.add_text(name.unwrap_or_default());
            }
            "document" => self.add_text(document(block)?),
            media if is_media(media) => return Err(refuse_media(block, media)),
            // Encrypted reasoning, and results of tools that ran elsewhere.
            other => tracing::debug!(kind = other, at = block.own_path(), "content block skipped"),
        }
        Ok(())
    }
}

fn needed<'a>(block: &Fields<'a>, key: &str) -> Result<&'a str, ChatError> {
    block
        .string(key)?
        .ok_or_else(|| block.error(key, "is missing"))
}

fn tool_use(block: &Fields<'_>) -> Result<ToolCall, ChatError> {
    let name = needed(block, "name")?;
    let arguments = match block.get("input") {
        None => Map::new(),
        Some(Value::Object(map)) => map.clone(),
        Some(Value::String(text)) => parse_arguments(text, name),
        Some(other) => return Err(block.error("input", must_be("an object", other))),
    };
    Ok(ToolCall {
        id: block.string("id")?.map(str::to_owned),
        name: name.to_owned(),
        arguments,
    })
}

fn tool_result(block: &Fields<'_>) -> Result<Message, ChatError> {
    let content = MessageContent::result(block)?;
    let mut message = Message::new(Role::Tool, content.text.unwrap_or_default());
    message.tool_call_id = block.string("tool_use_id")?.map(str::to_owned);
    Ok(message)
}

/// The text of a document; only plain text is supported.
fn document<'a>(block: &Fields<'a>) -> Result<&'a str, ChatError> {
    let source = block
        .object("source")?
        .ok_or_else(|| block.error("source", "is missing"))?;
    match source.string("type")? {
        Some("text") => needed(&source, "data"),
        other => Err(source.error(
            "type",
            format!(
                "must be text, not {:?}; this model reads text only",
                other.unwrap_or_default()
            ),
        )),
    }
}
