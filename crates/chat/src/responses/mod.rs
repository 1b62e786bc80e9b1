//! The JSON of OpenAI's Responses.

mod echo;
mod history;
mod request;
pub mod response;
pub mod stream;
mod tools;

pub use self::echo::EchoedFields;
pub use self::request::ResponsesRequest;
pub use self::tools::{ClientToolName, ToolNames};

#[cfg(test)]
mod tests;
