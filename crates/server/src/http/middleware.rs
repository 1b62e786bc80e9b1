//! Middleware of every request: request id, CORS, API key, panic handler, metrics.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use tracing::Instrument;

use crate::error::{ApiError, Dialect};
use crate::http::state::App;
use crate::ids;

const REQUEST_ID: &str = "x-request-id";
/// Name of the same header in Anthropic's protocol.
const ANTHROPIC_REQUEST_ID: &str = "request-id";
/// Longer client ids are replaced.
const MAX_REQUEST_ID: usize = 128;
const SERVER: &str = concat!("hearth/", env!("CARGO_PKG_VERSION"));

/// API keys, kept as hashes: comparing hashes takes constant time.
#[derive(Debug, Clone, Default)]
pub struct ApiKeys {
    hashes: Vec<blake3::Hash>,
}

impl ApiKeys {
    /// Accepts any of these keys; an empty list disables the check.
    pub fn new(keys: &[String]) -> ApiKeys {
        ApiKeys {
            hashes: keys.iter().map(|k| blake3::hash(k.as_bytes())).collect(),
        }
    }

    /// Whether requests need a key.
    pub fn is_required(&self) -> bool {
        !self.hashes.is_empty()
    }

    /// Checks `Authorization: Bearer K` or `x-api-key: K`.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.hashes.is_empty() {
            return Ok(());
        }
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().split_first_chunk::<7>())
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "))
            .map(|(_, key)| key.trim_ascii());
        let plain = headers.get("x-api-key").map(HeaderValue::as_bytes);
        let mut presented = false;
        for key in bearer.into_iter().chain(plain) {
            presented = true;
            let hash = blake3::hash(key);
            // No early exit: timing must not show which key matched.
            if self
                .hashes
                .iter()
                .fold(false, |any, known| any | (*known == hash))
            {
                return Ok(());
            }
        }
        let message = if presented {
            "the API key is not one this server knows"
        } else {
            "this server needs an API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        };
        Err(ApiError::Unauthorized {
            message: message.to_owned(),
        })
    }
}

/// Request id, for routes that return it in a body.
#[derive(Debug, Clone)]
pub struct RequestId(pub String);

/// Outermost middleware layer.
pub async fn request_middleware(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let begun = Instant::now();
    let id = request_id(request.headers());
    let dialect = dialect(&request);
    request.extensions_mut().insert(RequestId(id.clone()));
    let route = match request.extensions().get::<MatchedPath>() {
        Some(path) => path.as_str().to_owned(),
        None => "none".to_owned(),
    };
    let method = request.method().clone();
    let allowed_origin = app.access().allowed_origin(request.headers());
    let mut response = if method == Method::OPTIONS {
        StatusCode::NO_CONTENT.into_response()
    } else if let Err(error) = authorize(&app, &request, &route) {
        error.into_response()
    } else {
        let span = tracing::info_span!("request", id, endpoint = route);
        let answer = next.run(request).instrument(span);
        match AssertUnwindSafe(answer).catch_unwind().await {
            Ok(response) => response,
            Err(_) => {
                tracing::error!(request = %id, route, "a route panicked");
                ApiError::internal("the server met a defect while answering; see its log")
                    .into_response()
            }
        }
    };
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        // The router's `Allow` header holds for every dialect.
        let allowed = response.headers_mut().remove(header::ALLOW);
        response = error.respond(dialect, Some(&id));
        if let Some(allowed) = allowed {
            response.headers_mut().insert(header::ALLOW, allowed);
        }
    }
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        if dialect == Dialect::Anthropic {
            headers.insert(ANTHROPIC_REQUEST_ID, value.clone());
        }
        headers.insert(REQUEST_ID, value);
    }
    headers.insert(header::SERVER, HeaderValue::from_static(SERVER));
    if let Some(origin) = allowed_origin {
        cross_origin(headers, origin, method == Method::OPTIONS);
    }
    app.metrics().http_request(&route, response.status());
    tracing::debug!(
        request = %id,
        %method,
        route,
        status = response.status().as_u16(),
        ms = begun.elapsed().as_secs_f64() * 1e3,
        "request answered"
    );
    response
}

/// Dialect of an error: from the path, or on shared paths from the `anthropic-version` header.
pub(super) fn dialect(request: &Request) -> Dialect {
    let mut parts = request
        .uri()
        .path()
        .split('/')
        .filter(|part| !part.is_empty());
    let first = parts.find(|part| *part != "v1");
    if first == Some("messages") || request.headers().contains_key("anthropic-version") {
        Dialect::Anthropic
    } else if first == Some("api") && !matches!(parts.next(), Some("v0" | "v1")) {
        Dialect::Ollama
    } else {
        Dialect::OpenAi
    }
}

/// Routes for everyone: they need no key and no known host. The pages hold no data; a browser that
/// opens one cannot send a key.
const OPEN_ROUTES: [&str; 5] = ["/", "/status", "/health", "/v1/health", "/v1/v1/health"];

/// Open routes need nothing; every other request needs a key if keys are configured, and otherwise
/// a host and an origin that the access policy allows.
fn authorize(app: &App, request: &Request, route: &str) -> Result<(), ApiError> {
    // `route` is the router's own text: no spelling of another path equals an open route.
    if OPEN_ROUTES.contains(&route) {
        return Ok(());
    }
    let headers = request.headers();
    let keys = app.keys();
    if keys.is_required() {
        return keys.check(headers);
    }
    app.access().check(request.method(), request.uri(), headers)
}

fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID)
        .map_or_else(|| ids::random("req_"), str::to_owned)
}

fn cross_origin(headers: &mut HeaderMap, origin: HeaderValue, preflight: bool) {
    if origin != "*" {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(
        header::ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static("x-request-id, retry-after"),
    );
    if preflight {
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, POST, DELETE, OPTIONS"),
        );
        // Browsers require `authorization` by name; the wildcard does not cover it.
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("*, authorization"),
        );
        // Chromium asks for it before a public page may reach a private address.
        headers.insert(
            HeaderName::from_static("access-control-allow-private-network"),
            HeaderValue::from_static("true"),
        );
        headers.insert(
            header::ACCESS_CONTROL_MAX_AGE,
            HeaderValue::from_static("86400"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &'static str, value: &'static str) -> bool {
        let keys = ApiKeys::new(&["one".to_owned(), "two".to_owned()]);
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        keys.check(&headers).is_ok()
    }

    #[test]
    fn api_key_is_read_from_two_headers_only() {
        assert!(check("authorization", "Bearer one"));
        assert!(check("authorization", "bearer two"));
        assert!(check("x-api-key", "two"));
        assert!(!check("authorization", "one"));
        assert!(!check("authorization", "Basic one"));
        assert!(!check("authorization", "Bearer"));
        assert!(!check("x-api-key", "three"));
        assert!(!check("x-api-key", ""));
        assert!(!check("cookie", "one"));
    }

    #[test]
    fn valid_x_api_key_beside_invalid_bearer_is_accepted() {
        let keys = ApiKeys::new(&["one".to_owned()]);
        let mut headers = HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_static("Bearer x"));
        headers.insert("x-api-key", HeaderValue::from_static("one"));
        assert!(keys.check(&headers).is_ok());
    }

    #[test]
    fn server_without_keys_accepts_all_requests() {
        assert!(ApiKeys::new(&[]).check(&HeaderMap::new()).is_ok());
    }
}
