//! Parses a call written as a function tag with one tag per parameter.

use std::sync::Arc;

use contract::ModelMarkup;

use super::event::{CallEvent, CallStatus, ReplyEnd};
use super::json_repair::{JsonRepair, write_json_string_body};
use super::prefix::{PrefixMatch, leading_blank_len, match_any_prefix};
use super::schema::{ParameterSchemas, ParameterType};
use super::xml_value::{
    ValueEnd, ValueScan, find_end, line_is_blank, without_first_break, without_last_break,
};
use super::{ToolSet, may_name_a_tool};

/// Longer names and keys are not names and keys.
const MAX_NAME_BYTES: usize = 256;
/// Longer arguments inside the function tag are not arguments.
const MAX_INLINE_BYTES: usize = 65_536;

/// A call of the form `<function=NAME>` `<parameter=KEY>` value `</parameter>` .. `</function>`.
///
/// String parameters are streamed; others are read to their end and converted by their schema.
#[derive(Debug)]
pub(super) struct XmlCallParser {
    phase: XmlCallPhase,
    names: Names,
    parameters: ParameterSchemas,
    /// Another tag that ends the call.
    named_close: Option<String>,
    /// Parameters so far.
    keys: Vec<String>,
    /// The type of the last one.
    parameter: Option<ParameterType>,
    repaired: bool,
    markup: Arc<ModelMarkup>,
}

/// Which names a call may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// Those of declared tools.
    Declared,
    /// Any that could be a tool's: the client learns that the model called a tool it does not have.
    Any,
}

#[derive(Debug)]
enum XmlCallPhase {
    /// The function tag starts at this offset of unconsumed text.
    Head { start: usize, named: Option<String> },
    /// Between parameters.
    Body,
    /// After a parameter's tag.
    ValueStart,
    /// Inside a value. Tags before byte `scanned` belong to it; `begins_line` shows whether its
    /// current line is blank so far.
    Value { scanned: usize, begins_line: bool },
    /// After the end of the function.
    Tail,
}

impl XmlCallParser {
    /// A call whose function tag starts at byte `start`.
    pub(super) fn function(start: usize, names: Names, markup: &Arc<ModelMarkup>) -> XmlCallParser {
        XmlCallParser {
            names,
            ..XmlCallParser::new(XmlCallPhase::Head { start, named: None }, None, markup)
        }
    }

    /// A call whose tag is the tool's name; its parameters start at byte `start`.
    pub(super) fn named(name: String, start: usize, markup: &Arc<ModelMarkup>) -> XmlCallParser {
        let named_close = Some(format!("</{name}>"));
        XmlCallParser::new(
            XmlCallPhase::Head {
                start,
                named: Some(name),
            },
            named_close,
            markup,
        )
    }

    fn new(
        phase: XmlCallPhase,
        named_close: Option<String>,
        markup: &Arc<ModelMarkup>,
    ) -> XmlCallParser {
        let parameters = ParameterSchemas::default();
        XmlCallParser {
            phase,
            names: Names::Declared,
            parameters,
            named_close,
            keys: Vec::new(),
            parameter: None,
            repaired: false,
            markup: Arc::clone(markup),
        }
    }

    pub(super) fn feed(
        &mut self,
        text: &str,
        end: Option<ReplyEnd>,
        tools: &ToolSet,
        events: &mut Vec<CallEvent>,
    ) -> (usize, CallStatus) {
        let mut at = 0;
        let mut out = String::new();
        let status = loop {
            let step = match &self.phase {
                XmlCallPhase::Head { .. } => self.head(text, end, tools, events, &mut out),
                XmlCallPhase::Body => self.body(&text[at..], end, &mut out),
                XmlCallPhase::ValueStart => self.value_start(&text[at..], end),
                XmlCallPhase::Value { .. } => self.value(&text[at..], end, &mut out),
                XmlCallPhase::Tail => self.tail(&text[at..], end),
            };
            at += step.0;
            if let Some(status) = step.1 {
                break status;
            }
        };
        if !out.is_empty() {
            events.push(CallEvent::Arguments(out));
        }
        (at, status)
    }

    /// Reads the function tag.
    fn head(
        &mut self,
        text: &str,
        end: Option<ReplyEnd>,
        tools: &ToolSet,
        events: &mut Vec<CallEvent>,
        out: &mut String,
    ) -> ParseStep {
        let XmlCallPhase::Head { start, named } = &self.phase else {
            return (0, None);
        };
        let mut inline = None;
        let (name, consumed) = match named {
            Some(name) => (name.clone(), *start),
            None => {
                let inside = *start + self.markup.tool_calls.function_open.len();
                let Some(rest) = text.get(inside..) else {
                    return (0, undecided(end));
                };
                let Some(close) = rest.find('>') else {
                    let most = if rest.contains('(') {
                        MAX_INLINE_BYTES
                    } else {
                        MAX_NAME_BYTES
                    };
                    let hopeless = rest.len() > most;
                    return (
                        0,
                        if hopeless {
                            Some(CallStatus::NotACall)
                        } else {
                            undecided(end)
                        },
                    );
                };
                match rest.find('(') {
                    Some(open) if open < close => {
                        let Some(close) = rest.find(")>") else {
                            let hopeless = rest.len() > MAX_INLINE_BYTES;
                            return (
                                0,
                                if hopeless {
                                    Some(CallStatus::NotACall)
                                } else {
                                    undecided(end)
                                },
                            );
                        };
                        let Some(fields) = inline_fields(&rest[open + 1..close]) else {
                            return (0, Some(CallStatus::NotACall));
                        };
                        inline = Some(fields);
                        (rest[..open].to_owned(), inside + close + 2)
                    }
                    _ => (rest[..close].to_owned(), inside + close + 1),
                }
            }
        };
        let name = name.trim().trim_matches(['"', '\'']);
        let tool = tools.find(name);
        let name = match tool {
            Some(tool) => tool.name.clone(),
            None if self.names == Names::Any && may_name_a_tool(name) => name.to_owned(),
            None => return (0, Some(CallStatus::NotACall)),
        };
        events.push(CallEvent::Name(name));
        self.parameters = ParameterSchemas::new(tool.and_then(|tool| tool.parameters.as_ref()));
        out.push('{');
        for (key, json) in inline.into_iter().flatten() {
            self.write_key(&key, out);
            out.push_str(&json);
        }
        self.phase = XmlCallPhase::Body;
        (consumed, None)
    }

    fn write_key(&mut self, key: &str, out: &mut String) {
        if !self.keys.is_empty() {
            out.push_str(", ");
        }
        out.push('"');
        write_json_string_body(key, out);
        out.push_str("\": ");
        self.keys.push(key.to_owned());
        self.parameter = Some(self.parameters.parameter(key));
    }

    /// Reads the next parameter or the end; stray closing tags and other text are dropped.
    fn body(&mut self, text: &str, end: Option<ReplyEnd>, out: &mut String) -> ParseStep {
        let markup = Arc::clone(&self.markup);
        let tags = &markup.tool_calls;
        let at = leading_blank_len(text);
        let rest = &text[at..];
        if let Some(inside) = rest.strip_prefix(&*tags.parameter_open) {
            let Some(close) = inside.find(['>', '\n']) else {
                if inside.len() <= MAX_NAME_BYTES {
                    return self.wait(at, end, out);
                }
                return (at + 1, None);
            };
            if inside[close..].starts_with('>') {
                let key = inside[..close].trim().trim_matches(['"', '\'']).to_owned();
                self.write_key(&key, out);
                if self.is_text() {
                    out.push('"');
                }
                self.phase = XmlCallPhase::ValueStart;
                return (at + tags.parameter_open.len() + close + 1, None);
            }
            return (at + 1, None);
        }
        if let Some(length) = self.closing_len(rest) {
            out.push('}');
            self.phase = XmlCallPhase::Tail;
            return (at + length, None);
        }
        if rest.starts_with(&*tags.close) {
            out.push('}');
            return (at + tags.close.len(), Some(self.complete()));
        }
        if rest.starts_with(&*tags.open) || rest.starts_with(&*tags.function_open) {
            out.push('}');
            self.repaired = true;
            return (at, Some(self.complete()));
        }
        if rest.starts_with(&*tags.parameter_close) {
            self.repaired = true;
            return (at + tags.parameter_close.len(), None);
        }
        let own = self.named_close.as_deref().unwrap_or(&tags.function_close);
        let tags = [
            &tags.parameter_open,
            &tags.function_close,
            own,
            &tags.close,
            &tags.open,
            &tags.function_open,
            &tags.parameter_close,
        ];
        if match_any_prefix(rest, &tags) == PrefixMatch::Partial {
            return self.wait(at, end, out);
        }
        // Text between parameters is ignored up to the next tag.
        let first = rest.chars().next().map_or(0, char::len_utf8);
        let next = rest[first..]
            .find('<')
            .map_or(rest.len(), |offset| first + offset);
        (at + next, None)
    }

    fn is_text(&self) -> bool {
        self.parameter.as_ref().is_some_and(ParameterType::is_text)
    }

    fn closing_len(&self, text: &str) -> Option<usize> {
        let tags = [
            Some(&*self.markup.tool_calls.function_close),
            self.named_close.as_deref(),
        ];
        tags.into_iter()
            .flatten()
            .find(|tag| text.starts_with(tag))
            .map(str::len)
    }

    /// The text ended between parameters.
    fn wait(&mut self, at: usize, end: Option<ReplyEnd>, out: &mut String) -> ParseStep {
        match end {
            None => (at, Some(CallStatus::NeedsText)),
            Some(ReplyEnd::Eos) => {
                out.push('}');
                self.repaired = true;
                (at, Some(self.complete()))
            }
            Some(_) => (at, Some(CallStatus::Truncated)),
        }
    }

    /// Drops the line break after a parameter's tag.
    fn value_start(&mut self, text: &str, end: Option<ReplyEnd>) -> ParseStep {
        if end.is_none() && (text.is_empty() || text == "\r") {
            return (0, Some(CallStatus::NeedsText));
        }
        self.phase = XmlCallPhase::Value {
            scanned: 0,
            begins_line: true,
        };
        (text.len() - without_first_break(text).len(), None)
    }

    fn value(&mut self, text: &str, end: Option<ReplyEnd>, out: &mut String) -> ParseStep {
        let XmlCallPhase::Value {
            scanned,
            begins_line,
        } = self.phase
        else {
            return (0, None);
        };
        let scan = ValueScan {
            text,
            scanned,
            begins_line,
            tags: &self.markup.tool_calls,
            named_close: self.named_close.as_deref(),
            is_json: self
                .parameter
                .as_ref()
                .is_some_and(|one| one.reads_as_json(text)),
            at_end: end == Some(ReplyEnd::Eos),
        };
        let may_follow = |key: &str| {
            let key = key.trim().trim_matches(['"', '\'']);
            self.parameters.declares(key) && !self.keys.iter().any(|given| given == key)
        };
        match find_end(&scan, may_follow) {
            ValueEnd::Found(end) => {
                let value = without_last_break(&text[..end.value]);
                self.repaired |= end.implied;
                if self.is_text() {
                    write_json_string_body(value, out);
                    out.push('"');
                } else if let Some(parameter) = &self.parameter {
                    out.push_str(&parameter.value(value));
                }
                let rest = &text[end.next..];
                // A closing tag of the call itself is read between parameters.
                let is_over = end.ends_call
                    && self.closing_len(rest).is_none()
                    && !rest.starts_with(&*self.markup.tool_calls.close);
                self.phase = if is_over {
                    out.push('}');
                    XmlCallPhase::Tail
                } else {
                    XmlCallPhase::Body
                };
                (end.next, None)
            }
            ValueEnd::Open { safe, scanned } => {
                let status = if end.is_none() {
                    CallStatus::NeedsText
                } else {
                    CallStatus::Truncated
                };
                // Only strings can be streamed before their end is known.
                let safe = if self.is_text() { safe } else { 0 };
                write_json_string_body(&text[..safe], out);
                self.phase = XmlCallPhase::Value {
                    scanned: scanned.saturating_sub(safe),
                    begins_line: line_is_blank(begins_line, &text[..safe]),
                };
                (safe, Some(status))
            }
        }
    }

    /// Reads the closing tags after the function.
    fn tail(&mut self, text: &str, end: Option<ReplyEnd>) -> ParseStep {
        let markup = Arc::clone(&self.markup);
        let tags = &markup.tool_calls;
        let mut at = 0;
        loop {
            let here = at + leading_blank_len(&text[at..]);
            let rest = &text[here..];
            if rest.starts_with(&*tags.close) {
                return (here + tags.close.len(), Some(self.complete()));
            }
            let stray = [&*tags.function_close, &*tags.parameter_close];
            match stray.iter().find(|tag| rest.starts_with(**tag)) {
                Some(tag) => {
                    self.repaired = true;
                    at = here + tag.len();
                }
                None => {
                    let perhaps = match_any_prefix(rest, &[&tags.close, stray[0], stray[1]]);
                    return match (perhaps, end) {
                        (PrefixMatch::Partial, None) => (at, Some(CallStatus::NeedsText)),
                        (PrefixMatch::Partial, Some(_)) => (text.len(), Some(self.complete())),
                        _ => (at, Some(self.complete())),
                    };
                }
            }
        }
    }

    fn complete(&self) -> CallStatus {
        CallStatus::Complete {
            repaired: self.repaired,
        }
    }
}

/// Bytes consumed, and the status to return, if any.
type ParseStep = (usize, Option<CallStatus>);

fn undecided(end: Option<ReplyEnd>) -> Option<CallStatus> {
    Some(if end.is_none() {
        CallStatus::NeedsText
    } else {
        CallStatus::NotACall
    })
}

/// The fields of `k="v", n=1`: keys and JSON values.
fn inline_fields(text: &str) -> Option<Vec<(String, String)>> {
    let mut fields = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (key, after) = rest.split_once('=')?;
        let key = key.trim();
        if key.is_empty()
            || !key
                .chars()
                .all(|letter| letter.is_alphanumeric() || letter == '_')
        {
            return None;
        }
        let mut value = JsonRepair::default();
        let mut json = String::new();
        // The appended blank ends a number.
        let after = format!("{} ", after.trim_start());
        let read = value.push(&after, &mut json).ok()?;
        if !value.is_done() {
            return None;
        }
        fields.push((key.to_owned(), json));
        let consumed = rest.len() - (after.len() - 1) + read.min(after.len() - 1);
        rest = rest[consumed..].trim_start();
        rest = match rest.strip_prefix(',') {
            Some(next) => next.trim_start(),
            None if rest.is_empty() => rest,
            None => return None,
        };
    }
    Some(fields)
}
