//! What a call parser reports.

/// Why the tokens of a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplyEnd {
    /// The model ended its turn.
    Eos,
    /// The token limit or the end of the context.
    Length,
    /// Stopped: by a stop string, a finished call, or the client.
    Stopped,
}

/// An increment of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallEvent {
    /// The call is confirmed: the declared tool's name.
    Name(String),
    /// More of the arguments.
    Arguments(String),
}

/// Status of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallStatus {
    /// More text is needed.
    NeedsText,
    /// The text only looks like a call. Reported only before a name; nothing was consumed.
    NotACall,
    /// The call is complete; its arguments are a JSON object.
    Complete {
        /// Whether it was repaired.
        repaired: bool,
    },
    /// The text ended inside the call, and so do its arguments.
    Truncated,
}
