//! `POST /api/pull`: a model of the hub into the cache, with progress in lines.
//!
//! A pull goes on when its client has gone, and what came stays for the next attempt.

use std::thread;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;

use super::lists;
use crate::error::{ApiError, Dialect};
use crate::http::body;
use crate::http::sse::{self, ClientGone, KeepAlive, SseEncoder, SseWriter};
use crate::http::state::App;
use crate::settings::model_pulls::{ModelPulls, PullPermit, PulledFile};

/// Time between two lines of progress.
const LINE_INTERVAL: Duration = Duration::from_millis(100);

/// What a pull does now.
enum PullState {
    /// The hub is asked for the files.
    Listing,
    /// A file arrives, or is checked.
    File(PulledFile),
    /// The pull has ended.
    Ended(Result<(), ApiError>),
}

/// `POST /api/pull`.
pub(super) async fn pull(State(app): State<App>, body: Body) -> Result<Response, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let request = lists::model_request(&bytes)?;
    let streams = match request.fields.get("stream") {
        None | Some(Value::Null | Value::Bool(true)) => true,
        Some(Value::Bool(false)) => false,
        Some(_) => {
            return Err(ApiError::invalid_param(
                "stream",
                "stream: must be a boolean",
            ));
        }
    };
    let name = request
        .model
        .strip_suffix(":latest")
        .unwrap_or(&request.model);
    let name = name.to_owned();
    let states = if lists::is_served(&app, &name) {
        watch::channel(PullState::Ended(Ok(()))).1
    } else {
        match &app.config().pulls {
            ModelPulls::Allowed(puller) => start(puller.begin()?, name.clone())?,
            ModelPulls::Refused(why) => {
                return Err(ApiError::Forbidden {
                    message: format!("{name} is not served here, and {why}"),
                });
            }
        }
    };
    if streams {
        let timeouts = app.config().timeouts;
        return Ok(sse::response(timeouts, KeepAlive::Space, move |lines| {
            stream_lines(lines, states, app, name)
        }));
    }
    ended(states).await?;
    Ok(Json(json!({"status": "success"})).into_response())
}

/// Pulls on a thread of its own, which the end of the process may interrupt at any time.
fn start(permit: PullPermit, name: String) -> Result<watch::Receiver<PullState>, ApiError> {
    let (states, receiver) = watch::channel(PullState::Listing);
    let pull = move || {
        tracing::info!("pulling {name}, which a client asked for");
        let report = |file| drop(states.send_replace(PullState::File(file)));
        let result = permit.pull(&name, &report);
        match &result {
            Ok(()) => tracing::info!("{name} is pulled"),
            Err(error) => tracing::warn!("{name} is not pulled: {error}"),
        }
        drop(permit);
        drop(states.send_replace(PullState::Ended(result)));
    };
    let thread = thread::Builder::new().name("pull".to_owned()).spawn(pull);
    thread.map_err(|error| ApiError::internal(format!("no thread for the pull: {error}")))?;
    Ok(receiver)
}

/// Waits for the end.
async fn ended(mut states: watch::Receiver<PullState>) -> Result<(), ApiError> {
    let is_ended = |state: &PullState| matches!(state, PullState::Ended(_));
    let state = states.wait_for(is_ended).await;
    match state.as_deref() {
        Ok(PullState::Ended(Ok(()))) => Ok(()),
        Ok(PullState::Ended(Err(error))) => Err(error.clone()),
        // Only a panic ends the thread without a result.
        Ok(_) | Err(_) => Err(ApiError::internal("the pull ended without a result")),
    }
}

async fn stream_lines(
    mut out: SseWriter,
    mut states: watch::Receiver<PullState>,
    app: App,
    name: String,
) -> Result<(), ClientGone> {
    let mut lines = SseEncoder::default();
    lines.line(&json!({"status": "pulling manifest"}));
    loop {
        let is_ended = match &*states.borrow_and_update() {
            PullState::Listing => false,
            PullState::File(file) => {
                lines.line(&progress(file));
                false
            }
            PullState::Ended(_) => true,
        };
        if is_ended {
            break;
        }
        out.send_encoded(&mut lines).await?;
        sleep(LINE_INTERVAL).await;
        if out.keep_alive_while(states.changed()).await?.is_err() {
            break;
        }
    }
    match ended(states).await {
        Ok(()) => {
            if !lists::is_served_after_a_look(&app, &name).await {
                let hint = "is in the cache, but not served; start the server with --models";
                lines.line(&json!({"status": format!("{name} {hint}")}));
            }
            lines.line(&json!({"status": "success"}));
        }
        Err(error) => lines.line(&error.body(Dialect::Ollama, None)),
    }
    out.send_encoded(&mut lines).await
}

/// The line of a file.
fn progress(file: &PulledFile) -> Value {
    let action = if file.is_checking {
        "verifying"
    } else {
        "pulling"
    };
    let mut line = json!({
        "status": format!("{action} {}", file.name),
        "total": file.total_bytes,
        "completed": file.done_bytes,
    });
    if let Some(digest) = &file.digest {
        line["digest"] = json!(digest);
    }
    line
}
