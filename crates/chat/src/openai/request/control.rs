//! A word to an answer that is under way.

use crate::dialect::fields::{Fields, parse_body};
use crate::error::ChatError;

/// What is to be done with which answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlRequest {
    /// The answer's id, as its events carry it.
    pub id: String,
    /// What to do.
    pub action: ControlAction,
}

/// What can be done with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlAction {
    /// Close its thinking.
    ReasoningEnd,
}

impl ControlRequest {
    /// Reads and checks a request body; errors as [`chat_request`](super::chat_request).
    pub fn from_json(body: &[u8]) -> Result<ControlRequest, ChatError> {
        let map = parse_body(body)?;
        let body = Fields::body(&map);
        let id = body
            .string("id")?
            .ok_or_else(|| body.error("id", "is missing"))?;
        let action = match body.string("action")? {
            Some("reasoning_end") => ControlAction::ReasoningEnd,
            Some(other) => {
                return Err(body.error("action", format!("must be reasoning_end, not {other:?}")));
            }
            None => return Err(body.error("action", "is missing")),
        };
        Ok(ControlRequest {
            id: id.to_owned(),
            action,
        })
    }
}
