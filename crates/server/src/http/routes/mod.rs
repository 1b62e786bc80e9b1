//! Routes. Each path is served as `/v1/X`, `/X` and `/v1/v1/X`, since clients often join base URLs
//! wrongly.

mod chat;
mod completions;
mod llama_completion;
mod messages;
mod models;
mod ollama;
mod openapi;
mod page;
mod props;
mod responses;
mod slots;
mod status;
mod text;

use axum::Router;
use axum::extract::Request;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, get, post};

use crate::error::ApiError;
use crate::http::middleware;
use crate::http::model_choice;
use crate::http::state::App;

/// Paths of other protocols that clients probe; they get a clear error. The first that fits counts.
const NOT_OURS: [(&str, &str); 11] = [
    (
        "slots/",
        "slots are not saved; prompts are kept by --kv-cache-dir",
    ),
    ("embedding", "this server makes no embeddings"),
    ("rerank", "this server does not rank documents"),
    ("images/", "this server makes no images"),
    ("audio/", "this server does not handle audio"),
    ("moderations", "this server does not moderate"),
    (
        "api/v0/",
        "this server does not speak LM Studio's protocol; use /v1",
    ),
    (
        "api/v1/",
        "this server does not speak LM Studio's protocol; use /v1",
    ),
    ("api/embed", "this server makes no embeddings"),
    (
        "api/delete",
        "models are not deleted by requests; use the command hearth rm",
    ),
    (
        "api/",
        "of Ollama's protocol this server has chat, generate, pull, tags, show, ps and version",
    ),
];

/// Every path below `/v1` and its handler.
fn routes() -> [(&'static str, MethodRouter<App>); 31] {
    [
        ("/health", get(status::health)),
        ("/models", get(models::models)),
        ("/models/load", post(models::load)),
        ("/models/unload", post(models::unload)),
        ("/models/{*id}", get(models::model)),
        ("/props", get(props::props)),
        ("/slots", get(slots::slots)),
        ("/slots/summary", get(slots::summary)),
        ("/status", get(slots::status_page)),
        ("/status/json", get(slots::snapshot)),
        ("/status/events", get(slots::events)),
        ("/metrics", get(status::metrics)),
        ("/version", get(status::version)),
        ("/openapi.json", get(openapi::openapi)),
        ("/chat/completions", post(chat::completions)),
        ("/chat/completions/input_tokens", post(chat::input_tokens)),
        ("/chat/completions/control", post(chat::control)),
        ("/completions", post(completions::completions)),
        ("/completion", post(llama_completion::completion)),
        ("/infill", post(llama_completion::infill)),
        ("/responses", post(responses::responses)),
        ("/responses/input_tokens", post(responses::input_tokens)),
        ("/responses/compact", post(responses::compact)),
        (
            "/responses/{id}",
            get(responses::retrieve).delete(responses::forget),
        ),
        ("/responses/{id}/input_items", get(responses::input_items)),
        ("/messages", post(messages::messages)),
        ("/messages/count_tokens", post(messages::count_tokens)),
        ("/tokenize", post(text::tokenize)),
        ("/detokenize", post(text::detokenize)),
        ("/tokenizer_info", get(text::tokenizer_info)),
        ("/apply-template", post(text::apply_template)),
    ]
}

/// Every path in its canonical form.
fn paths() -> impl Iterator<Item = String> {
    let below_v1 = routes().into_iter().map(|(path, _)| format!("/v1{path}"));
    let ollama = ollama::routes().into_iter();
    below_v1.chain(ollama.map(|(path, _)| path.to_owned()))
}

/// Router with all routes and middleware.
pub fn router(app: App) -> Router {
    let mut router = Router::new()
        .route("/", get(page::root))
        .route("/v1", get(status::health));
    for (path, method) in routes() {
        for base in ["", "/v1", "/v1/v1"] {
            router = router.route(&format!("{base}{path}"), method.clone());
        }
    }
    for (path, method) in ollama::routes() {
        router = router.route(path, method);
    }
    router
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), model_choice::choose_model))
        .layer(from_fn_with_state(
            app.clone(),
            middleware::request_middleware,
        ))
        .with_state(app)
}

async fn not_found(request: Request) -> ApiError {
    let path = request.uri().path();
    let tail = path.trim_start_matches("/v1").trim_start_matches('/');
    let message = match NOT_OURS.iter().find(|(known, _)| tail.starts_with(known)) {
        Some((_, why)) => format!("{path}: {why}"),
        None => format!("nothing is served at {path}"),
    };
    ApiError::NotFound { message }
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::MethodNotAllowed {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
    }
}
