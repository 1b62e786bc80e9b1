//! Running and queued requests. Never waits on the engine; never shows text.

use std::collections::HashMap;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::page;
use super::status::{NAME, VERSION};
use crate::compression::PromptCompressor;
use crate::engine::ModelHandle;
use crate::engine::active_requests::RequestEntry;
use crate::engine::request_stats::RequestStage;
use crate::error::ApiError;
use crate::http::state::App;

/// Interval of token events.
const TICK: Duration = Duration::from_millis(250);
/// Interval of status events, in ticks.
const STATUS_TICKS: u32 = 4;
/// Idle time before a comment is sent.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// Channel capacity; a slower watcher is disconnected.
const BEHIND: usize = 64;

/// `GET /slots`, in llama-server's form: an entry for each sequence of the device.
///
/// With `fail_on_no_slot=1`, a full device is an error.
pub(super) async fn slots(
    State(app): State<App>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    app.model()?;
    let slots = slot_list(&app);
    let mut pairs = query.iter().flat_map(|query| query.split('&'));
    let fails = pairs.any(|pair| pair == "fail_on_no_slot=1");
    let is_busy = |slot: &Value| slot["is_processing"] == true;
    if fails && slots.iter().all(is_busy) {
        return Err(ApiError::unavailable("no slot is free"));
    }
    Ok(Json(Value::Array(slots)))
}

/// The sequences of the device; those of running requests come first.
fn slot_list(app: &App) -> Vec<Value> {
    let engine_status = app.engine().status();
    let Some(model) = &engine_status.model else {
        return Vec::new();
    };
    let limits = model.info.limits;
    let entries = app.active_requests().entries();
    let running = entries
        .iter()
        .filter(|entry| entry.stage() != RequestStage::Queue)
        .flat_map(|entry| (0..entry.choices).map(move |_| entry));
    let mut running = running.take(limits.sequences);
    let compressor = model.model.compressor.as_deref();
    let mut scored = compressor.map_or_else(Vec::new, PromptCompressor::active);
    scored.reverse();
    let can_draft = !model.model.description.draft_sources.is_empty();
    let slot = |id: usize| {
        let entry = running.next();
        let mut slot = json!({
            "id": id,
            "n_ctx": limits.context,
            "speculative": can_draft,
            "is_processing": entry.is_some(),
        });
        // A prompt that is scored holds no sequence yet; it is shown where one is free.
        if entry.is_none()
            && let Some(of) = scored.pop()
        {
            slot["scoring"] = json!({"tokens": of.tokens, "done": of.done, "total": of.total});
        }
        let task = entry.map(|entry| task(entry)).and_then(|task| match task {
            Value::Object(task) => Some(task),
            _ => None,
        });
        if let Value::Object(slot) = &mut slot {
            slot.extend(task.into_iter().flatten());
        }
        slot
    };
    (0..limits.sequences).map(slot).collect()
}

/// What a slot shows of the request that holds it.
fn task(entry: &RequestEntry) -> Value {
    let cached = entry.cached_tokens();
    // Counts are kept by request; its choices are about as far as each other.
    let decoded = entry.generated_tokens() / entry.choices.max(1);
    json!({
        "id_task": entry.id,
        "n_prompt_tokens": entry.prompt_tokens,
        "n_prompt_tokens_processed": entry.prefilled_tokens().saturating_sub(cached),
        "n_prompt_tokens_cache": cached,
        "params": entry.settings,
        "next_token": [{
            "has_next_token": true,
            "n_remain": entry.max_tokens.saturating_sub(decoded),
            "n_decoded": decoded,
        }],
    })
}

/// `GET /slots/summary`: who is on the device now, and how full it is.
pub(super) async fn summary(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    app.model()?;
    Ok(Json(now(&app)))
}

/// Current status; without model fields while loading.
fn now(app: &App) -> Value {
    let engine_status = app.engine().status();
    let stats = &engine_status.stats;
    let limits = engine_status.model.as_ref().map(|model| model.info.limits);
    let requests: Vec<Value> = app
        .active_requests()
        .entries()
        .iter()
        .map(|entry| shown(entry))
        .collect();
    json!({
        "total": limits.map(|limits| limits.sequences),
        "context": limits.map(|limits| limits.context),
        "sequences": stats.sequences,
        "prefilling": stats.prefilling,
        "requests_running": engine_status.running,
        "requests_waiting": app.engine().waiting(),
        "pool_tokens": stats.pool_tokens,
        "free_context_tokens": stats.free_tokens,
        "evictable_context_tokens": stats.evictable_tokens,
        "queue_blocked_on_pool": stats.blocked_on_pool,
        "preempted": stats.preempted,
        // The keys of version 0.1.
        "kept_context_tokens": stats.evictable_tokens,
        "pool_waits": stats.blocked_on_pool,
        "parked": stats.preempted,
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "snapshots": stats.prefix.entries,
        "snapshot_bytes": stats.prefix.bytes,
        "scoring": engine_status.model.as_ref().and_then(|model| scoring(model)),
        "requests": requests,
    })
}

/// Prompts that are scored for compression, and how far the current one is.
fn scoring(model: &ModelHandle) -> Option<Value> {
    let scored = model.model.compressor.as_ref()?.active();
    let current = scored.iter().find(|of| of.total > 0);
    let current = current.copied().unwrap_or_default();
    Some(json!({"prompts": scored.len(), "done": current.done, "total": current.total}))
}

fn shown(entry: &RequestEntry) -> Value {
    let state = match entry.stage() {
        RequestStage::Queue => "waiting",
        RequestStage::Prefill => "prefill",
        RequestStage::Decode => "decode",
    };
    json!({
        "id": entry.id,
        "state": state,
        "priority": entry.priority,
        "session": entry.session,
        "choices": entry.choices,
        "prompt_tokens": entry.prompt_tokens,
        "cached_tokens": entry.cached_tokens(),
        "generated_tokens": entry.generated_tokens(),
        "max_tokens": entry.max_tokens,
        "age_s": (entry.age_s() * 10.0).round() / 10.0,
    })
}

/// Fails unless the status page is enabled.
fn open(app: &App) -> Result<(), ApiError> {
    if app.config().status_page {
        Ok(())
    } else {
        Err(ApiError::NotFound {
            message: "the status pages are switched off; start the server with --status-page"
                .to_owned(),
        })
    }
}

/// `GET /status`: a page that follows the events.
pub(super) async fn status_page(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    open(&app)?;
    Ok(page::STATUS.respond(&headers))
}

/// `GET /status/json`.
pub(super) async fn snapshot(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    open(&app)?;
    Ok(Json(status(&app)))
}

fn status(app: &App) -> Value {
    let phase = app.engine().status().phase;
    json!({
        "server": {"name": NAME, "version": VERSION},
        "model": app.config().model_name,
        "phase": format!("{phase:?}").split('(').next().unwrap_or_default().to_lowercase(),
        "started": app.started_unix(),
        "slots": now(app),
    })
}

/// `GET /status/events`: a `status` event each second on change, `token` events in between.
pub(super) async fn events(State(app): State<App>) -> Result<Response, ApiError> {
    open(&app)?;
    let (sender, receiver) = mpsc::channel(BEHIND);
    tokio::spawn(watch(app, sender));
    let stream = futures::stream::unfold(receiver, |mut receiver| async move {
        let bytes: Bytes = receiver.recv().await?;
        Some((Ok::<_, Infallible>(bytes), receiver))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    Ok((headers, Body::from_stream(stream)).into_response())
}

/// Feeds one watcher until it disconnects, lags or the server ends.
async fn watch(app: App, sender: mpsc::Sender<Bytes>) {
    let mut generated: HashMap<u64, usize> = HashMap::new();
    let mut sent = Value::Null;
    let mut last = Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    for tick in 0_u32.. {
        ticks.tick().await;
        let mut text = String::new();
        let entries = app.active_requests().entries();
        generated.retain(|id, _| entries.iter().any(|entry| entry.id == *id));
        for entry in &entries {
            let tokens = entry.generated_tokens();
            let before = generated.insert(entry.id, tokens).unwrap_or(0);
            if tokens > before {
                let data =
                    json!({"id": entry.id, "tokens": tokens - before, "generated_tokens": tokens});
                text += &format!("event: token\ndata: {data}\n\n");
            }
        }
        if tick.is_multiple_of(STATUS_TICKS) {
            let status = status(&app);
            if status != sent {
                text += &format!("event: status\ndata: {status}\n\n");
                sent = status;
            }
        }
        if text.is_empty() && last.elapsed() >= HEARTBEAT {
            text += ": still here\n\n";
        }
        if !text.is_empty() {
            last = Instant::now();
            if sender.try_send(text.into()).is_err() {
                return;
            }
        }
        let ended = matches!(
            app.engine().phase(),
            crate::engine::EnginePhase::Failed(_) | crate::engine::EnginePhase::Stopped
        );
        if ended || sender.is_closed() {
            return;
        }
    }
}
