//! The pages for browsers: the chat page at the root, where every other client gets health, and
//! the status page.
//!
//! Each page is one file with its script and style inside, built from `crates/server/page`. Its
//! policy names both by hash and lets it connect to this server only.

use std::sync::LazyLock;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::status;
use crate::http::state::App;

/// A page that is part of the executable.
pub(super) struct WebPage {
    html: &'static str,
    policy: &'static str,
    /// Entity tag: a browser that has this version gets no body.
    tag: LazyLock<String>,
}

/// The tag of a page's content, in quotes.
fn tag(html: &str) -> String {
    format!("\"{}\"", &blake3::hash(html.as_bytes()).to_hex()[..32])
}

static CHAT: WebPage = WebPage {
    html: include_str!("../page/index.html"),
    policy: include_str!("../page/index.csp"),
    tag: LazyLock::new(|| tag(include_str!("../page/index.html"))),
};

pub(super) static STATUS: WebPage = WebPage {
    html: include_str!("../page/status.html"),
    policy: include_str!("../page/status.csp"),
    tag: LazyLock::new(|| tag(include_str!("../page/status.html"))),
};

impl WebPage {
    /// The page, or 304 if the request's `If-None-Match` has its tag.
    pub(super) fn respond(&self, request: &HeaderMap) -> Response {
        let tag = self.tag.as_str();
        let headers = [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, self.policy.trim()),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            // Kept, but asked for again: a new version of the server has a new page.
            (header::CACHE_CONTROL, "no-cache"),
            (header::ETAG, tag),
        ];
        let known = request.get_all(header::IF_NONE_MATCH);
        if known.iter().any(|tags| has_tag(tags, tag)) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        (headers, self.html).into_response()
    }
}

/// Whether a list of tags has `tag`; the comparison is weak, as for every `If-None-Match`.
fn has_tag(tags: &HeaderValue, tag: &str) -> bool {
    let Ok(tags) = tags.to_str() else {
        return false;
    };
    tags.split(',').any(|known| {
        let known = known.trim();
        known == "*" || known.strip_prefix("W/").unwrap_or(known) == tag
    })
}

/// `GET /`.
pub(super) async fn root(state: State<App>, headers: HeaderMap) -> Response {
    let mut kinds = headers.get_all(header::ACCEPT).iter();
    let is_browser = kinds.any(|kinds| {
        kinds
            .to_str()
            .is_ok_and(|kinds| kinds.contains("text/html"))
    });
    let mut response = if is_browser {
        CHAT.respond(&headers)
    } else {
        status::health(state).await
    };
    // What is at the root depends on who asks.
    response
        .headers_mut()
        .append(header::VARY, HeaderValue::from_static("accept"));
    response
}
