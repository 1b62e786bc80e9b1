//! From messages to a prompt: normalise, render, tokenise. CPU work; see
//! [`crate::http::body::run_sized`] for long conversations.

use std::sync::Arc;

use chat::conversation::Conversation;
use chat::grammar::ToolCallMarkup;
use chat::reply::tool_call_start_token;
use chat::request::{ChatRequest, ConversationPolicy, ToolChoice, TruncationSide};
use chat::template::{RenderedPrompt, ToolCallFormat};
use chat::{CancelFlag, EncodeLimit};
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

/// Prompt of a chat request. Reasoning is disabled if its budget would be too small. Fails if
/// `cancel` is set meanwhile.
pub fn chat(
    (model, context): (&ModelContext, usize),
    policy: &ConversationPolicy,
    request: &ChatRequest,
    cancel: &CancelFlag,
) -> Result<PreparedPrompt, ApiError> {
    let conversation = request.conversation(policy)?;
    let limit = EncodeLimit {
        tokens: most_tokens(context),
        cancel: Some(cancel),
    };
    check_length(model, &conversation, (limit, context))?;
    let rendered = model.template.render(&conversation)?;
    let phase = initial_phase(model, &rendered, &conversation);
    let reasons_briefly = |room: usize| {
        let most = max_reply_tokens(model, request, room);
        let budget = model.defaults.reasoning.budget(&request.thinking, most);
        phase == InitialPhase::Reasoning && budget.is_some_and(|n| n < MIN_REASONING_TOKENS)
    };
    // The budget grows with the room. Most requests that are too short for reasoning are so with
    // the whole context as room, which is known before the text is encoded.
    if !reasons_briefly(context) {
        let (ids, phase) = encode(model, request, (&rendered, phase), (limit, context))?;
        if !reasons_briefly(context.saturating_sub(ids.len())) {
            return Ok(prepared((model, context), request, (rendered, ids), phase));
        }
    }
    let briefly = Conversation {
        enable_thinking: Some(false),
        ..conversation
    };
    let rendered = model.template.render(&briefly)?;
    let phase = initial_phase(model, &rendered, &briefly);
    let (ids, phase) = encode(model, request, (&rendered, phase), (limit, context))?;
    Ok(prepared((model, context), request, (rendered, ids), phase))
}

/// Tokens at which encoding a text stops: beyond what any request may use or count, so that the
/// time of a request does not grow with its text.
pub fn most_tokens(context: usize) -> usize {
    context.saturating_mul(2).max(MIN_COUNTED_TOKENS)
}

/// Refuses most texts that are far too long, without encoding them.
fn check_length(
    model: &ModelContext,
    conversation: &Conversation,
    (limit, context): (EncodeLimit<'_>, usize),
) -> Result<(), ApiError> {
    let messages = conversation.messages.iter();
    let at_least = messages.map(|message| model.tokenizer.min_token_count(&message.content));
    check_count(at_least.sum(), (limit, context))
}

/// The tokens of a prompt, cut as the request says, and the phase in which the reply begins.
fn encode(
    model: &ModelContext,
    request: &ChatRequest,
    (rendered, phase): (&RenderedPrompt, InitialPhase),
    (limit, context): (EncodeLimit<'_>, usize),
) -> Result<(Vec<TokenId>, InitialPhase), ApiError> {
    let ids = model.tokenizer.encode_rendered_up_to(rendered, limit)?;
    check_count(ids.len(), (limit, context))?;
    let Some(truncation) = &request.tokens.truncation else {
        return Ok((ids, phase));
    };
    let before = ids.len();
    let most = request.sampling.max_tokens.or(model.defaults.max_tokens);
    let ids = truncation.apply(ids, context, most);
    // A prompt without its end opens no reasoning.
    let lost_end = truncation.side == TruncationSide::Right && ids.len() < before;
    let phase = if lost_end {
        InitialPhase::Answer
    } else {
        phase
    };
    Ok((ids, phase))
}

fn check_count(prompt: usize, (limit, context): (EncodeLimit<'_>, usize)) -> Result<(), ApiError> {
    if prompt <= limit.tokens {
        return Ok(());
    }
    Err(ApiError::ContextLength {
        prompt,
        limit: context,
    })
}

fn prepared(
    (model, context): (&ModelContext, usize),
    request: &ChatRequest,
    (rendered, ids): (RenderedPrompt, Vec<TokenId>),
    initial_phase: InitialPhase,
) -> PreparedPrompt {
    let room = context.saturating_sub(ids.len());
    let max_tokens = max_reply_tokens(model, request, room);
    let reasoning = &model.defaults.reasoning;
    PreparedPrompt {
        initial_phase,
        reasoning_budget: reasoning.budget(&request.thinking, max_tokens),
        ids: ids.into(),
        text: rendered.text,
    }
}

/// Phase in which the reply to a prompt begins.
pub fn initial_phase(
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
