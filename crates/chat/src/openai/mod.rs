//! The OpenAI dialect: what a client sends and what it gets back.

pub mod request;
pub mod response;
pub mod stream;
