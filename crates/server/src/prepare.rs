//! From a request's messages to tokens: normalise, render, tokenise. Pure work, and for long conversations
//! long work; see [`crate::body::run_sized`].

use std::sync::Arc;

use chat::openai::request::{ChatRequest, ConversationPolicy, ToolChoice};
use chat::reply::call_opening_token;
use contract::TokenId;

use crate::error::ApiError;
use crate::ids;
use crate::served::ServedModel;
use crate::settings::ServerConfig;

/// A prompt ready for the engine.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// What the template wrote.
    pub text: String,
    /// Its tokens.
    pub ids: Arc<[TokenId]>,
    /// Whether the reply begins inside an open thinking block.
    pub opens_reasoning: bool,
}

/// What the server decides about every conversation.
pub fn policy(config: &ServerConfig) -> ConversationPolicy {
    ConversationPolicy {
        late_system: config.late_system,
        thinking_default: config.defaults.thinking,
        now_unix: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
    }
}

/// The prompt of a chat request.
pub fn chat(
    model: &ServedModel,
    policy: &ConversationPolicy,
    request: &ChatRequest,
) -> Result<Prompt, ApiError> {
    let conversation = request.conversation(policy)?;
    let rendered = model.template.render(&conversation)?;
    let ids = model.tokenizer.encode_rendered(&rendered)?;
    Ok(Prompt {
        opens_reasoning: rendered.opens_reasoning(),
        ids: ids.into(),
        text: rendered.text,
    })
}

/// The token that opens a call, for a request that shows tools but forbids calling them.
pub fn barred_token(model: &ServedModel, request: &ChatRequest) -> Option<TokenId> {
    let barred = request.tool_choice == ToolChoice::None && !request.tools.is_empty();
    barred
        .then(|| call_opening_token(&model.tokenizer))
        .flatten()
}
