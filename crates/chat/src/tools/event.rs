//! What a call parser reports.

/// Why no more text will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplyEnd {
    /// The model ended its turn.
    Eos,
    /// The token limit or the end of the context.
    Length,
    /// Somebody stopped it: a stop string, a finished call, the client.
    Stopped,
}

/// What a call has given so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallEvent {
    /// The call is one: the declared tool's name.
    Name(String),
    /// More of the arguments.
    Arguments(String),
}

/// Where a call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallStatus {
    /// More text is needed.
    NeedsText,
    /// This is text that only looks like a call. Only before a name was given; nothing was consumed.
    NotACall,
    /// The call ended, and its arguments are a JSON object.
    Complete {
        /// Whether it had to be repaired to be one.
        repaired: bool,
    },
    /// The text ended inside the call, and its arguments end where the text did.
    Truncated,
}
