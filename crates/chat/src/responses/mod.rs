//! The JSON of OpenAI's Responses.

mod compaction;
mod echo;
mod history;
mod request;
pub mod response;
pub mod stored;
pub mod stream;
mod summary;
mod tools;

pub use self::compaction::CompactRequest;
pub use self::echo::EchoedFields;
pub use self::request::ResponsesRequest;
pub use self::tools::{ClientToolName, ToolNames};

#[cfg(test)]
mod compaction_tests;
#[cfg(test)]
mod tests;
