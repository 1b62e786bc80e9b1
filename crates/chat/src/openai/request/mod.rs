//! Request bodies of OpenAI's chat completions, text completions and reply control.

mod chat;
mod completion;
mod control;
mod gap;
pub(crate) mod messages;

pub use self::chat::chat_request;
pub use self::completion::{CompletionPrompt, CompletionRequest, DEFAULT_MAX_TOKENS, MAX_PROMPTS};
pub use self::control::{ControlAction, ControlRequest};
pub use self::gap::{ContextFile, GapContext};

#[cfg(test)]
mod tests;
