//! What the server is and how it fares. Nothing here waits on the engine.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chat::Tokenizer;
use contract::TokenId;
use serde_json::{Value, json};

use crate::engine::{Phase, Ready};
use crate::error::ApiError;
use crate::state::App;

const NAME: &str = "hearth";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Liveness: 200 only while requests are taken.
pub(super) async fn health(State(app): State<App>) -> Response {
    let published = app.engine().published();
    let stuck = app
        .engine()
        .turn_age()
        .filter(|age| *age >= app.config().times.stall);
    let (status, body) = match (&published.phase, stuck) {
        (Phase::Ready, None) => return Json(json!({"status": "ok"})).into_response(),
        (Phase::Ready, Some(age)) => (
            "error",
            json!({"detail": format!("one engine step has taken {} s so far", age.as_secs())}),
        ),
        (Phase::Loading, _) => {
            let progress = published
                .progress
                .map(|p| json!({"done_bytes": p.done_bytes, "total_bytes": p.total_bytes}));
            ("loading", json!({"progress": progress}))
        }
        (Phase::Draining | Phase::Stopped, _) => ("draining", json!({})),
        (Phase::Failed(detail), _) => ("error", json!({"detail": &**detail})),
    };
    let mut body = body;
    body["status"] = json!(status);
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    response
}

/// The one model, as a list. Answers while loading too, with less in it.
pub(super) async fn models(State(app): State<App>) -> Json<Value> {
    let entry = entry(&app);
    Json(json!({"object": "list", "data": [entry]}))
}

/// The one model, by its id.
pub(super) async fn model(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id != app.config().model_name {
        return Err(ApiError::ModelNotFound {
            asked: id,
            served: app.config().model_name.clone(),
        });
    }
    Ok(Json(entry(&app)))
}

fn entry(app: &App) -> Value {
    let mut entry = json!({
        "id": app.config().model_name,
        "object": "model",
        "created": app.started_unix(),
        "owned_by": NAME,
    });
    if let Some(ready) = app.engine().ready() {
        let context = ready.info.limits.context;
        let facts = &ready.model.facts;
        for key in ["context_length", "max_context_length", "max_model_len"] {
            entry[key] = json!(context);
        }
        entry["meta"] = json!({
            "n_ctx": context,
            "n_ctx_train": facts.trained_context,
            "n_vocab": facts.vocab,
            "n_params": facts.parameters,
            "size": facts.size_bytes,
        });
    }
    entry
}

/// What is loaded and how it is set up.
pub(super) async fn props(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let ready = app.ready()?;
    let Ready { model, info } = &*ready;
    let (defaults, can) = (&model.defaults, model.template.capabilities());
    let alive = app.engine().phase() == Phase::Ready;
    // Where files lie is for those who hold a key; without keys, everyone may read this page.
    let path = match app.config().api_keys.is_empty() {
        true => None,
        false => model.facts.path.as_deref(),
    };
    Ok(Json(json!({
        "build_info": format!("{NAME} v{VERSION}"),
        "server": {"name": NAME, "version": VERSION},
        "daemon": {"alive": alive},
        "model_alias": app.config().model_name,
        "model_path": path,
        "model": {"arch": model.facts.architecture},
        "total_slots": info.limits.sequences,
        "chat_template": model.template.source(),
        "modalities": {"vision": false, "audio": false},
        "is_sleeping": false,
        "default_generation_settings": {
            "n_ctx": info.limits.context,
            "n_predict": defaults.max_tokens,
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            "top_k": defaults.top_k,
            "min_p": defaults.min_p,
            "repeat_penalty": defaults.repetition_penalty,
            "presence_penalty": defaults.presence_penalty,
        },
        "runtime": {
            "backend": info.device.id,
            "device": info.device.name,
            "features": info.device.features,
            "kv_cache_k": info.kv.k.name(),
            "kv_cache_v": info.kv.v.name(),
            "chunk": info.limits.prefill_chunk,
            "memory_bytes": info.memory.total_bytes(),
        },
        "speculative": {"enabled": info.draft_depth.is_some()},
        "speculative_mode": if info.draft_depth.is_some() { "dflash" } else { "off" },
        "capabilities": {
            "speculative_supported": info.draft_depth.is_some(),
            "tools_supported": can.tools,
            "reasoning_supported": can.thinking_switch || can.opens_reasoning,
        },
        "chat_template_caps": {
            "supports_system_role": can.system,
            "supports_tools": can.tools,
            "supports_tool_responses": can.tool_results,
            "supports_enable_thinking": can.thinking_switch,
            "supports_reasoning_effort": can.effort,
        },
        "eos_token": special(&model.tokenizer, &model.eos),
    })))
}

/// The text of the first of `ids`.
fn special(tokenizer: &Tokenizer, ids: &[TokenId]) -> Option<String> {
    ids.first().map(|id| tokenizer.decode(&[*id]))
}

/// Who is on the device now.
pub(super) async fn slots(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let ready = app.ready()?;
    let published = app.engine().published();
    let stats = &published.stats;
    Ok(Json(json!({
        "total": ready.info.limits.sequences,
        "sequences": stats.sequences,
        "prefilling": stats.prefilling,
        "requests_running": published.running,
        "requests_waiting": app.engine().waiting(),
        "context": ready.info.limits.context,
        "free_context_tokens": stats.free_tokens,
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
    })))
}

/// Prometheus text.
pub(super) async fn metrics(State(app): State<App>) -> Result<Response, ApiError> {
    if !app.config().metrics {
        return Err(ApiError::NotFound {
            message: "metrics are switched off".to_owned(),
        });
    }
    let text = app
        .metrics()
        .render(&app.engine().published(), app.engine().waiting());
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// The program's version.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}
