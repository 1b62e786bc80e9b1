//! OpenAI Responses.

use axum::Json;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use chat::reply::FinishReason;
use chat::responses::response::ResponseObject;
use chat::responses::stream::{OutputItemStream, ResponsesEvent};
use chat::responses::{CompactRequest, ResponsesRequest};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::http::dialect::{self, ParsedRequest, StreamFormat};
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::model_choice::Selected;
use crate::http::sse::{KeepAlive, SseEncoder};
use crate::http::state::App;
use crate::ids;
use crate::text::reply::Part;

/// `POST /v1/responses`.
pub(super) async fn responses(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut parsed = ParsedRequest::read(&app, &headers, body, ResponsesRequest::from_json).await?;
    let mut request = parsed.start(&app).await?;
    let mut format = ResponsesFormat::new(&app, &parsed);
    if parsed.request.stream {
        return Ok(parsed.with_notes(dialect::stream(&app, request, format)));
    }
    while let Some(events) = request.next().await? {
        for event in events {
            format.take(&request, event);
        }
    }
    let hit_token_limit = format.hit_token_limit();
    format.items.finish(hit_token_limit);
    let took = (request.stats().usage(), request.stats().timings());
    let whole = format
        .answer
        .completed(hit_token_limit, format.items.done(), took, seconds_now());
    Ok(parsed.with_notes(Json(whole).into_response()))
}

/// Seconds since 1970-01-01 UTC.
fn seconds_now() -> i64 {
    i64::try_from(ids::unix_now()).unwrap_or(i64::MAX)
}

/// `POST /v1/responses/input_tokens`: prompt length in tokens.
pub(super) async fn input_tokens(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let parsed = ParsedRequest::read(&app, &headers, body, ResponsesRequest::from_json).await?;
    Ok(Json(json!({
        "object": "response.input_tokens",
        "input_tokens": parsed.prompt.ids.len(),
    })))
}

/// `POST /v1/responses/compact`: the conversation as its latest messages and a summary.
pub(super) async fn compact(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut parsed = ParsedRequest::read(&app, &headers, body, CompactRequest::from_json).await?;
    let mut request = parsed.start(&app).await?;
    let whole = dialect::whole(&mut request).await?;
    let (summary, reason) = match whole.choices.into_iter().next() {
        Some((reply, reason)) => (reply.reply.content, reason),
        None => (String::new(), FinishReason::Stop),
    };
    let summary = summary.trim();
    if summary.is_empty() {
        return Err(ApiError::internal(
            "the model wrote no summary; send the request again, or a shorter conversation",
        ));
    }
    if reason == FinishReason::Length {
        parsed.note("the summary was cut at its token limit".to_owned());
    }
    let usage = request.stats().usage();
    let own = &parsed.own;
    let whole = own.response(&ids::random(""), summary, seconds_now(), usage);
    Ok(parsed.with_notes(Json(whole).into_response()))
}

/// Stream of one response.
struct ResponsesFormat {
    answer: ResponseObject,
    items: OutputItemStream,
    reason: FinishReason,
}

impl ResponsesFormat {
    fn new(app: &App, parsed: &ParsedRequest<ResponsesRequest>) -> ResponsesFormat {
        let (own, defaults) = (&parsed.own, parsed.defaults());
        ResponsesFormat {
            answer: ResponseObject {
                id: ids::random("resp_"),
                created_at: seconds_now(),
                model: parsed.model_name(app),
                echo: own.echo.clone().with_defaults(
                    defaults.temperature,
                    defaults.top_p,
                    defaults.presence_penalty,
                ),
            },
            items: OutputItemStream::new(own.names.clone(), own.summary, ids::random("")),
            reason: FinishReason::Stop,
        }
    }

    /// Protocol events of a stream event.
    fn take(&mut self, request: &InFlight, event: StreamEvent) -> Vec<ResponsesEvent> {
        match event {
            StreamEvent::Parts { choice, parts } => {
                let choice = request.choice(choice);
                let logprobs =
                    |part: &Part| choice.chat_logprobs(part).map(|logprobs| logprobs.content);
                let parts = parts.into_iter().map(|part| (logprobs(&part), part.delta));
                let events = parts.flat_map(|(logprobs, piece)| {
                    self.items.push_with(piece, logprobs.unwrap_or_default())
                });
                events.collect()
            }
            StreamEvent::End { reason, .. } => {
                self.reason = reason;
                Vec::new()
            }
            StreamEvent::Progress { .. } | StreamEvent::PromptLogprobs(_) => Vec::new(),
        }
    }

    fn hit_token_limit(&self) -> bool {
        self.reason == FinishReason::Length
    }

    /// Emits an event that carries the whole response object.
    fn tell(&mut self, out: &mut SseEncoder, name: &'static str, answer: Value) {
        let event = self.items.next_event(name, json!({ "response": answer }));
        out.event(event.name, &event.data);
    }
}

impl StreamFormat for ResponsesFormat {
    const KEEP_ALIVE: KeepAlive = KeepAlive::Comment;

    fn begin(&mut self, out: &mut SseEncoder, _request: &InFlight) {
        let begun = self.answer.in_progress();
        self.tell(out, "response.created", begun.clone());
        self.tell(out, "response.in_progress", begun);
    }

    fn event(&mut self, out: &mut SseEncoder, request: &InFlight, event: StreamEvent) {
        for event in self.take(request, event) {
            out.event(event.name, &event.data);
        }
    }

    fn end(&mut self, out: &mut SseEncoder, request: &InFlight) {
        let hit_token_limit = self.hit_token_limit();
        for event in self.items.finish(hit_token_limit) {
            out.event(event.name, &event.data);
        }
        let name = if hit_token_limit {
            "response.incomplete"
        } else {
            "response.completed"
        };
        let took = (request.stats().usage(), request.stats().timings());
        let whole = self
            .answer
            .completed(hit_token_limit, self.items.done(), took, seconds_now());
        self.tell(out, name, whole);
    }

    fn fail(&mut self, out: &mut SseEncoder, _request: &InFlight, error: &ApiError) {
        let code = error.code().unwrap_or("server_error");
        let message = error.to_string();
        let failed = self.answer.failed(self.items.done(), code, &message);
        self.tell(out, "response.failed", failed);
    }
}
