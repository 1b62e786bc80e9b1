//! Model lists of several protocols.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::status::NAME;
use crate::engine::ModelHandle;
use crate::error::ApiError;
use crate::http::state::App;
use crate::http::{body, model_choice};
use crate::models::{ModelHost, ModelState, ModelStatus};

/// Base instructions in the Codex catalogue; Codex sends its own where it has some.
const CODEX_INSTRUCTIONS: &str = "You are a coding agent that works in the user's terminal. \
Use the tools you are given to read files, run commands and make changes; \
do not guess what a command would print. \
Keep changes small and in the style of the code around them, check them where that is possible, \
and end with a short summary of what was done and what was not.";

/// Reasoning efforts in the catalogue.
const EFFORTS: [(&str, &str); 4] = [
    ("low", "Thinks briefly"),
    ("medium", "Thinks as long as everyday tasks need"),
    ("high", "Thinks long"),
    ("xhigh", "Thinks as long as it takes"),
];

/// `GET /v1/models`: OpenAI's list with Anthropic's keys beside it. Codex, which sends
/// `client_version`, also gets its catalogue. Answers while loading, with fewer fields.
pub(super) async fn models(State(app): State<App>, RawQuery(query): RawQuery) -> Json<Value> {
    let entries = entries(&app);
    let id = |entry: Option<&Value>| entry.map_or(Value::Null, |entry| entry["id"].clone());
    let mut list = json!({
        "object": "list",
        "has_more": false,
        "first_id": id(entries.first()),
        "last_id": id(entries.last()),
        "data": entries,
    });
    let mut asked = query.as_deref().unwrap_or_default().split('&');
    if asked.any(|pair| pair.split('=').next() == Some("client_version")) {
        list["models"] = match app.host() {
            None => json!([catalogue_entry(
                &app.config().model_name,
                app.engine().model()
            )]),
            Some(host) => {
                let models = host.list().into_iter();
                models
                    .map(|model| catalogue_entry(&model.name, model.handle))
                    .collect()
            }
        };
    }
    Json(list)
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(
    State(app): State<App>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    // A name that is not UTF-8 cannot be the model's.
    let Path(id) = id.unwrap_or_else(|_| Path(String::new()));
    let entries = entries(&app);
    let served = || {
        let ids = entries.iter().filter_map(|entry| entry["id"].as_str());
        ids.collect::<Vec<_>>().join(", ")
    };
    match entries.iter().find(|entry| entry["id"] == id) {
        Some(entry) => Ok(Json(entry.clone())),
        None => Err(ApiError::ModelNotFound {
            asked: id,
            served: served(),
        }),
    }
}

/// Why a server of one model cannot load and unload it.
pub(super) const KEEPS_MODEL: &str = "this server keeps its one model loaded; \
start it with --models-dir, --models or --idle-unload";

/// The body of a request to load or unload a model.
#[derive(Deserialize)]
struct ModelRequest {
    model: String,
}

/// `POST /v1/models/load`: loads a model, and returns when it is loaded.
pub(super) async fn load(State(app): State<App>, body: Body) -> Result<Json<Value>, ApiError> {
    let (host, model) = named(&app, body).await?;
    model_choice::acquired(&app, &host, model).await?;
    Ok(Json(json!({"success": true, "model": host.name(model)})))
}

/// `POST /v1/models/unload`: unloads a model when its requests have ended, and returns then.
pub(super) async fn unload(State(app): State<App>, body: Body) -> Result<Json<Value>, ApiError> {
    let (host, model) = named(&app, body).await?;
    host.unload(model).await;
    Ok(Json(json!({"success": true, "model": host.name(model)})))
}

/// The model that a body names.
async fn named(app: &App, body: Body) -> Result<(ModelHost, usize), ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let Some(host) = app.host() else {
        return Err(ApiError::invalid(KEEPS_MODEL));
    };
    let request: ModelRequest = serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid_param("model", format!("model: {error}")))?;
    match host.find_or_look(&request.model).await {
        Some(model) => Ok((host.clone(), model)),
        None => Err(ApiError::ModelNotFound {
            asked: request.model,
            served: model_choice::names(host),
        }),
    }
}

/// Every model of the server.
fn entries(app: &App) -> Vec<Value> {
    let Some(host) = app.host() else {
        return vec![entry(app, &app.config().model_name, app.engine().model())];
    };
    let models = host.list().into_iter();
    models
        .map(|model| {
            let mut entry = entry(app, &model.name, model.handle.clone());
            entry["status"] = status(&model);
            entry
        })
        .collect()
}

/// Where a model of several is.
fn status(model: &ModelStatus) -> Value {
    let (value, progress) = match model.state {
        ModelState::Unloaded => ("unloaded", None),
        ModelState::Loading { percent } => ("loading", Some(percent)),
        ModelState::Loaded => ("loaded", None),
        ModelState::Unloading => ("unloading", None),
    };
    let mut status = json!({"value": value, "requests": model.leases});
    if let Some(percent) = progress {
        status["progress_percent"] = percent.into();
    }
    if let Some(error) = &model.error {
        status["failed"] = true.into();
        status["error"] = (**error).into();
    }
    if let Some(left) = model.expires_in {
        status["expires_in_s"] = left.as_secs().into();
    }
    status
}

fn entry(app: &App, name: &str, model: Option<Arc<ModelHandle>>) -> Value {
    let mut entry = json!({
        "id": name,
        "object": "model",
        "created": app.started_unix(),
        "owned_by": NAME,
        "type": "model",
        "display_name": name,
        "created_at": rfc3339(app.started_unix()),
    });
    if let Some(handle) = model {
        let context = handle.info.limits.context;
        let description = &handle.model.description;
        for key in ["context_length", "max_context_length", "max_model_len"] {
            entry[key] = json!(context);
        }
        entry["meta"] = json!({
            "n_ctx": context,
            "n_ctx_train": description.trained_context,
            "n_vocab": description.vocab,
            "n_params": description.parameters,
            "size": description.size_bytes,
        });
    }
    entry
}

/// Catalogue entry for Codex, which drops the whole catalogue if one field has another type.
fn catalogue_entry(name: &str, handle: Option<Arc<ModelHandle>>) -> Value {
    let can = handle
        .as_ref()
        .map(|handle| handle.model.template.capabilities());
    let thinks = can.is_some_and(|can| can.thinking_switch || can.opens_reasoning);
    let efforts: Vec<Value> = EFFORTS
        .iter()
        .filter(|_| thinks)
        .map(|(effort, description)| json!({"effort": effort, "description": description}))
        .collect();
    let mut entry = json!({
        "slug": name,
        "display_name": name,
        "description": format!("Served by {NAME}"),
        "supported_reasoning_levels": efforts,
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": true,
        "priority": 0,
        "upgrade": null,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": thinks,
        "support_verbosity": false,
        "default_verbosity": null,
        "apply_patch_tool_type": null,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": true,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    });
    if thinks {
        entry["default_reasoning_level"] = json!("medium");
    }
    if let Some(handle) = handle {
        entry["context_window"] = json!(handle.info.limits.context);
    }
    entry
}

/// A Unix time in RFC 3339, in UTC; times after the year 9999 are clamped.
pub(super) fn rfc3339(unix: u64) -> String {
    let seconds = i64::try_from(unix).unwrap_or(i64::MAX);
    let clamped = seconds.min(Timestamp::MAX.as_second());
    Timestamp::from_second(clamped)
        .expect("the seconds are in range")
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_format_as_rfc3339() {
        for (unix, written) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (u64::MAX, "9999-12-30T22:00:00Z"),
        ] {
            assert_eq!(rfc3339(unix), written);
        }
    }
}
