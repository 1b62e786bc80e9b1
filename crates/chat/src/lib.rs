//! The text side of a language model server: from a client's JSON to token ids, and back.
//!
//! A request is read by a dialect ([`openai`], [`anthropic`] or [`responses`]) into a
//! [`request::ChatRequest`]. A [`template`] renders its [`conversation`] to a prompt, and the
//! [`Tokenizer`] encodes the prompt.
//!
//! Reply tokens go through [`detokenize`]. [`reply::ReplyParser`] splits the text into reasoning,
//! content and tool calls, and the dialect of the request writes them as JSON.
//!
//! This crate is pure: no clock, file, socket, thread or device. Everything it needs of the model
//! comes from a [`contract::Vocab`].
//!
//! Start at [`request::ChatRequest`] for the way in and at [`reply::ReplyParser`] for the way out.

#![forbid(unsafe_code)]

pub mod anthropic;
pub mod conversation;
pub mod detokenize;
mod dialect;
mod error;
pub mod grammar;
pub mod llama_server;
pub mod ollama;
pub mod openai;
pub mod reasoning;
pub mod reply;
pub mod request;
pub mod responses;
pub mod stop;
pub mod template;
#[cfg(test)]
mod test_fixtures;
mod tokenizer;
pub mod tools;

pub use error::{ChatError, ErrorKind};
pub use request::LATE_SYSTEM_MARKER;
pub use tokenizer::{CancelFlag, EncodeLimit, SpecialTokens, Tokenizer, UnicodeNormalizer};
