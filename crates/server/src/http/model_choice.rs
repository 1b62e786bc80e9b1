//! The model of a request, where the server has several: chosen by the body's `model`, and loaded
//! if need be while the request waits.
//!
//! A stream that waits begins at once with comments that name the progress of the load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::Value;
use tracing::Instrument;

use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::middleware::dialect;
use crate::http::sse::{self, ClientGone, KeepAlive, SseWriter};
use crate::http::state::App;
use crate::http::stream_error::ErrorFormat;
use crate::models::{Lease, LeaseError, ModelHost, ModelState};
use crate::settings::keep_alive;

/// The last parts of the paths of requests that need a model.
const NEEDS_MODEL: [&str; 13] = [
    "/completions",
    "/completion",
    "/infill",
    "/api/chat",
    "/api/generate",
    "/responses",
    "/messages",
    "/input_tokens",
    "/compact",
    "/count_tokens",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];

/// The server's state, with the engine of the request's model.
pub struct Selected(pub App);

impl FromRequestParts<App> for Selected {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Selected, Self::Rejection> {
        let lease = parts.extensions.get::<Arc<Lease>>().cloned();
        Ok(Selected(match lease {
            Some(lease) => app.with_lease(lease),
            None => app.clone(),
        }))
    }
}

/// How long the request waited for its model to be loaded.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadTime(pub Duration);

impl FromRequestParts<App> for LoadTime {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(
        parts: &mut Parts,
        _app: &App,
    ) -> Result<LoadTime, Self::Rejection> {
        Ok(parts.extensions.get().copied().unwrap_or_default())
    }
}

/// What of a body concerns the choice of the model. Wrong types are the route's to refuse.
#[derive(Debug, Default, PartialEq, Deserialize)]
struct ModelChoice {
    #[serde(default)]
    model: Value,
    #[serde(default)]
    stream: Value,
    #[serde(default)]
    keep_alive: Value,
    /// Of Ollama's protocol: without a prompt or messages, the request only loads or unloads.
    #[serde(default)]
    prompt: Value,
    #[serde(default)]
    messages: Value,
}

impl ModelChoice {
    /// Whether a request in Ollama's protocol only unloads the model.
    fn unloads(&self) -> bool {
        let is_empty = |value: &Value| match value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            _ => false,
        };
        is_empty(&self.prompt)
            && is_empty(&self.messages)
            && keep_alive::of_json(&self.keep_alive) == Ok(Some(Duration::ZERO))
    }
}

/// Takes a lease on the request's model before the route runs.
pub async fn choose_model(State(app): State<App>, request: Request, next: Next) -> Response {
    let Some(host) = app.host().cloned() else {
        return next.run(request).await;
    };
    if request.method() != Method::POST || !needs_model(request.uri().path()) {
        return next.run(request).await;
    }
    let is_ollama = dialect(&request) == Dialect::Ollama;
    match chosen(&app, &host, request).await {
        Ok((request, choice, _)) if is_ollama && choice.unloads() => next.run(request).await,
        Ok((request, choice, model)) => {
            if let Some(lease) = host.try_acquire(model) {
                return next.run(with_lease(request, lease, Duration::ZERO)).await;
            }
            // A stream is the default of Ollama's protocol.
            let streams_by_default = is_ollama && choice.stream.is_null();
            if streams_by_default || choice.stream == Value::Bool(true) {
                return stream_while_loading(&app, host, model, request, next);
            }
            let begun = Instant::now();
            match acquired(&app, &host, model).await {
                Ok(lease) => next.run(with_lease(request, lease, begun.elapsed())).await,
                Err(error) => error.into_response(),
            }
        }
        Err(error) => error.into_response(),
    }
}

fn needs_model(path: &str) -> bool {
    NEEDS_MODEL.iter().any(|end| path.ends_with(end))
}

/// The request with its body read, and the index of its model.
async fn chosen(
    app: &App,
    host: &ModelHost,
    request: Request,
) -> Result<(Request, ModelChoice, usize), ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    // The route says what is wrong with a body.
    let choice: ModelChoice = serde_json::from_slice(&bytes).unwrap_or_default();
    let model = match choice.model.as_str() {
        None => 0,
        Some(name) => match host.find_or_look(name).await {
            Some(model) => model,
            None if app.config().strict_model => {
                return Err(ApiError::ModelNotFound {
                    asked: name.to_owned(),
                    served: names(host),
                });
            }
            None => 0,
        },
    };
    let idle = match &choice.keep_alive {
        Value::Null => host.default_idle(),
        time => keep_alive::of_json(time)
            .map_err(|reason| ApiError::invalid_param("keep_alive", reason))?,
    };
    host.keep_alive(model, idle);
    Ok((Request::from_parts(parts, Body::from(bytes)), choice, model))
}

/// The ids of all models, for an error.
pub(super) fn names(host: &ModelHost) -> String {
    let models = host.list().into_iter();
    models
        .map(|model| model.name)
        .collect::<Vec<_>>()
        .join(", ")
}

fn with_lease(mut request: Request, lease: Lease, waited: Duration) -> Request {
    request.extensions_mut().insert(Arc::new(lease));
    request.extensions_mut().insert(LoadTime(waited));
    request
}

/// The lease, after the wait for a load; limited by the queue timeout.
pub(super) async fn acquired(app: &App, host: &ModelHost, model: usize) -> Result<Lease, ApiError> {
    let wait = host.acquire(model);
    let lease = match app.config().timeouts.queue {
        None => wait.await,
        Some(after) => tokio::time::timeout(after, wait).await.map_err(|_| {
            let seconds = after.as_secs_f64();
            ApiError::unavailable(format!(
                "the request waited {seconds} s for its model and was given up"
            ))
        })?,
    };
    lease.map_err(|error| match error {
        LeaseError::NotLoaded(_) => ApiError::internal(format!("{}: {error}", host.name(model))),
        LeaseError::Draining => ApiError::unavailable(error.to_string()),
    })
}

/// A stream that begins before its model is loaded, and goes on as the route's stream.
fn stream_while_loading(
    app: &App,
    host: ModelHost,
    model: usize,
    request: Request,
    next: Next,
) -> Response {
    let errors = ErrorFormat::of(&request);
    let keep_alive = match errors.dialect {
        Dialect::Anthropic => KeepAlive::Ping,
        Dialect::OpenAi => KeepAlive::Comment,
        Dialect::Ollama => KeepAlive::Space,
    };
    let begun = Instant::now();
    let app = app.clone();
    let timeouts = app.config().timeouts;
    let span = tracing::Span::current();
    sse::response(timeouts, keep_alive, move |mut writer| {
        async move {
            let wait = acquired(&app, &host, model);
            let waited = writer.comment_while(wait, || load_comment(&host, model));
            match waited.await? {
                Ok(lease) => {
                    let answer = next.run(with_lease(request, lease, begun.elapsed()));
                    let response = writer.keep_alive_while(answer).await?;
                    forward(&mut writer, response, &errors).await
                }
                Err(error) => writer.send(errors.bytes(&error)).await,
            }
        }
        .instrument(span)
    })
}

/// What a stream says of the load that it waits for.
fn load_comment(host: &ModelHost, model: usize) -> String {
    let state = host.list().get(model).map(|model| model.state);
    match state {
        Some(ModelState::Loading { percent }) => {
            format!("loading {} {percent} %", host.name(model))
        }
        _ => format!("waiting for {}", host.name(model)),
    }
}

/// Sends the route's stream on, or its error as an event.
async fn forward(
    writer: &mut SseWriter,
    response: Response,
    errors: &ErrorFormat,
) -> Result<(), ClientGone> {
    if let Some(error) = response.extensions().get::<ApiError>() {
        return writer.send(errors.bytes(error)).await;
    }
    let mut parts = response.into_body().into_data_stream();
    while let Some(part) = writer.keep_alive_while(parts.next()).await? {
        match part {
            Ok(part) => writer.send(part).await?,
            // The route's own streams cannot fail.
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}
