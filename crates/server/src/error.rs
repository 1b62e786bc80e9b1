//! Errors of requests, and the only place that maps them to HTTP.
//!
//! Every request failure is an [`ApiError`]. Status, type and body depend only on the variant and
//! on the route's [`Dialect`].

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chat::{ChatError, ErrorKind};
use decode::{JobError, SubmitError};
use serde_json::{Value, json};

/// Protocol of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// OpenAI and compatible protocols.
    #[default]
    OpenAi,
    /// Anthropic Messages.
    Anthropic,
    /// Ollama's routes below `/api`.
    Ollama,
}

/// Failure of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// Invalid request; a retry fails again.
    #[error("{message}")]
    Invalid {
        /// What is invalid, where, and what is valid.
        message: String,
        /// Field at fault.
        param: Option<String>,
    },
    /// The prompt fills the context.
    #[error(
        "this model's maximum context length is {limit} tokens, but the prompt has {prompt} tokens; shorten the prompt"
    )]
    ContextLength {
        /// Prompt tokens.
        prompt: usize,
        /// Context length in tokens.
        limit: usize,
    },
    /// Missing or unknown API key.
    #[error("{message}")]
    Unauthorized {
        /// What is missing or unknown.
        message: String,
    },
    /// A host or a web page that may not use a server without a key.
    #[error("{message}")]
    Forbidden {
        /// What is not allowed, and which flag allows it.
        message: String,
    },
    /// A body that is not declared as JSON.
    #[error("the content-type header must be application/json")]
    UnsupportedMediaType,
    /// No route at this path.
    #[error("{message}")]
    NotFound {
        /// What was requested.
        message: String,
    },
    /// The request refers to something that is not kept here.
    #[error("{message}")]
    NotKept {
        /// What is not kept, and what to do.
        message: String,
        /// Field at fault.
        param: Option<String>,
    },
    /// Unknown model name, with `strict_model`.
    #[error("the model '{asked}' does not exist; this server serves '{served}'")]
    ModelNotFound {
        /// The name in the request.
        asked: String,
        /// Name of the loaded model.
        served: String,
    },
    /// Method not allowed at this path.
    #[error("{method} is not allowed at {path}")]
    MethodNotAllowed {
        /// The request's method.
        method: String,
        /// The request's path.
        path: String,
    },
    /// The body arrived too slowly.
    #[error("the request body did not arrive in time: {received_bytes} bytes came; send it faster")]
    BodyTimeout {
        /// Bytes that arrived.
        received_bytes: usize,
    },
    /// The body exceeds the limit.
    #[error("the request body is larger than the limit of {limit_bytes} bytes")]
    TooLarge {
        /// Limit in bytes.
        limit_bytes: usize,
    },
    /// The queue is full.
    #[error("the queue is full: {waiting} requests are waiting; try again later")]
    QueueFull {
        /// Queue length.
        waiting: usize,
    },
    /// Temporarily unavailable.
    #[error("{message}")]
    Unavailable {
        /// Reason.
        message: String,
    },
    /// Internal error.
    #[error("{message}")]
    Internal {
        /// Detail.
        message: String,
    },
}

impl ApiError {
    /// Invalid request without a field.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::Invalid {
            message: message.into(),
            param: None,
        }
    }

    /// Invalid field.
    pub fn invalid_param(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::Invalid {
            message: message.into(),
            param: Some(param.to_owned()),
        }
    }

    /// Temporarily unavailable.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::Unavailable {
            message: message.into(),
        }
    }

    /// Internal error.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::Internal {
            message: message.into(),
        }
    }

    /// HTTP status in `dialect`.
    pub fn status(&self, dialect: Dialect) -> StatusCode {
        match self {
            ApiError::Invalid { .. } | ApiError::ContextLength { .. } => StatusCode::BAD_REQUEST,
            ApiError::Unauthorized { .. } => StatusCode::UNAUTHORIZED,
            ApiError::Forbidden { .. } => StatusCode::FORBIDDEN,
            ApiError::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ApiError::NotFound { .. }
            | ApiError::NotKept { .. }
            | ApiError::ModelNotFound { .. } => StatusCode::NOT_FOUND,
            ApiError::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            ApiError::BodyTimeout { .. } => StatusCode::REQUEST_TIMEOUT,
            ApiError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            ApiError::QueueFull { .. } => match dialect {
                Dialect::OpenAi => StatusCode::TOO_MANY_REQUESTS,
                // Ollama's own status of a full queue.
                Dialect::Ollama => StatusCode::SERVICE_UNAVAILABLE,
                Dialect::Anthropic => overloaded(),
            },
            ApiError::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            ApiError::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Error type string in `dialect`.
    pub fn kind(&self, dialect: Dialect) -> &'static str {
        match (self, dialect) {
            (ApiError::TooLarge { .. }, Dialect::Anthropic) => "request_too_large",
            (
                ApiError::Invalid { .. }
                | ApiError::NotKept { .. }
                | ApiError::ContextLength { .. }
                | ApiError::MethodNotAllowed { .. }
                | ApiError::UnsupportedMediaType
                | ApiError::BodyTimeout { .. }
                | ApiError::TooLarge { .. },
                _,
            ) => "invalid_request_error",
            (ApiError::Unauthorized { .. }, _) => "authentication_error",
            (ApiError::Forbidden { .. }, _) => "permission_error",
            (ApiError::NotFound { .. } | ApiError::ModelNotFound { .. }, _) => "not_found_error",
            (ApiError::QueueFull { .. }, Dialect::OpenAi | Dialect::Ollama) => "rate_limit_error",
            (ApiError::QueueFull { .. }, Dialect::Anthropic) => "overloaded_error",
            (
                ApiError::Unavailable { .. } | ApiError::Internal { .. },
                Dialect::OpenAi | Dialect::Ollama,
            ) => "server_error",
            (ApiError::Unavailable { .. } | ApiError::Internal { .. }, Dialect::Anthropic) => {
                "api_error"
            }
        }
    }

    /// OpenAI's error code, if one applies.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            ApiError::ContextLength { .. } => Some("context_length_exceeded"),
            ApiError::Unauthorized { .. } => Some("invalid_api_key"),
            ApiError::ModelNotFound { .. } => Some("model_not_found"),
            ApiError::QueueFull { .. } => Some("queue_full"),
            ApiError::Unavailable { .. } => Some("unavailable"),
            // The only mistake of this field is an id that is not kept.
            ApiError::Invalid {
                param: Some(param), ..
            } if param == "previous_response_id" => Some("previous_response_not_found"),
            _ => None,
        }
    }

    /// Delay before a retry makes sense, if it does.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            ApiError::QueueFull { .. } => Some(Duration::from_secs(2)),
            ApiError::Unavailable { .. } => Some(Duration::from_secs(5)),
            _ => None,
        }
    }

    /// JSON body in `dialect`; also sent within streams whose headers are out.
    pub fn body(&self, dialect: Dialect, request_id: Option<&str>) -> Value {
        match dialect {
            Dialect::OpenAi => json!({
                "error": {
                    "message": self.to_string(),
                    "type": self.kind(dialect),
                    "param": match self {
                        ApiError::Invalid { param, .. } | ApiError::NotKept { param, .. } => {
                            param.as_deref()
                        }
                        _ => None,
                    },
                    "code": self.code(),
                }
            }),
            Dialect::Ollama => json!({ "error": self.to_string() }),
            Dialect::Anthropic => {
                let message = match self {
                    // Clients match this text and then shorten the conversation.
                    ApiError::ContextLength { prompt, limit } => {
                        format!("prompt is too long: {prompt} tokens > {limit} maximum")
                    }
                    other => other.to_string(),
                };
                json!({
                    "type": "error",
                    "error": { "type": self.kind(dialect), "message": message },
                    "request_id": request_id,
                })
            }
        }
    }

    /// Full response in `dialect`.
    pub fn respond(&self, dialect: Dialect, request_id: Option<&str>) -> Response {
        let body = Json(self.body(dialect, request_id));
        let mut response = (self.status(dialect), body).into_response();
        if let Some(after) = self.retry_after() {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs()));
        }
        if matches!(self, ApiError::Unauthorized { .. }) {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    /// Response in OpenAI's format; the error travels as an extension so that the middleware can
    /// re-render it in the request's dialect.
    fn into_response(self) -> Response {
        let mut response = self.respond(Dialect::OpenAi, None);
        response.extensions_mut().insert(self);
        response
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        match error.kind {
            // A template that fails on every conversation is refused at start. Later failures
            // concern the form of these messages.
            ErrorKind::InvalidRequest
            | ErrorKind::TemplateRefused
            | ErrorKind::TemplateFailed
            | ErrorKind::TemplateLimit => ApiError::Invalid {
                message: error.message,
                param: error.param,
            },
            ErrorKind::NotFound => ApiError::NotKept {
                message: error.message,
                param: error.param,
            },
            ErrorKind::Setup => ApiError::internal(error.message),
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(reject: SubmitError) -> ApiError {
        match reject {
            SubmitError::TooLong {
                prompt_tokens,
                context_tokens,
            } => ApiError::ContextLength {
                prompt: prompt_tokens,
                limit: context_tokens,
            },
            SubmitError::EmptyPrompt => {
                ApiError::invalid_param("prompt", "the prompt has no tokens")
            }
            SubmitError::QueueFull { queued, .. } => ApiError::QueueFull { waiting: queued },
            SubmitError::Invalid { field, .. } => {
                ApiError::invalid_param(field, reject.to_string())
            }
            SubmitError::Duplicate(_) | SubmitError::DeviceLost { .. } => {
                ApiError::internal(reject.to_string())
            }
        }
    }
}

impl From<JobError> for ApiError {
    fn from(failure: JobError) -> ApiError {
        match failure {
            JobError::OutOfMemory { .. } => ApiError::unavailable(failure.to_string()),
            // The client's grammar went over one of the matcher's limits.
            JobError::Constraint { .. } => {
                ApiError::invalid_param("response_format", failure.to_string())
            }
            JobError::DeviceLost { .. }
            | JobError::SequenceLost { .. }
            | JobError::Device { .. } => ApiError::internal(failure.to_string()),
        }
    }
}

/// 529 "overloaded": Anthropic's own status code.
fn overloaded() -> StatusCode {
    StatusCode::from_u16(529).expect("529 lies within the range of status codes")
}

/// Why a server ended, other than by a shutdown request.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model failed to load.
    #[error("{0}")]
    Load(String),
    /// The engine thread or its device failed; a supervisor should restart the process.
    #[error("the engine was lost: {0}")]
    EngineLost(String),
    /// The engine thread failed to start, or the listener failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A second shutdown request.
    #[error("stopped at once by a second signal")]
    Forced,
}

#[cfg(test)]
mod tests {
    use contract::{DeviceError, SeqId, SnapshotId};

    use super::*;

    fn check(error: ApiError, openai: (u16, &str, Option<&str>), anthropic: (u16, &str)) {
        let body = error.body(Dialect::OpenAi, None);
        assert_eq!(error.status(Dialect::OpenAi).as_u16(), openai.0, "{error}");
        assert_eq!(body["error"]["type"], openai.1, "{error}");
        assert_eq!(body["error"]["code"].as_str(), openai.2, "{error}");
        assert!(body["error"]["message"].is_string());
        let body = error.body(Dialect::Anthropic, Some("req-1"));
        assert_eq!(error.status(Dialect::Anthropic).as_u16(), anthropic.0);
        assert_eq!(body["error"]["type"], anthropic.1);
        assert_eq!(body["request_id"], "req-1");
    }

    #[test]
    fn only_a_setup_error_of_the_text_side_is_the_servers() {
        let status = |kind| {
            let message = "x".to_owned();
            let error = ChatError {
                kind,
                message,
                param: None,
            };
            ApiError::from(error).status(Dialect::OpenAi).as_u16()
        };
        for kind in [
            ErrorKind::InvalidRequest,
            ErrorKind::TemplateRefused,
            ErrorKind::TemplateFailed,
            ErrorKind::TemplateLimit,
        ] {
            assert_eq!(status(kind), 400, "{kind:?}");
        }
        assert_eq!(status(ErrorKind::Setup), 500);
    }

    #[test]
    fn errors_have_status_and_type_in_both_dialects() {
        let invalid = "invalid_request_error";
        check(ApiError::invalid("x"), (400, invalid, None), (400, invalid));
        check(
            ApiError::ContextLength {
                prompt: 9,
                limit: 8,
            },
            (400, invalid, Some("context_length_exceeded")),
            (400, invalid),
        );
        check(
            ApiError::Unauthorized {
                message: "x".to_owned(),
            },
            (401, "authentication_error", Some("invalid_api_key")),
            (401, "authentication_error"),
        );
        check(
            ApiError::ModelNotFound {
                asked: "a".to_owned(),
                served: "b".to_owned(),
            },
            (404, "not_found_error", Some("model_not_found")),
            (404, "not_found_error"),
        );
        check(
            ApiError::TooLarge { limit_bytes: 1 },
            (413, invalid, None),
            (413, "request_too_large"),
        );
        check(
            ApiError::QueueFull { waiting: 3 },
            (429, "rate_limit_error", Some("queue_full")),
            (529, "overloaded_error"),
        );
        check(
            ApiError::unavailable("x"),
            (503, "server_error", Some("unavailable")),
            (503, "api_error"),
        );
        check(
            ApiError::internal("x"),
            (500, "server_error", None),
            (500, "api_error"),
        );
    }

    #[test]
    fn context_error_names_both_lengths_in_each_dialect() {
        let error = ApiError::ContextLength {
            prompt: 120,
            limit: 100,
        };
        let anthropic = error.body(Dialect::Anthropic, None);
        assert_eq!(
            anthropic["error"]["message"],
            "prompt is too long: 120 tokens > 100 maximum"
        );
        assert!(error.to_string().contains("120") && error.to_string().contains("100"));
    }

    #[test]
    fn device_errors_are_server_errors() {
        let io = std::io::Error::other("x");
        let (call, detail) = ("open", "x".to_owned());
        let errors = [
            DeviceError::PoolExhausted { wanted: 2, free: 1 },
            DeviceError::OutOfMemory {
                what: "context tokens",
                wanted: 2,
                free: 1,
            },
            DeviceError::Unsupported {
                what: "x".to_owned(),
                device: "y".to_owned(),
                instead: "use z".to_owned(),
            },
            DeviceError::UnknownSequence(SeqId(1)),
            DeviceError::UnknownSnapshot(SnapshotId(1)),
            DeviceError::InvalidCall {
                call,
                detail: detail.clone(),
            },
            DeviceError::InvalidSnapshot {
                detail: detail.clone(),
            },
            DeviceError::from(io),
            DeviceError::SequenceLost {
                seq: SeqId(1),
                during: call,
                detail: detail.clone(),
            },
            DeviceError::DeviceLost {
                during: call,
                detail: detail.clone(),
            },
        ];
        let mut all: Vec<ApiError> = errors.iter().map(|e| JobError::from(e).into()).collect();
        let lost = SubmitError::DeviceLost {
            during: call,
            detail,
        };
        all.push(lost.into());
        for error in all {
            for dialect in [Dialect::OpenAi, Dialect::Anthropic] {
                let status = error.status(dialect);
                assert!(status.is_server_error(), "{error}: {status}");
            }
        }
    }

    #[test]
    fn temporary_errors_have_retry_after() {
        let full = ApiError::QueueFull { waiting: 1 }.into_response();
        assert!(full.headers().contains_key(header::RETRY_AFTER));
        let busy = ApiError::unavailable("loading").into_response();
        assert!(busy.headers().contains_key(header::RETRY_AFTER));
        let wrong = ApiError::invalid("x").into_response();
        assert!(!wrong.headers().contains_key(header::RETRY_AFTER));
    }
}
