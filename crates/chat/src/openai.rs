//! The OpenAI dialect: what a client sends and what it gets back.

mod fields;
pub mod request;
pub mod response;
pub mod stream;
