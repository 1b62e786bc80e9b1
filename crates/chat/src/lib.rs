//! The text side of a language model server: everything between a client's JSON and token ids, and
//! back.
//!
//! A request goes through [`openai::request`] (checked fields), [`conversation`] (messages in an order
//! templates accept), [`template`] (a prompt) and [`Tokenizer`] (ids).
//! A reply comes back through [`detokenize`] (text as it becomes certain), [`reasoning`], [`tools`] and
//! [`stop`], which [`reply::ReplyParser`] composes, into [`openai::response`] or [`openai::stream`].
//!
//! This crate is pure: it knows no clock, file, socket, thread or device. What it needs of the model
//! comes as a [`contract::Vocab`].
//!
//! Start reading at [`openai::request::ChatRequest::from_json`] for the way in, and at
//! [`reply::ReplyParser`] for the way out.

#![forbid(unsafe_code)]

pub mod anthropic;
pub mod conversation;
pub mod detokenize;
mod dialect;
mod error;
pub mod grammar;
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
pub use tokenizer::{SpecialTokens, Tokenizer, UnicodeNormalizer};
