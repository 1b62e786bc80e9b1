//! Root: a chat page for browsers, health for everyone else.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};

use super::status;
use crate::http::state::App;

const PAGE: &str = include_str!("../page/index.html");

/// The page is self-contained and connects to this server only.
pub(super) const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// `GET /`.
pub(super) async fn root(state: State<App>, headers: HeaderMap) -> Response {
    let mut kinds = headers.get_all(header::ACCEPT).iter();
    if !kinds.any(|kinds| {
        kinds
            .to_str()
            .is_ok_and(|kinds| kinds.contains("text/html"))
    }) {
        return status::health(state).await;
    }
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::VARY, "accept"),
    ];
    (headers, PAGE).into_response()
}
