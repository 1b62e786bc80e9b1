//! The JSON of Anthropic's Messages.

mod content;
mod request;
pub mod response;
pub mod stream;

use crate::error::ChatError;
use crate::request::ChatRequest;

/// Reads the body of a message request or of a token count request.
///
/// Errors as [`openai::chat_request`](crate::openai::request::chat_request).
pub fn chat_request(body: &[u8]) -> Result<ChatRequest, ChatError> {
    request::read(body)
}

#[cfg(test)]
mod tests;
