//! The JSON of OpenAI's Responses.

mod history;
mod request;
pub mod response;
pub mod stream;
mod tools;

pub use self::request::{EchoedFields, ResponsesRequest};
pub use self::tools::{ClientToolName, ToolNames};

#[cfg(test)]
mod tests;
