//! Chat completions.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use chat::openai::request::{ControlAction, ControlRequest, chat_request};
use chat::openai::response::{
    AssistantMessage, ChatChoice, ChatCompletion, CloseKind, FinishDetails, ReasoningField,
};
use chat::openai::stream::{ChatChunk, ChunkChoice, Delta, PromptProgress, UsageField};
use chat::request::ChatRequest;
use chat::{ChatError, Tokenizer};
use contract::TokenId;
use decode::ReasoningEnd;
use serde_json::{Value, json};

use crate::engine::control::ControlGuard;
use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::dialect::{self, ParsedRequest, StreamFormat};
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::model_choice::Selected;
use crate::http::sse::{KeepAlive, SseEncoder};
use crate::http::state::App;
use crate::http::stream_error::ErrorFormat;
use crate::ids;
use crate::text::prompt_logprobs;

/// `POST /v1/chat/completions`.
pub(super) async fn completions(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut parsed = ParsedRequest::read(&app, &headers, body, parse).await?;
    if parsed.request.stream {
        let errors = ErrorFormat::new(Dialect::OpenAi);
        return dialect::stream(&app, parsed, errors, ChatFormat::new).await;
    }
    let request = parsed.start(&app).await?;
    let format = ChatFormat::new(&app, &parsed, &request);
    let whole = whole(request, &format, parsed.tokenizer()).await?;
    Ok(parsed.with_notes(whole.into_response()))
}

/// `POST /v1/chat/completions/input_tokens`: prompt length in tokens.
pub(super) async fn input_tokens(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let parsed = ParsedRequest::read(&app, &headers, body, parse).await?;
    Ok(Json(json!({
        "object": "response.input_tokens",
        "input_tokens": parsed.prompt.ids.len(),
    })))
}

/// `POST /v1/chat/completions/control`: controls a running response.
pub(super) async fn control(Selected(app): Selected, body: Body) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let order = ControlRequest::from_json(&bytes)?;
    let ControlAction::ReasoningEnd = order.action;
    if !app.controls().end_reasoning(&order.id) {
        let message = format!("id: no answer {:?} is under way", order.id);
        return Err(ApiError::NotFound { message });
    }
    Ok(Json(json!({"id": order.id, "success": true})))
}

fn parse(bytes: &[u8]) -> Result<(ChatRequest, ()), ChatError> {
    Ok((chat_request(bytes)?, ()))
}

/// Fields common to all events of one response.
struct ChatFormat {
    /// Keeps the response controllable while it runs.
    _control: ControlGuard,
    id: String,
    created: i64,
    model: String,
    fingerprint: String,
    n: usize,
    include_usage: bool,
    running_usage: bool,
    progress: bool,
    timings: bool,
    details: bool,
    logprobs: bool,
    reasoning_field: ReasoningField,
    /// Text that every choice begins with.
    echo: Option<String>,
    prompt_ids: Arc<[TokenId]>,
    /// Alternatives per prompt token, if logprobs of the prompt are requested.
    prompt_logprobs: Option<usize>,
    /// Per choice, how many token ids were sent; empty if none are requested.
    sent_ids: Vec<usize>,
}

impl ChatFormat {
    fn new(app: &App, parsed: &ParsedRequest<()>, in_flight: &InFlight) -> ChatFormat {
        let request = &parsed.request;
        let options = request.stream_options;
        let id = ids::random("chatcmpl-");
        ChatFormat {
            _control: app.controls().register(&id, in_flight.reasoning_handles()),
            id,
            created: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            model: parsed.model_name(app),
            fingerprint: app.fingerprint().to_owned(),
            n: request.sampling.n,
            include_usage: options.include_usage || app.config().always_usage,
            running_usage: options.continuous_usage_stats,
            progress: request.return_progress,
            timings: request.timings_per_token,
            details: request.thinking.opted_in(),
            logprobs: request.logprobs.is_some(),
            reasoning_field: app.config().reasoning_field,
            echo: request.echoed().map(str::to_owned),
            prompt_ids: Arc::clone(&parsed.prompt.ids),
            prompt_logprobs: request.tokens.prompt_logprobs,
            sent_ids: if request.tokens.return_token_ids {
                vec![0; request.sampling.n]
            } else {
                Vec::new()
            },
        }
    }

    /// Ids of the prompt's tokens, if requested.
    fn prompt_token_ids(&self) -> Option<Vec<u32>> {
        let ids = || self.prompt_ids.iter().map(|id| id.0).collect();
        (!self.sent_ids.is_empty()).then(ids)
    }

    /// Ids of a choice's tokens since the last call, if requested.
    fn new_token_ids(&mut self, request: &InFlight, choice: usize) -> Option<Vec<u32>> {
        let sent = self.sent_ids.get_mut(choice)?;
        let all = request.choice(choice).token_ids();
        let new = all.get(*sent..).unwrap_or_default().to_vec();
        *sent = all.len();
        Some(new)
    }

    fn details(&self, request: &InFlight, choice: usize) -> Option<FinishDetails> {
        if !self.details {
            return None;
        }
        let choice = request.choice(choice);
        let (thinking, total) = (choice.summary().reasoning_tokens, choice.n_tokens());
        Some(FinishDetails {
            close_kind: match choice.reasoning_end() {
                ReasoningEnd::Natural => CloseKind::Natural,
                ReasoningEnd::Soft => CloseKind::Soft,
                ReasoningEnd::Hard => CloseKind::Hard,
            },
            degenerate_decode: choice.is_degenerate(),
            thinking_tokens: thinking,
            content_tokens: total.saturating_sub(thinking),
            total_tokens: total,
        })
    }

    /// A chunk with these choices; `usage` and `timings` if requested for every chunk.
    fn chunk(&self, request: &InFlight, choices: Vec<ChunkChoice>) -> ChatChunk<'_> {
        let usage = match (self.running_usage, self.include_usage) {
            (true, _) => UsageField::Counts(request.stats().usage()),
            (false, true) => UsageField::Null,
            (false, false) => UsageField::Absent,
        };
        ChatChunk {
            id: &self.id,
            object: ChatChunk::OBJECT,
            created: self.created,
            model: &self.model,
            system_fingerprint: Some(&self.fingerprint),
            choices,
            usage,
            timings: self.timings.then(|| request.stats().timings()),
            prompt_token_ids: None,
            prompt_progress: None,
        }
    }
}

async fn whole(
    mut request: InFlight,
    format: &ChatFormat,
    tokenizer: &Tokenizer,
) -> Result<Json<ChatCompletion>, ApiError> {
    let whole = dialect::whole(&mut request).await?;
    let choices = whole.choices.into_iter().enumerate();
    let choices = choices.map(|(index, (mut whole, finish_reason))| {
        if let Some(echo) = &format.echo {
            whole.reply.content.insert_str(0, echo);
        }
        let choice = request.choice(index);
        ChatChoice {
            index,
            message: AssistantMessage::new(whole.reply, format.reasoning_field),
            logprobs: format.logprobs.then_some(whole.logprobs),
            finish_reason,
            stop_reason: choice.matched_stop(),
            token_ids: (!format.sent_ids.is_empty()).then(|| choice.token_ids().to_vec()),
            finish_details: format.details(&request, index),
        }
    });
    let (ids, rows) = (&format.prompt_ids, &whole.prompt_logprobs);
    let logprobs = |top| prompt_logprobs::by_token(tokenizer, ids, rows, top);
    Ok(Json(ChatCompletion {
        id: format.id.clone(),
        object: ChatCompletion::OBJECT,
        created: format.created,
        model: format.model.clone(),
        system_fingerprint: Some(format.fingerprint.clone()),
        choices: choices.collect(),
        usage: request.stats().usage(),
        prompt_logprobs: format.prompt_logprobs.map(logprobs),
        prompt_token_ids: format.prompt_token_ids(),
        timings: Some(request.stats().timings()),
    }))
}

impl StreamFormat for ChatFormat {
    const KEEP_ALIVE: KeepAlive = KeepAlive::Comment;

    fn begin(&mut self, out: &mut SseEncoder, request: &InFlight) {
        for index in 0..self.n {
            let opening = ChunkChoice::new(index, Delta::first());
            let mut chunk = self.chunk(request, vec![opening]);
            if index == 0 {
                chunk.prompt_token_ids = self.prompt_token_ids();
            }
            out.data(&chunk);
            if let Some(echo) = &self.echo {
                let delta = Delta {
                    content: Some(echo.clone()),
                    ..Delta::default()
                };
                out.data(&self.chunk(request, vec![ChunkChoice::new(index, delta)]));
            }
        }
    }

    fn event(&mut self, out: &mut SseEncoder, request: &InFlight, event: StreamEvent) {
        match event {
            StreamEvent::Progress { done, total } => {
                if self.progress {
                    // Clients expect a first choice in every chunk.
                    let nothing = ChunkChoice::new(0, Delta::default());
                    let mut chunk = self.chunk(request, vec![nothing]);
                    let elapsed = request.stats().elapsed().as_millis();
                    chunk.prompt_progress = Some(PromptProgress {
                        total,
                        cache: request.stats().cached_tokens,
                        processed: done,
                        time_ms: u64::try_from(elapsed).unwrap_or(u64::MAX),
                    });
                    out.data(&chunk);
                }
            }
            StreamEvent::PromptLogprobs(_) => {}
            StreamEvent::Parts { choice, parts } => {
                for part in parts {
                    let logprobs = request.choice(choice).chat_logprobs(&part);
                    let delta = Delta::new(part.delta, self.reasoning_field);
                    let mut of = ChunkChoice::new(choice, delta);
                    of.logprobs = logprobs;
                    of.token_ids = self.new_token_ids(request, choice);
                    out.data(&self.chunk(request, vec![of]));
                }
            }
            StreamEvent::End { choice, reason } => {
                let mut of = ChunkChoice::new(choice, Delta::default());
                of.finish_reason = Some(reason);
                of.stop_reason = Some(request.choice(choice).matched_stop());
                of.token_ids = self.new_token_ids(request, choice);
                of.finish_details = self.details(request, choice);
                let mut chunk = self.chunk(request, vec![of]);
                chunk.timings = Some(request.stats().timings());
                out.data(&chunk);
            }
        }
    }

    fn end(&mut self, out: &mut SseEncoder, request: &InFlight) {
        if self.include_usage {
            let mut last = self.chunk(request, Vec::new());
            last.usage = UsageField::Counts(request.stats().usage());
            last.timings = Some(request.stats().timings());
            out.data(&last);
        }
        out.done();
    }

    fn fail(&mut self, out: &mut SseEncoder, _request: &InFlight, error: &ApiError) {
        out.data(&error.body(Dialect::OpenAi, None));
        out.done();
    }
}
