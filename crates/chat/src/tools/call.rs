//! One tool call, from its opening tag to its end, in whichever form the model writes it.

use super::ToolSet;
use super::json_call::JsonCall;
use super::xml_call::XmlCall;

/// Why no more text will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
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
pub(crate) enum Outcome {
    /// More text is needed.
    More,
    /// This is text that only looks like a call. Only before a name was given; nothing was consumed.
    NotACall,
    /// The call ended, and its arguments are a JSON object.
    Complete {
        /// Whether it had to be mended to be one.
        mended: bool,
    },
    /// The text ended inside the call, and its arguments end where the text did.
    Unfinished,
}

/// How a call begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Opening {
    /// `<tool_call>`, with either form inside.
    CallTag,
    /// `<tool_code>`, with JSON inside.
    CodeTag,
    /// `<function=`, without a tag around it.
    Function,
    /// `<NAME>` of a declared tool, with parameters inside.
    Named(String),
    /// A JSON object at the beginning of the reply.
    Bare,
}

impl Opening {
    /// The text this opening begins with.
    pub(crate) fn text(&self) -> String {
        match self {
            Opening::CallTag => "<tool_call>".to_owned(),
            Opening::CodeTag => "<tool_code>".to_owned(),
            Opening::Function => "<function=".to_owned(),
            Opening::Named(name) => format!("<{name}>"),
            Opening::Bare => "{".to_owned(),
        }
    }

    /// Whether it counts only at the beginning of a line.
    pub(crate) fn needs_line_start(&self) -> bool {
        !matches!(self, Opening::CallTag | Opening::CodeTag)
    }
}

/// A call that is being read.
#[derive(Debug)]
pub(crate) struct CallParser {
    opening: Opening,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Unknown,
    Json(JsonCall),
    Xml(XmlCall),
}

impl CallParser {
    pub(crate) fn new(opening: Opening) -> CallParser {
        CallParser {
            opening,
            form: Form::Unknown,
        }
    }

    /// Reads on in `text`, which begins where the last call to this function stopped consuming: at
    /// first at the opening itself. Gives the bytes consumed. With an `end`, the outcome is final.
    pub(crate) fn feed(
        &mut self,
        text: &str,
        end: Option<End>,
        tools: &ToolSet,
        events: &mut Vec<CallEvent>,
    ) -> (usize, Outcome) {
        if let Form::Unknown = self.form {
            match self.choose(text) {
                Some(form) => self.form = form,
                None if end.is_some() => return (0, Outcome::NotACall),
                None => return (0, Outcome::More),
            }
        }
        match &mut self.form {
            Form::Unknown => (0, Outcome::NotACall),
            Form::Json(call) => call.feed(text, end, tools, events),
            Form::Xml(call) => call.feed(text, end, tools, events),
        }
    }

    /// The form, once the text behind the opening shows it; `Unknown` if it is none.
    fn choose(&self, text: &str) -> Option<Form> {
        let opening = self.opening.text();
        let inside = text.get(opening.len()..)?;
        match &self.opening {
            Opening::Function => Some(Form::Xml(XmlCall::function(0))),
            Opening::Bare => Some(Form::Json(JsonCall::new(0, None))),
            Opening::Named(name) => {
                let start = opening.len() + blank_len(inside);
                match starts(&text[start..], "<parameter=") {
                    Starts::Yes => Some(Form::Xml(XmlCall::named(name.clone(), start))),
                    Starts::Perhaps => None,
                    Starts::No => Some(Form::Unknown),
                }
            }
            Opening::CallTag | Opening::CodeTag => {
                let start = opening.len() + blank_len(inside);
                let rest = &text[start..];
                let closing = match self.opening {
                    Opening::CodeTag => "</tool_code>",
                    _ => "</tool_call>",
                };
                if rest.starts_with('{') {
                    return Some(Form::Json(JsonCall::new(start, Some(closing))));
                }
                match starts(rest, "<function=") {
                    Starts::Yes => Some(Form::Xml(XmlCall::function(start))),
                    Starts::Perhaps => None,
                    Starts::No => Some(Form::Unknown),
                }
            }
        }
    }
}

/// Whether a text begins with a word, as far as the text goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Starts {
    Yes,
    /// The text is too short to say.
    Perhaps,
    No,
}

pub(super) fn starts(text: &str, word: &str) -> Starts {
    if text.starts_with(word) {
        Starts::Yes
    } else if word.starts_with(text) {
        Starts::Perhaps
    } else {
        Starts::No
    }
}

/// The best answer over several words.
pub(super) fn starts_any(text: &str, words: &[&str]) -> Starts {
    let mut best = Starts::No;
    for word in words {
        match starts(text, word) {
            Starts::Yes => return Starts::Yes,
            Starts::Perhaps => best = Starts::Perhaps,
            Starts::No => {}
        }
    }
    best
}

/// Bytes of blanks at the beginning of `text`.
pub(super) fn blank_len(text: &str) -> usize {
    text.len() - text.trim_start().len()
}
