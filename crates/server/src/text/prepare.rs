//! From messages to a prompt: normalise, render, tokenise. CPU work; see
//! [`crate::http::body::run_sized`] for long conversations.

use std::sync::Arc;

use chat::conversation::Conversation;
use chat::grammar::ToolCallMarkup;
use chat::reply::tool_call_start_token;
use chat::request::{ChatRequest, ConversationPolicy, ToolChoice};
use chat::template::{RenderedPrompt, ToolCallFormat};
use contract::TokenId;
use decode::InitialPhase;

use crate::error::ApiError;
use crate::ids;
use crate::settings::ServerConfig;
use crate::settings::reasoning::MIN_REASONING_TOKENS;
use crate::text::model_context::ModelContext;

/// Texts up to this many tokens are counted, whatever the context.
const MIN_COUNTED_TOKENS: usize = 400_000;

/// Rendered and tokenised prompt.
#[derive(Debug, Clone)]
pub struct PreparedPrompt {
    /// Rendered text.
    pub text: String,
    /// Its tokens.
    pub ids: Arc<[TokenId]>,
    /// Phase in which the reply begins.
    pub initial_phase: InitialPhase,
    /// Reasoning budget in tokens.
    pub reasoning_budget: Option<usize>,
}

/// Server policy for every conversation.
pub fn policy(config: &ServerConfig) -> ConversationPolicy {
    ConversationPolicy {
        late_system: config.late_system,
        thinking_default: config.defaults.thinking,
        now_unix: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
    }
}

/// Prompt of a chat request. Reasoning is disabled if its budget would be too small.
pub fn chat(
    (model, context): (&ModelContext, usize),
    policy: &ConversationPolicy,
    request: &ChatRequest,
) -> Result<PreparedPrompt, ApiError> {
    let conversation = request.conversation(policy)?;
    let prompt = prompt((model, context), request, &conversation)?;
    let is_short = prompt
        .reasoning_budget
        .is_some_and(|n| n < MIN_REASONING_TOKENS);
    if prompt.initial_phase == InitialPhase::Reasoning && is_short {
        let briefly = Conversation {
            enable_thinking: Some(false),
            ..conversation
        };
        return self::prompt((model, context), request, &briefly);
    }
    Ok(prompt)
}

/// Tokens at which encoding a text stops: beyond what any request may use or count, so that the
/// time of a request does not grow with its text.
pub fn most_tokens(context: usize) -> usize {
    context.saturating_mul(2).max(MIN_COUNTED_TOKENS)
}

fn prompt(
    (model, context): (&ModelContext, usize),
    request: &ChatRequest,
    conversation: &Conversation,
) -> Result<PreparedPrompt, ApiError> {
    let most = most_tokens(context);
    let too_long = |prompt| ApiError::ContextLength {
        prompt,
        limit: context,
    };
    // Cheap, and enough for most texts that are far too long.
    let messages = conversation.messages.iter();
    let at_least = messages.map(|message| model.tokenizer.min_token_count(&message.content));
    let at_least: usize = at_least.sum();
    if at_least > most {
        return Err(too_long(at_least));
    }
    let rendered = model.template.render(conversation)?;
    let ids = model.tokenizer.encode_rendered_up_to(&rendered, most)?;
    if ids.len() > most {
        return Err(too_long(ids.len()));
    }
    let room = context.saturating_sub(ids.len());
    let max_tokens = max_reply_tokens(model, request, room);
    let reasoning = &model.defaults.reasoning;
    Ok(PreparedPrompt {
        initial_phase: initial_phase(model, &rendered, conversation),
        reasoning_budget: reasoning.budget(&request.thinking, max_tokens),
        ids: ids.into(),
        text: rendered.text,
    })
}

/// Phase in which the reply to a prompt begins.
fn initial_phase(
    model: &ModelContext,
    rendered: &RenderedPrompt,
    conversation: &Conversation,
) -> InitialPhase {
    let tags = model.tokenizer.reasoning_tags();
    let left_open = !rendered.closes_reasoning(tags) && !conversation.continue_final_message;
    if rendered.opens_reasoning(tags) {
        InitialPhase::Reasoning
    } else if left_open && model.template.capabilities().model_opens_reasoning {
        InitialPhase::Undecided
    } else {
        InitialPhase::Answer
    }
}

/// Maximum reply tokens: requested or default, within `room` and the model's limit.
pub fn max_reply_tokens(model: &ModelContext, request: &ChatRequest, room: usize) -> usize {
    let defaults = &model.defaults;
    let wanted = request.sampling.max_tokens.or(defaults.max_tokens);
    let most = defaults.reasoning.max_total_tokens.unwrap_or(usize::MAX);
    wanted.unwrap_or(room).min(most).min(room)
}

/// Token that opens a tool call, if the request shows tools but forbids calls.
pub fn forbidden_call_token(model: &ModelContext, request: &ChatRequest) -> Option<TokenId> {
    let forbidden = request.tool_choice == ToolChoice::None && !request.tools.is_empty();
    forbidden
        .then(|| tool_call_start_token(&model.tokenizer))
        .flatten()
}

/// Tool call markup of the model.
pub fn call_markup(model: &ModelContext) -> ToolCallMarkup<'_> {
    let format = model.template.capabilities().call_format;
    ToolCallMarkup {
        tokenizer: &model.tokenizer,
        format: format.unwrap_or(ToolCallFormat::JsonInTags),
    }
}
