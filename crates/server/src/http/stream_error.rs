//! Errors in streams that have begun before their request has.

use axum::extract::Request;
use bytes::Bytes;

use crate::error::{ApiError, Dialect};
use crate::http::middleware::{RequestId, dialect};
use crate::http::sse::SseEncoder;

/// How an error stands in a stream that has begun.
pub struct ErrorFormat {
    pub(super) dialect: Dialect,
    /// The stream of Responses, whose errors are events of their own.
    is_responses: bool,
    request_id: Option<String>,
}

impl ErrorFormat {
    /// Errors of a dialect's streams.
    pub fn new(dialect: Dialect) -> ErrorFormat {
        ErrorFormat {
            dialect,
            is_responses: false,
            request_id: None,
        }
    }

    /// Errors of the streams of Responses.
    pub fn responses() -> ErrorFormat {
        ErrorFormat {
            is_responses: true,
            ..ErrorFormat::new(Dialect::OpenAi)
        }
    }

    /// With the id of the request.
    #[must_use]
    pub fn with_id(mut self, id: &RequestId) -> ErrorFormat {
        self.request_id = Some(id.0.clone());
        self
    }

    /// Errors of the stream that answers a request.
    pub(super) fn of(request: &Request) -> ErrorFormat {
        let id = request.extensions().get::<RequestId>();
        ErrorFormat {
            dialect: dialect(request),
            is_responses: request.uri().path().contains("/responses"),
            request_id: id.map(|id| id.0.clone()),
        }
    }

    /// The events of an error, the last of their stream.
    pub fn bytes(&self, error: &ApiError) -> Bytes {
        let mut out = SseEncoder::default();
        let mut body = error.body(self.dialect, self.request_id.as_deref());
        if self.is_responses {
            let mut event = body["error"].take();
            event["type"] = "error".into();
            event["sequence_number"] = 0.into();
            out.event("error", &event);
        } else if self.dialect == Dialect::Anthropic {
            out.event("error", &body);
        } else if self.dialect == Dialect::Ollama {
            out.line(&body);
        } else {
            out.data(&body);
            out.done();
        }
        out.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http;

    fn check(path: &str, header: Option<&str>, expected: &str) {
        let mut request = http::Request::post(path);
        if let Some(header) = header {
            request = request.header(header, "1");
        }
        let format = ErrorFormat::of(&request.body(Body::empty()).unwrap());
        let bytes = format.bytes(&ApiError::internal("no"));
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        assert!(text.starts_with(expected), "{path}: {text}");
        assert!(text.contains("\"no\""), "{path}: {text}");
    }

    #[test]
    fn errors_in_a_stream_have_the_form_of_their_dialect() {
        check("/v1/chat/completions", None, "data: {\"error\":{");
        check(
            "/v1/messages",
            None,
            "event: error\ndata: {\"type\":\"error\",\"error\":{",
        );
        check("/v1/responses", None, "event: error\ndata: {");
        check("/v1/messages", Some("anthropic-version"), "event: error\n");
        check("/api/chat", None, "{\"error\":\"no\"}\n");
    }
}
