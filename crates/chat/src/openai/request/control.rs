//! Control of a running reply.

use crate::dialect::fields::{Fields, parse_body};
use crate::error::ChatError;

/// An action on a running reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlRequest {
    /// The reply's id, as in its events.
    pub id: String,
    /// The action.
    pub action: ControlAction,
}

/// An action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlAction {
    /// End its reasoning.
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
