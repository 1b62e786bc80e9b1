//! Which models there are, what they can, and which are loaded.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};

use super::ending::timestamp;
use crate::engine::ModelHandle;
use crate::error::ApiError;
use crate::http::body;
use crate::http::routes::models::rfc3339;
use crate::http::routes::status::VERSION;
use crate::http::state::App;

/// The version of Ollama whose protocol this is; clients compare it with the one that they need.
const LEVEL: &str = "0.12.6";

/// A model of the server.
struct Listed {
    name: String,
    /// If it is loaded.
    handle: Option<Arc<ModelHandle>>,
    /// When it is unloaded if it stays idle; `None` for never.
    expires: Option<Timestamp>,
}

impl Listed {
    fn is_named(&self, asked: &str) -> bool {
        let plain = asked.strip_suffix(":latest").unwrap_or(asked);
        self.name.eq_ignore_ascii_case(asked) || self.name.eq_ignore_ascii_case(plain)
    }
}

/// A body that names a model.
pub(super) struct ModelRequest {
    pub(super) model: String,
    pub(super) fields: Map<String, Value>,
}

/// Reads a body that names a model.
pub(super) fn model_request(bytes: &[u8]) -> Result<ModelRequest, ApiError> {
    let fields: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid(format!("the body is not a JSON object: {error}")))?;
    let model = fields.get("model").or_else(|| fields.get("name"));
    match model.and_then(Value::as_str).map(str::to_owned) {
        Some(model) if !model.is_empty() => Ok(ModelRequest { model, fields }),
        _ => Err(ApiError::invalid_param("model", "model: is missing")),
    }
}

/// Whether a model of this name is served.
pub(super) fn is_served(app: &App, name: &str) -> bool {
    listed(app).iter().any(|model| model.is_named(name))
}

/// As [`is_served`], of a model that may have come a moment ago.
pub(super) async fn is_served_after_a_look(app: &App, name: &str) -> bool {
    if let Some(host) = app.host() {
        host.find_or_look(name).await;
    }
    is_served(app, name)
}

fn listed(app: &App) -> Vec<Listed> {
    let Some(host) = app.host() else {
        return vec![Listed {
            name: app.config().model_name.clone(),
            handle: app.engine().model(),
            expires: None,
        }];
    };
    let expires = |left| {
        let left = SignedDuration::try_from(left).ok()?;
        timestamp().checked_add(left).ok()
    };
    let models = host.list().into_iter();
    models
        .map(|model| Listed {
            name: model.name,
            handle: model.handle,
            expires: model.expires_in.and_then(expires),
        })
        .collect()
}

/// `GET /api/version`.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": LEVEL, "hearth": VERSION}))
}

/// `GET /api/tags`.
pub(super) async fn tags(State(app): State<App>) -> Json<Value> {
    let models = listed(&app).into_iter().map(|model| {
        let mut entry = entry(&model);
        entry["modified_at"] = json!(rfc3339(app.started_unix()));
        entry
    });
    Json(json!({"models": models.collect::<Vec<_>>()}))
}

/// `GET /api/ps`.
pub(super) async fn ps(State(app): State<App>) -> Json<Value> {
    let models = listed(&app).into_iter().filter_map(|model| {
        let info = &model.handle.as_ref()?.info;
        let memory = info.memory.total_bytes();
        let mut entry = entry(&model);
        entry["size"] = json!(memory);
        entry["size_vram"] = json!(if info.device.is_cpu() { 0 } else { memory });
        entry["context_length"] = json!(info.limits.context);
        let expires = model.expires.unwrap_or(Timestamp::MAX);
        entry["expires_at"] = json!(expires.to_string());
        Some(entry)
    });
    Json(json!({"models": models.collect::<Vec<_>>()}))
}

/// `POST /api/show`.
pub(super) async fn show(State(app): State<App>, body: Body) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(body, app.config().body_limit_bytes).await?;
    let asked = model_request(&bytes)?.model;
    let models = listed(&app);
    let Some(model) = models.iter().find(|model| model.is_named(&asked)) else {
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        return Err(ApiError::ModelNotFound {
            asked,
            served: names.join(", "),
        });
    };
    let mut shown = json!({
        "modelfile": format!("FROM {}\n", model.name),
        "parameters": "",
        "template": "",
        "details": details(model.handle.as_deref()),
        "model_info": {"general.basename": model.name},
        "capabilities": ["completion"],
        "modified_at": rfc3339(app.started_unix()),
    });
    if let Some(handle) = &model.handle {
        describe(handle, &mut shown);
    }
    Ok(Json(shown))
}

/// Adds what only a loaded model shows.
fn describe(handle: &ModelHandle, shown: &mut Value) {
    let (model, defaults) = (&handle.model, &handle.model.defaults);
    let description = &model.description;
    let can = model.template.capabilities();
    let parameters = [
        ("temperature", defaults.temperature.to_string()),
        ("top_k", defaults.top_k.to_string()),
        ("top_p", defaults.top_p.to_string()),
        ("min_p", defaults.min_p.to_string()),
        ("repeat_penalty", defaults.repetition_penalty.to_string()),
        ("num_ctx", handle.info.limits.context.to_string()),
    ];
    let lines = parameters.map(|(name, value)| format!("{name:<30} {value}"));
    shown["parameters"] = json!(lines.join("\n"));
    shown["template"] = json!(model.template.source());
    let architecture = &description.architecture;
    let info = &mut shown["model_info"];
    info["general.architecture"] = json!(architecture);
    info["general.parameter_count"] = json!(description.parameters);
    // The context that requests can use; clients size their prompts by it.
    info[format!("{architecture}.context_length")] = json!(handle.info.limits.context);
    info[format!("{architecture}.vocab_size")] = json!(description.vocab);
    let abilities = [
        ("tools", can.tools),
        ("thinking", can.thinking_switch || can.opens_reasoning),
        ("insert", model.tokenizer.fim().is_some()),
    ];
    let abilities = abilities.into_iter().filter(|(_, has)| *has);
    let abilities = abilities.map(|(name, _)| name);
    shown["capabilities"] = std::iter::once("completion").chain(abilities).collect();
}

/// What lists show of a model.
fn entry(model: &Listed) -> Value {
    let size = model
        .handle
        .as_ref()
        .map_or(0, |handle| handle.model.description.size_bytes);
    // Clients only compare it.
    let digest = blake3::hash(format!("{} {size}", model.name).as_bytes());
    json!({
        "name": model.name,
        "model": model.name,
        "size": size,
        "digest": digest.to_hex().to_string(),
        "details": details(model.handle.as_deref()),
    })
}

fn details(handle: Option<&ModelHandle>) -> Value {
    let description = handle.map(|handle| &handle.model.description);
    let family = description.map_or("", |description| description.architecture.as_str());
    let parameters = description.map_or(0, |description| description.parameters);
    // Only a loaded model's file is known.
    let quantization = description.map_or("unknown", |description| &description.quantization);
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": count(parameters),
        "quantization_level": quantization,
    })
}

/// A number of parameters in Ollama's form: `7.6B`, `494.0M`.
fn count(parameters: u64) -> String {
    let number = parameters as f64;
    match parameters {
        0..1_000 => parameters.to_string(),
        1_000..1_000_000 => format!("{:.1}K", number / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", number / 1e6),
        _ => format!("{:.1}B", number / 1e9),
    }
}
