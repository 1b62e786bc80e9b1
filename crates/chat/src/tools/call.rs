//! Parses one tool call in whichever form the model writes it.

use std::sync::Arc;

use contract::{ModelMarkup, ToolCallTags};

use super::event::{CallEvent, CallStatus, ReplyEnd};
use super::json_call::JsonCallParser;
use super::prefix::{PrefixMatch, leading_blank_len, match_prefix};
use super::xml_call::{Names, XmlCallParser};
use super::{Tool, ToolSet};

/// How a call starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallStart {
    /// The call tag, with either form inside.
    CallTag,
    /// The alternate call tag, with JSON inside.
    CodeTag,
    /// A function tag without a call tag around it.
    Function,
    /// `<NAME>` of a declared tool, with parameters inside.
    Named(String),
    /// A JSON object at the beginning of the reply.
    Bare,
}

impl CallStart {
    /// The text of this start.
    pub(crate) fn text(&self, tags: &ToolCallTags) -> String {
        match self {
            CallStart::CallTag => tags.open.clone(),
            CallStart::CodeTag => tags.alternate_open.clone(),
            CallStart::Function => tags.function_open.clone(),
            CallStart::Named(name) => format!("<{name}>"),
            CallStart::Bare => "{".to_owned(),
        }
    }

    /// Whether it counts only at the start of a line.
    pub(crate) fn needs_line_start(&self) -> bool {
        !matches!(self, CallStart::CallTag | CallStart::CodeTag)
    }

    /// Whether it counts inside code if a declared tool's function tag follows.
    pub(crate) fn may_stand_in_code(&self) -> bool {
        *self == CallStart::CallTag
    }
}

/// What may follow the call tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallScope {
    /// Either form, of a tool of any name.
    Any,
    /// A function tag of a tool of any name: in the middle of a line of reasoning, where JSON in
    /// tags is a quotation.
    Function,
    /// A function tag of a declared tool: in code, where other calls are quotations.
    DeclaredFunction,
}

/// A call being parsed.
#[derive(Debug)]
pub(crate) struct CallParser {
    call_start: CallStart,
    scope: CallScope,
    form: CallForm,
    markup: Arc<ModelMarkup>,
    /// Whether no grammar holds a call here to a strict tool's schema. Such a call is text.
    is_unconstrained: bool,
}

#[derive(Debug)]
enum CallForm {
    Unknown,
    Json(JsonCallParser),
    Xml(XmlCallParser),
}

impl CallParser {
    pub(crate) fn new(
        call_start: CallStart,
        scope: CallScope,
        markup: &Arc<ModelMarkup>,
    ) -> CallParser {
        CallParser {
            is_unconstrained: matches!(call_start, CallStart::Bare | CallStart::Named(_)),
            call_start,
            scope,
            form: CallForm::Unknown,
            markup: Arc::clone(markup),
        }
    }

    /// The same within reasoning, where a grammar forbids the call tag. What comes nevertheless is
    /// spelled in letters.
    pub(crate) fn in_reasoning(self) -> CallParser {
        CallParser {
            is_unconstrained: true,
            ..self
        }
    }

    /// Parses `text`, which starts where the last call to this function stopped consuming: at first
    /// at the call start. Returns the bytes consumed. With an `end`, the status is final.
    pub(crate) fn feed(
        &mut self,
        text: &str,
        end: Option<ReplyEnd>,
        tools: &ToolSet,
        events: &mut Vec<CallEvent>,
    ) -> (usize, CallStatus) {
        if let CallForm::Unknown = self.form {
            match self.detect_form(text) {
                Some(form) => self.form = form,
                None if end.is_some() => return (0, CallStatus::NotACall),
                None => return (0, CallStatus::NeedsText),
            }
        }
        let before = events.len();
        let fed = match &mut self.form {
            CallForm::Unknown => (0, CallStatus::NotACall),
            CallForm::Json(call) => call.feed(text, end, tools, events),
            CallForm::Xml(call) => call.feed(text, end, tools, events),
        };
        let names_strict_tool = |event: &CallEvent| match event {
            CallEvent::Name(name) => tools.find(name).is_some_and(Tool::is_strict),
            CallEvent::Arguments(_) => false,
        };
        if self.is_unconstrained && events[before..].iter().any(names_strict_tool) {
            events.truncate(before);
            return (0, CallStatus::NotACall);
        }
        fed
    }

    /// The form, once the text after the start shows it; `Unknown` if it is no call.
    fn detect_form(&self, text: &str) -> Option<CallForm> {
        let tags = &self.markup.tool_calls;
        let call_start = self.call_start.text(tags);
        let inside = text.get(call_start.len()..)?;
        match &self.call_start {
            CallStart::Function => Some(CallForm::Xml(XmlCallParser::function(
                0,
                Names::Declared,
                &self.markup,
            ))),
            CallStart::Bare => Some(CallForm::Json(JsonCallParser::new(0, None, &self.markup))),
            CallStart::Named(name) => {
                let start = call_start.len() + leading_blank_len(inside);
                match match_prefix(&text[start..], &tags.parameter_open) {
                    PrefixMatch::Yes => Some(CallForm::Xml(XmlCallParser::named(
                        name.clone(),
                        start,
                        &self.markup,
                    ))),
                    PrefixMatch::Partial => None,
                    PrefixMatch::No => Some(CallForm::Unknown),
                }
            }
            CallStart::CallTag | CallStart::CodeTag => {
                let start = call_start.len() + leading_blank_len(inside);
                let rest = &text[start..];
                let closing = match self.call_start {
                    CallStart::CodeTag => &tags.alternate_close,
                    _ => &tags.close,
                };
                if rest.starts_with('{') {
                    if self.scope != CallScope::Any {
                        return Some(CallForm::Unknown);
                    }
                    return Some(CallForm::Json(JsonCallParser::new(
                        start,
                        Some(closing.clone()),
                        &self.markup,
                    )));
                }
                match match_prefix(rest, &tags.function_open) {
                    PrefixMatch::Yes => {
                        let names = if self.scope == CallScope::DeclaredFunction {
                            Names::Declared
                        } else {
                            Names::Any
                        };
                        Some(CallForm::Xml(XmlCallParser::function(
                            start,
                            names,
                            &self.markup,
                        )))
                    }
                    PrefixMatch::Partial => None,
                    PrefixMatch::No => Some(CallForm::Unknown),
                }
            }
        }
    }
}
