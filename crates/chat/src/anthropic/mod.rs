//! The Anthropic dialect: what a client sends and what it gets back.

mod content;
mod request;
pub mod response;
pub mod stream;

use crate::error::ChatError;
use crate::request::ChatRequest;

/// Reads the body of a message request, or of one that only counts tokens.
///
/// It becomes the same request that chat completions become; tool results, tool uses and thinking of
/// earlier turns included. Errors as [`openai::chat_request`](crate::openai::request::chat_request).
pub fn chat_request(body: &[u8]) -> Result<ChatRequest, ChatError> {
    request::read(body)
}

#[cfg(test)]
mod tests;
