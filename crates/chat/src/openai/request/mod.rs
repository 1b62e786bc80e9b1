//! What a client sends, checked field by field.

mod chat;
mod completion;
mod control;
mod format;
mod messages;
mod sampling;
mod thinking;
mod tools;

pub use self::chat::{CacheHints, ChatRequest, ConversationPolicy, ReasoningFormat, StreamOptions};
pub use self::completion::{CompletionRequest, DEFAULT_MAX_TOKENS, Prompt};
pub use self::control::{ControlAction, ControlRequest};
pub use self::format::ResponseFormat;
pub use self::sampling::{RepetitionWindow, SamplingParams};
pub use self::thinking::ReasoningOptions;
pub use self::tools::ToolChoice;
pub(crate) use self::{
    chat::{DialectFields, cache_hint},
    messages::parse_arguments,
    tools::{ToolFields, choice as tool_choice, items as tool_items},
};
pub use crate::normalize::LateSystem;

/// Most messages a request may hold.
pub const MAX_MESSAGES: usize = 16_384;
/// Most tools a request may declare.
pub const MAX_TOOLS: usize = 1_024;
/// Most stop strings, and most stop token ids.
pub const MAX_STOPS: usize = 16;
/// Most choices for one prompt.
pub const MAX_CHOICES: usize = 8;
/// Most alternatives per token.
pub const MAX_TOP_LOGPROBS: usize = 20;
/// Most prompts in one text completion request.
pub const MAX_PROMPTS: usize = 128;

#[cfg(test)]
mod tests;
