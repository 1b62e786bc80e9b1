//! Errors of the text side, by who has to act.

use std::fmt;

/// Why a request, a template or a vocabulary was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ChatError {
    /// Who has to act.
    pub kind: ErrorKind,
    /// What is wrong, where, and what to do: lowercase, without a full stop.
    pub message: String,
    /// The request field at fault, as a path such as `messages[2].content`.
    pub param: Option<String>,
}

/// Who has to act on a [`ChatError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The client sent something malformed or out of range.
    InvalidRequest,
    /// The client refers to something that is not kept here.
    NotFound,
    /// The chat template raised an error; the message is the template's own text.
    TemplateRefused,
    /// The chat template failed on valid messages: it cannot express a conversation of this form,
    /// although it expresses a plain question.
    TemplateFailed,
    /// The chat template went over a limit of steps, bytes, nesting or time on valid messages.
    TemplateLimit,
    /// The vocabulary or the template is unusable; detected at start.
    Setup,
}

impl ChatError {
    /// An error in the request field `param`.
    pub fn field(param: impl Into<String>, message: impl fmt::Display) -> ChatError {
        let param = param.into();
        ChatError {
            kind: ErrorKind::InvalidRequest,
            message: format!("{param}: {message}"),
            param: Some(param),
        }
    }

    /// The request field `param` refers to something that is not kept here.
    pub(crate) fn not_found(param: &str, message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::NotFound,
            message: message.into(),
            param: Some(param.to_owned()),
        }
    }

    /// An error in the request as a whole.
    pub fn invalid(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::InvalidRequest,
            message: message.into(),
            param: None,
        }
    }

    /// An unusable vocabulary or template.
    pub fn setup(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::Setup,
            message: message.into(),
            param: None,
        }
    }

    pub(crate) fn template_failed(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::TemplateFailed,
            message: message.into(),
            param: None,
        }
    }

    pub(crate) fn template_limit(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::TemplateLimit,
            message: message.into(),
            param: Some("messages".to_owned()),
        }
    }

    pub(crate) fn template_refused(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::TemplateRefused,
            message: message.into(),
            param: Some("messages".to_owned()),
        }
    }
}
