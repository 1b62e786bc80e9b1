//! Ollama's protocol below `/api`: replies as lines of JSON, and lists of the models.

mod completion;
mod ending;
mod lists;
mod pull;
mod replies;

use axum::routing::{MethodRouter, get, post};

use crate::http::state::App;

/// Every path and its handler. They are served here only, not below `/v1`.
pub(super) fn routes() -> [(&'static str, MethodRouter<App>); 7] {
    [
        ("/api/version", get(lists::version)),
        ("/api/tags", get(lists::tags)),
        ("/api/ps", get(lists::ps)),
        ("/api/show", post(lists::show)),
        ("/api/pull", post(pull::pull)),
        ("/api/chat", post(replies::chat)),
        ("/api/generate", post(replies::generate)),
    ]
}
