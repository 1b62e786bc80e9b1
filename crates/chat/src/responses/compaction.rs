//! Compaction: a conversation becomes its last messages and a summary, which a client sends back.
//!
//! Nothing is stored here: the model writes the summary, and it travels in the item.

use serde_json::{Value, json};

use super::request::ResponsesRequest;
use super::response::counts;
use super::summary;
use crate::conversation::{Message, Role};
use crate::dialect::fields::{Fields, parse_body};
use crate::error::ChatError;
use crate::reply::Usage;
use crate::request::{ChatRequest, ResponseFormat, ToolChoice};

/// Bytes of the user's latest messages that stay as they are.
const MAX_KEPT_BYTES: usize = 32 * 1024;
/// Default maximum number of tokens of a summary.
const MAX_SUMMARY_TOKENS: usize = 4096;

const INSTRUCTION: &str = "The conversation is about to be cut to save context. Write a summary \
    from which it can go on without the messages before this one. State the user's aims and \
    constraints, what was done and decided, what tools returned that still matters, names, paths \
    and values word for word, and what is left to do. Write the summary alone, without calling \
    tools.";

/// A request to compact a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct CompactRequest {
    /// Messages that stay: those of the system, and the user's latest.
    kept: Vec<(Role, String)>,
}

impl CompactRequest {
    /// Reads and checks a request body: a request for a summary, and the messages that stay.
    /// Errors as [`openai::chat_request`](crate::openai::request::chat_request).
    pub fn from_json(body: &[u8]) -> Result<(ChatRequest, CompactRequest), ChatError> {
        let map = parse_body(body)?;
        let body = Fields::body(&map);
        if body.flag("stream", false)? {
            return Err(body.error("stream", "a compaction is not streamed; leave it out"));
        }
        if body.get("input").is_none() {
            return Err(body.error("input", "is missing: there is nothing to compact"));
        }
        let (mut request, _) = ResponsesRequest::read(&body)?;
        let instructions = usize::from(body.get("instructions").is_some());
        let kept = kept(&request.messages[instructions..]);
        request.messages.push(Message::new(Role::User, INSTRUCTION));
        request.tool_choice = ToolChoice::None;
        request.response_format = ResponseFormat::Text;
        request.thinking.enable.get_or_insert(false);
        let limit = request.sampling.max_tokens;
        request.sampling.max_tokens = limit.or(Some(MAX_SUMMARY_TOKENS));
        Ok((request, CompactRequest { kept }))
    }

    /// The compacted conversation, as a response object. `stem` makes ids unique; `created_at` is
    /// in seconds since 1970-01-01 UTC.
    pub fn response(&self, stem: &str, summary: &str, created_at: i64, usage: Usage) -> Value {
        let message = |(index, (role, text)): (usize, &(Role, String))| {
            let role = match role {
                Role::System => "system",
                _ => "user",
            };
            json!({
                "id": format!("msg_{stem}{index}"), "type": "message", "status": "completed",
                "role": role, "content": [{"type": "input_text", "text": text}],
            })
        };
        let mut output: Vec<Value> = self.kept.iter().enumerate().map(message).collect();
        output.push(json!({
            "id": format!("cmp_{stem}"), "type": "compaction",
            "encrypted_content": summary::sealed(summary),
        }));
        json!({
            "id": format!("resp_{stem}"), "object": "response.compaction",
            "created_at": created_at, "output": output, "usage": counts(usage),
        })
    }
}

/// System messages, and the user's latest up to the limit, in order.
fn kept(messages: &[Message]) -> Vec<(Role, String)> {
    let mut room = MAX_KEPT_BYTES;
    let mut kept: Vec<(Role, String)> = Vec::new();
    for message in messages.iter().rev() {
        let stays = match message.role {
            Role::System => true,
            // A summary of before is part of the new one.
            Role::User if summary::is_summary(&message.content) => false,
            Role::User => {
                let fits = message.content.len() <= room;
                room = if fits {
                    room - message.content.len()
                } else {
                    0
                };
                fits
            }
            _ => false,
        };
        if stays && !message.content.is_empty() {
            kept.push((message.role, message.content.clone()));
        }
    }
    kept.reverse();
    kept
}
