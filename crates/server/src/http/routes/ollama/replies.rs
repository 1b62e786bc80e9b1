//! `POST /api/chat` and `POST /api/generate`.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use chat::ollama::request::{OllamaFields, OllamaTask, chat_request, generate_request};
use chat::ollama::response::{DoneReason, OllamaEnding};
use chat::ollama::stream::{OllamaRoute, OllamaWriter};
use chat::reply::{FinishReason, TokenLogprob};
use serde::Deserialize;
use serde_json::Value;

use super::completion;
use super::ending::{context_note, ending, now};
use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::dialect::{self, Parse, ParsedRequest, StreamFormat};
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::model_choice::{LoadTime, Selected};
use crate::http::routes::models::KEEPS_MODEL;
use crate::http::sse::{KeepAlive, SseEncoder};
use crate::http::state::App;
use crate::http::stream_error::ErrorFormat;
use crate::settings::keep_alive;

/// `POST /api/chat`.
pub(super) async fn chat(
    Selected(app): Selected,
    load: LoadTime,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    match task(&bytes, OllamaTask::of_chat).await? {
        OllamaTask::Load => load_or_unload(&app, &bytes, OllamaRoute::Chat, load).await,
        OllamaTask::Chat | OllamaTask::Completion => {
            let format = (OllamaRoute::Chat, load);
            reply(&app, &headers, bytes, chat_request, format).await
        }
    }
}

/// `POST /api/generate`.
pub(super) async fn generate(
    Selected(app): Selected,
    load: LoadTime,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    match task(&bytes, OllamaTask::of_generate).await? {
        OllamaTask::Load => load_or_unload(&app, &bytes, OllamaRoute::Generate, load).await,
        OllamaTask::Chat => {
            let format = (OllamaRoute::Generate, load);
            reply(&app, &headers, bytes, generate_request, format).await
        }
        OllamaTask::Completion => completion::completion(&app, bytes, load).await,
    }
}

async fn task(
    bytes: &Bytes,
    of: fn(&[u8]) -> Result<OllamaTask, chat::ChatError>,
) -> Result<OllamaTask, ApiError> {
    let body = bytes.clone();
    body::run_sized(bytes.len(), move |_| Ok(of(&body)?)).await
}

async fn reply(
    app: &App,
    headers: &HeaderMap,
    bytes: Bytes,
    parse: Parse<OllamaFields>,
    (route, load): (OllamaRoute, LoadTime),
) -> Result<Response, ApiError> {
    let mut parsed = ParsedRequest::read(app, headers, Body::from(bytes), parse).await?;
    let context = parsed.context();
    if let Some(note) = context_note(parsed.own, context) {
        parsed.note(note);
    }
    let format = OllamaFormat {
        writer: OllamaWriter::new(parsed.model_name(app), route),
        load,
        reason: FinishReason::Stop,
    };
    if parsed.request.stream {
        let errors = ErrorFormat::new(Dialect::Ollama);
        return dialect::stream(app, parsed, errors, |_, _, _| format).await;
    }
    let mut request = parsed.start(app).await?;
    let whole = dialect::whole(&mut request).await?;
    let (reply, reason) = match whole.choices.into_iter().next() {
        Some(choice) => choice,
        None => return Err(ApiError::internal("the reply has no choice")),
    };
    let ending = ending(reason, request.stats(), load);
    let logprobs = reply.logprobs.content;
    let whole = format.writer.whole(reply.reply, logprobs, ending, &now());
    Ok(parsed.with_notes(Json(whole).into_response()))
}

/// What of a body concerns a load.
#[derive(Deserialize)]
struct LoadRequest {
    model: Option<String>,
    #[serde(default)]
    keep_alive: Value,
}

/// A body with nothing to reply to: the model is loaded, or unloaded if it is kept for no time.
async fn load_or_unload(
    app: &App,
    bytes: &[u8],
    route: OllamaRoute,
    load: LoadTime,
) -> Result<Response, ApiError> {
    let request: LoadRequest = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid_param("model", format!("model: {error}")))?;
    let unloads = keep_alive::of_json(&request.keep_alive) == Ok(Some(Duration::ZERO));
    let done_reason = match app.host() {
        Some(host) if unloads => {
            let model = request.model.as_deref().and_then(|name| host.find(name));
            host.unload(model.unwrap_or(0)).await;
            DoneReason::Unload
        }
        None if unloads => return Err(ApiError::invalid(KEEPS_MODEL)),
        _ => {
            app.model()?;
            DoneReason::Load
        }
    };
    let name = request.model.unwrap_or_else(|| app.model_name().to_owned());
    let ending = OllamaEnding {
        done_reason,
        total_duration: load.0,
        load_duration: load.0,
        prompt_eval_count: 0,
        prompt_eval_duration: Duration::ZERO,
        eval_count: 0,
        eval_duration: Duration::ZERO,
    };
    let mut lines = OllamaWriter::new(name, route).finish(ending, &now());
    Ok(Json(lines.pop()).into_response())
}

/// Lines of one reply.
struct OllamaFormat {
    writer: OllamaWriter,
    load: LoadTime,
    reason: FinishReason,
}

impl StreamFormat for OllamaFormat {
    const KEEP_ALIVE: KeepAlive = KeepAlive::Space;

    fn begin(&mut self, _out: &mut SseEncoder, _request: &InFlight) {}

    fn event(&mut self, out: &mut SseEncoder, request: &InFlight, event: StreamEvent) {
        match event {
            StreamEvent::Parts { choice, parts } => {
                let now = now();
                for part in parts {
                    let logprobs = request.choice(choice).chat_logprobs(&part);
                    let logprobs: Vec<TokenLogprob> = logprobs
                        .map(|logprobs| logprobs.content)
                        .unwrap_or_default();
                    for line in self.writer.push(part.delta, logprobs, &now) {
                        out.line(&line);
                    }
                }
            }
            StreamEvent::End { reason, .. } => self.reason = reason,
            StreamEvent::Progress { .. } | StreamEvent::PromptLogprobs(_) => {}
        }
    }

    fn end(&mut self, out: &mut SseEncoder, request: &InFlight) {
        let ending = ending(self.reason, request.stats(), self.load);
        for line in self.writer.finish(ending, &now()) {
            out.line(&line);
        }
    }

    fn fail(&mut self, out: &mut SseEncoder, _request: &InFlight, error: &ApiError) {
        out.line(&error.body(Dialect::Ollama, None));
    }
}
