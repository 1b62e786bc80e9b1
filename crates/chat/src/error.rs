//! What can go wrong on the text side, by what the caller can do about it.

use std::fmt;

/// Why a request, a template or a vocabulary was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ChatError {
    /// Who has to act.
    pub kind: ErrorKind,
    /// What was wrong, where, and what to do: lowercase, without a full stop.
    pub message: String,
    /// The request field at fault, spelled as a path such as `messages[2].content`.
    pub param: Option<String>,
}

/// Who has to act on a [`ChatError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The client sent something malformed or out of range.
    InvalidRequest,
    /// The chat template itself refused these messages; the message is the template's own text.
    TemplateRefused,
    /// The chat template is broken on well-formed input: a fault of the model file.
    TemplateFailed,
    /// The vocabulary or the template cannot be used at all; found at start.
    Setup,
}

impl ChatError {
    /// A request refused because of the field `param`.
    pub fn field(param: impl Into<String>, message: impl fmt::Display) -> ChatError {
        let param = param.into();
        ChatError {
            kind: ErrorKind::InvalidRequest,
            message: format!("{param}: {message}"),
            param: Some(param),
        }
    }

    /// A request refused as a whole.
    pub fn invalid(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::InvalidRequest,
            message: message.into(),
            param: None,
        }
    }

    /// A vocabulary or template that cannot be used.
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

    pub(crate) fn template_refused(message: impl Into<String>) -> ChatError {
        ChatError {
            kind: ErrorKind::TemplateRefused,
            message: message.into(),
            param: Some("messages".to_owned()),
        }
    }
}
