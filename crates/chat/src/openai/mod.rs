//! The JSON of OpenAI's chat and text completions.

pub mod request;
pub mod response;
pub mod stream;
