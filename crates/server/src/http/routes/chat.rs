//! Chat completions.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use chat::ChatError;
use chat::openai::request::{ControlAction, ControlRequest, chat_request};
use chat::openai::response::{ChatChoice, ChatCompletion, CloseKind, FinishDetails};
use chat::openai::stream::{ChatChunk, ChunkChoice, Delta, PromptProgress, UsageField};
use chat::request::ChatRequest;
use decode::ReasoningEnd;
use serde_json::{Value, json};

use crate::engine::control::Listed;
use crate::engine::in_flight::{News, Run};
use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::dialect::{self, Talk, Voice};
use crate::http::sse::{Encoder, Silence};
use crate::http::state::App;
use crate::ids;

/// `POST /v1/chat/completions`.
pub(super) async fn completions(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let talk = Talk::read(&app, &headers, body, parse).await?;
    let run = talk.start(&app).await?;
    let envelope = Envelope::new(&app, &talk, &run);
    if talk.request.stream {
        return Ok(dialect::stream(&app, run, envelope));
    }
    whole(run, &envelope).await.map(IntoResponse::into_response)
}

/// `POST /v1/chat/completions/input_tokens`: how long the prompt would be.
pub(super) async fn input_tokens(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let talk = Talk::read(&app, &headers, body, parse).await?;
    Ok(Json(json!({
        "object": "response.input_tokens",
        "input_tokens": talk.prompt.ids.len(),
    })))
}

/// `POST /v1/chat/completions/control`: a word to an answer that is under way.
pub(super) async fn control(State(app): State<App>, body: Body) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let order = ControlRequest::from_json(&bytes)?;
    let ControlAction::ReasoningEnd = order.action;
    if !app.live().close_thinking(&order.id) {
        let message = format!("id: no answer {:?} is under way", order.id);
        return Err(ApiError::NotFound { message });
    }
    Ok(Json(json!({"id": order.id, "success": true})))
}

fn parse(bytes: &[u8]) -> Result<(ChatRequest, ()), ChatError> {
    Ok((chat_request(bytes)?, ()))
}

/// What is the same on all events of one answer.
struct Envelope {
    /// Lets the answer be controlled while it lasts.
    _listed: Listed,
    id: String,
    created: i64,
    model: String,
    n: usize,
    include_usage: bool,
    running_usage: bool,
    progress: bool,
    timings: bool,
    details: bool,
    logprobs: bool,
}

impl Envelope {
    fn new(app: &App, talk: &Talk<()>, run: &Run) -> Envelope {
        let request = &talk.request;
        let options = request.stream_options;
        let id = ids::random("chatcmpl-");
        Envelope {
            _listed: app.live().list(&id, run.reins()),
            id,
            created: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            model: talk.model_name(app),
            n: request.sampling.n,
            include_usage: options.include_usage || app.config().always_usage,
            running_usage: options.continuous_usage_stats,
            progress: request.return_progress,
            timings: request.timings_per_token,
            details: request.thinking.opted_in(),
            logprobs: request.logprobs.is_some(),
        }
    }

    fn details(&self, run: &Run, choice: usize) -> Option<FinishDetails> {
        if !self.details {
            return None;
        }
        let choice = run.choice(choice);
        let (thinking, total) = (choice.summary().reasoning_tokens, choice.n_tokens());
        Some(FinishDetails {
            close_kind: match choice.close() {
                ReasoningEnd::Natural => CloseKind::Natural,
                ReasoningEnd::Soft => CloseKind::Soft,
                ReasoningEnd::Hard => CloseKind::Hard,
            },
            degenerate_decode: choice.went_round(),
            thinking_tokens: thinking,
            content_tokens: total.saturating_sub(thinking),
            total_tokens: total,
        })
    }

    /// An event with these choices; `usage` and `timings` as the request wants them on every event.
    fn chunk(&self, run: &Run, choices: Vec<ChunkChoice>) -> ChatChunk<'_> {
        let usage = match (self.running_usage, self.include_usage) {
            (true, _) => UsageField::Counts(run.meter().usage()),
            (false, true) => UsageField::Null,
            (false, false) => UsageField::Absent,
        };
        ChatChunk {
            id: &self.id,
            object: ChatChunk::OBJECT,
            created: self.created,
            model: &self.model,
            system_fingerprint: None,
            choices,
            usage,
            timings: self.timings.then(|| run.meter().timings()),
            prompt_progress: None,
        }
    }
}

async fn whole(mut run: Run, envelope: &Envelope) -> Result<Json<ChatCompletion>, ApiError> {
    let whole = dialect::whole(&mut run).await?;
    let choices = whole.into_iter().enumerate();
    let choices = choices.map(|(index, (whole, finish_reason))| ChatChoice {
        index,
        message: whole.reply.into(),
        logprobs: envelope.logprobs.then_some(whole.logprobs),
        finish_reason,
        finish_details: envelope.details(&run, index),
    });
    Ok(Json(ChatCompletion {
        id: envelope.id.clone(),
        object: ChatCompletion::OBJECT,
        created: envelope.created,
        model: envelope.model.clone(),
        system_fingerprint: None,
        choices: choices.collect(),
        usage: run.meter().usage(),
        timings: Some(run.meter().timings()),
    }))
}

impl Voice for Envelope {
    const SILENCE: Silence = Silence::Comment;

    fn begin(&mut self, out: &mut Encoder, run: &Run) {
        for index in 0..self.n {
            let opening = ChunkChoice::new(index, Delta::first());
            out.data(&self.chunk(run, vec![opening]));
        }
    }

    fn news(&mut self, out: &mut Encoder, run: &Run, news: News) {
        match news {
            News::Progress { done, total } => {
                if self.progress {
                    // An empty part, since clients look at the first choice of every event.
                    let nothing = ChunkChoice::new(0, Delta::default());
                    let mut chunk = self.chunk(run, vec![nothing]);
                    let elapsed = run.meter().elapsed().as_millis();
                    chunk.prompt_progress = Some(PromptProgress {
                        total,
                        cache: run.meter().cached_tokens,
                        processed: done,
                        time_ms: u64::try_from(elapsed).unwrap_or(u64::MAX),
                    });
                    out.data(&chunk);
                }
            }
            News::PromptLogprobs(_) => {}
            News::Parts { choice, parts } => {
                for part in parts {
                    let logprobs = run.choice(choice).chat_logprobs(&part);
                    let mut of = ChunkChoice::new(choice, part.piece.into());
                    of.logprobs = logprobs;
                    out.data(&self.chunk(run, vec![of]));
                }
            }
            News::End { choice, reason } => {
                let mut of = ChunkChoice::new(choice, Delta::default());
                of.finish_reason = Some(reason);
                of.finish_details = self.details(run, choice);
                let mut chunk = self.chunk(run, vec![of]);
                chunk.timings = Some(run.meter().timings());
                out.data(&chunk);
            }
        }
    }

    fn end(&mut self, out: &mut Encoder, run: &Run) {
        if self.include_usage {
            let mut last = self.chunk(run, Vec::new());
            last.usage = UsageField::Counts(run.meter().usage());
            last.timings = Some(run.meter().timings());
            out.data(&last);
        }
        out.done();
    }

    fn fail(&mut self, out: &mut Encoder, _run: &Run, error: &ApiError) {
        out.data(&error.body(Dialect::OpenAi, None));
        out.done();
    }
}
