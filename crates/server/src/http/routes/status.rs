//! Health, version and metrics. Never waits on the engine.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::EnginePhase;
use crate::error::ApiError;
use crate::http::state::App;

pub(super) const NAME: &str = "hearth";
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Liveness: 200 only while requests are admitted.
pub(super) async fn health(State(app): State<App>) -> Response {
    let engine_status = app.engine().status();
    let (phase, step_age) = match app.host() {
        None => (engine_status.phase.clone(), app.engine().step_age()),
        // A model that loads or was lost concerns its own requests.
        Some(host) if host.is_draining() => (EnginePhase::Draining, None),
        Some(host) => (EnginePhase::Ready, host.step_age()),
    };
    let stuck = step_age.filter(|age| *age >= app.config().timeouts.stall);
    let (status, body) = match (&phase, stuck) {
        (EnginePhase::Ready, None) => return Json(json!({"status": "ok"})).into_response(),
        (EnginePhase::Ready, Some(age)) => (
            "error",
            json!({"detail": format!("one engine step has taken {} s so far", age.as_secs())}),
        ),
        (EnginePhase::Loading, _) => {
            let progress = engine_status
                .progress
                .map(|p| json!({"done_bytes": p.done_bytes, "total_bytes": p.total_bytes}));
            ("loading", json!({"progress": progress}))
        }
        (EnginePhase::Draining | EnginePhase::Stopped, _) => ("draining", json!({})),
        (EnginePhase::Failed(detail), _) => ("error", json!({"detail": &**detail})),
    };
    let mut body = body;
    body["status"] = json!(status);
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    response
}

/// Prometheus text.
pub(super) async fn metrics(State(app): State<App>) -> Result<Response, ApiError> {
    if !app.config().metrics {
        return Err(ApiError::NotFound {
            message: "metrics are switched off".to_owned(),
        });
    }
    let text = match app.host() {
        None => app
            .metrics()
            .render(&app.engine().status(), app.engine().waiting()),
        Some(host) => {
            let totals = host.totals();
            app.metrics().render(&totals, totals.waiting)
        }
    };
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// The program's version.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}
