//! OpenAI Responses.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use chat::reply::FinishReason;
use chat::responses::response::ResponseObject;
use chat::responses::stored::{StateFields, listed_items, with_history};
use chat::responses::stream::{OutputItemStream, ResponsesEvent};
use chat::responses::{CompactRequest, ResponsesRequest};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::http::body;
use crate::http::dialect::{self, ParsedRequest, StreamFormat};
use crate::http::in_flight::{InFlight, StreamEvent};
use crate::http::model_choice::Selected;
use crate::http::sse::{KeepAlive, SseEncoder};
use crate::http::state::App;
use crate::http::stream_error::ErrorFormat;
use crate::ids;
use crate::kept_responses::{KeptResponse, ResponseStore};
use crate::text::reply::Part;

/// `POST /v1/responses`.
pub(super) async fn responses(
    Selected(app): Selected,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (body, state) = resolved(&app, body).await?;
    let mut parsed = ParsedRequest::read(&app, &headers, body, ResponsesRequest::from_json).await?;
    if parsed.request.stream {
        let format = |app: &App, parsed: &ParsedRequest<ResponsesRequest>, _: &InFlight| {
            ResponsesFormat::new(app, parsed, state)
        };
        return dialect::stream(&app, parsed, ErrorFormat::responses(), format).await;
    }
    let mut request = parsed.start(&app).await?;
    let mut format = ResponsesFormat::new(&app, &parsed, state);
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
    format.keep(&whole);
    Ok(parsed.with_notes(Json(whole).into_response()))
}

/// The body with the turns and items that it refers to in its input, and what of it concerns them.
async fn resolved(app: &App, body: Body) -> Result<(Body, StateFields), ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let store = app.config().responses.clone();
    if !store.is_on() {
        return Ok((Body::from(bytes), StateFields::default()));
    }
    let own = bytes.clone();
    let state = body::run_sized(bytes.len(), move |_| Ok(StateFields::read(&own))).await?;
    if state.previous.is_none() && !state.has_references {
        return Ok((Body::from(bytes), state));
    }
    let previous = state.previous.clone();
    let whole = body::run_long(move || {
        let turns = match &previous {
            None => Vec::new(),
            Some(id) => store.history(id).map_err(|id| unknown(&id))?,
        };
        Ok(with_history(&bytes, &turns, |id| store.item(id))?)
    });
    Ok((Body::from(Bytes::from(whole.await?)), state))
}

fn unknown(id: &str) -> ApiError {
    let field = "previous_response_id";
    let message =
        format!("{field}: no response {id:?} is kept here; send the whole conversation as input");
    ApiError::invalid_param(field, message)
}

/// The kept response with this id.
async fn kept(app: &App, id: String) -> Result<Arc<KeptResponse>, ApiError> {
    let store = app.config().responses.clone();
    body::run_long(move || {
        let found = store.get(&id);
        found.ok_or_else(|| not_kept(&id))
    })
    .await
}

fn not_kept(id: &str) -> ApiError {
    let message = format!("no response {id:?} is kept here; it may have made way for others");
    ApiError::NotFound { message }
}

/// `GET /v1/responses/{id}`: a kept response.
pub(super) async fn retrieve(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let found = kept(&app, id).await?;
    let response = serde_json::from_str(&found.response);
    response
        .map(Json)
        .map_err(|error| ApiError::internal(error.to_string()))
}

/// `GET /v1/responses/{id}/input_items`: the input of a kept response, the last item first.
pub(super) async fn input_items(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let found = kept(&app, id).await?;
    let tail = found.id.trim_start_matches("resp_");
    let mut items = listed_items(&found.input, |index| format!("msg_{tail}_{index}"));
    items.reverse();
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id(items.first()), id(items.last()));
    Ok(Json(json!({
        "object": "list", "data": items, "first_id": first, "last_id": last, "has_more": false,
    })))
}

/// `DELETE /v1/responses/{id}`: forgets a kept response.
pub(super) async fn forget(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let store = app.config().responses.clone();
    let own = id.clone();
    let was_kept = body::run_long(move || Ok(store.forget(&own))).await?;
    if was_kept {
        Ok(Json(
            json!({"id": id, "object": "response", "deleted": true}),
        ))
    } else {
        Err(not_kept(&id))
    }
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
    let (body, _) = resolved(&app, body).await?;
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
    let (body, _) = resolved(&app, body).await?;
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
    /// Where the response is kept, and what with; `None` once it is, or if it is not to be.
    keeper: Option<(ResponseStore, StateFields)>,
}

impl ResponsesFormat {
    fn new(
        app: &App,
        parsed: &ParsedRequest<ResponsesRequest>,
        state: StateFields,
    ) -> ResponsesFormat {
        let (own, defaults) = (&parsed.own, parsed.defaults());
        let echo = own
            .echo
            .clone()
            .with_state(state.previous.as_deref(), state.store);
        ResponsesFormat {
            answer: ResponseObject {
                id: ids::random("resp_"),
                created_at: seconds_now(),
                model: parsed.model_name(app),
                echo: echo.with_defaults(
                    defaults.temperature,
                    defaults.top_p,
                    defaults.presence_penalty,
                ),
            },
            items: OutputItemStream::new(own.names.clone(), own.summary, ids::random("")),
            reason: FinishReason::Stop,
            keeper: state.store.then(|| (app.config().responses.clone(), state)),
        }
    }

    /// Keeps the response, if it is to be.
    fn keep(&mut self, whole: &Value) {
        if let Some((store, state)) = self.keeper.take() {
            store.keep(KeptResponse {
                id: self.answer.id.clone(),
                previous: state.previous,
                input: state.input,
                output: whole["output"].to_string(),
                response: whole.to_string(),
            });
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
        // Before the client knows the id.
        self.keep(&whole);
        self.tell(out, name, whole);
    }

    fn fail(&mut self, out: &mut SseEncoder, _request: &InFlight, error: &ApiError) {
        let code = error.code().unwrap_or("server_error");
        let message = error.to_string();
        let failed = self.answer.failed(self.items.done(), code, &message);
        self.tell(out, "response.failed", failed);
    }
}
