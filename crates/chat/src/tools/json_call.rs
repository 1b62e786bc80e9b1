//! Parses a call written as a JSON object with a name and arguments.

use std::sync::Arc;

use contract::ModelMarkup;
use serde_json::Value;

use super::event::{CallEvent, CallStatus, ReplyEnd};
use super::json_repair::{JsonRepair, UnrepairableAt};
use super::prefix::{PrefixMatch, leading_blank_len, match_any_prefix, match_prefix};
use super::{ToolSet, may_name_a_tool};
use crate::stop::partial_match_len;

/// Longer names are not names.
const MAX_NAME_BYTES: usize = 256;

/// A call of the form `{"name": .., "arguments": {..}}`.
///
/// In that order the arguments are streamed. In any other order, with arguments as a string or in a
/// wrapper, the object is read to its end first.
#[derive(Debug)]
pub(super) struct JsonCallParser {
    /// The closing tag, if the call started with a tag.
    closing: Option<String>,
    phase: JsonCallPhase,
    repaired: bool,
    markup: Arc<ModelMarkup>,
}

#[derive(Debug)]
enum JsonCallPhase {
    /// The object starts at this offset of unconsumed text.
    Head { start: usize },
    /// The fields are in another order; read up to `scanned`.
    Whole {
        json: JsonRepair,
        out: String,
        scanned: usize,
    },
    /// Inside the arguments.
    Arguments(JsonRepair),
    /// After the arguments, inside the object.
    Rest(Option<JsonRepair>),
    /// After the object.
    Closing,
    /// After unrepairable arguments: text up to the closing tag is dropped.
    Skip,
}

/// What the start of an object shows.
enum ObjectHead {
    /// Name first, then arguments; `arguments` is their offset.
    NameFirst {
        name: String,
        arguments: usize,
    },
    TooShort,
    OtherOrder,
}

impl JsonCallParser {
    /// A call whose object starts at byte `start`. Without a `closing` tag only name-first objects
    /// count.
    pub(super) fn new(
        start: usize,
        closing: Option<String>,
        markup: &Arc<ModelMarkup>,
    ) -> JsonCallParser {
        JsonCallParser {
            closing,
            phase: JsonCallPhase::Head { start },
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
        let is_tagged = self.closing.is_some();
        let mut at = 0;
        loop {
            let rest = &text[at..];
            match &mut self.phase {
                JsonCallPhase::Head { start } => match read_head(&text[*start..]) {
                    ObjectHead::NameFirst { name, arguments } => {
                        match called_tool(&name, tools, is_tagged) {
                            Some(name) => {
                                events.push(CallEvent::Name(name));
                                at = *start + arguments;
                                self.phase = JsonCallPhase::Arguments(JsonRepair::default());
                            }
                            None => return (0, CallStatus::NotACall),
                        }
                    }
                    ObjectHead::TooShort if end.is_none() => return (0, CallStatus::NeedsText),
                    ObjectHead::TooShort => return (0, CallStatus::NotACall),
                    ObjectHead::OtherOrder if self.closing.is_none() => {
                        return (0, CallStatus::NotACall);
                    }
                    ObjectHead::OtherOrder => {
                        let (json, out) = Default::default();
                        self.phase = JsonCallPhase::Whole {
                            json,
                            out,
                            scanned: *start,
                        };
                    }
                },
                JsonCallPhase::Whole { json, out, scanned } => {
                    match json.push(&text[*scanned..], out) {
                        Ok(n_bytes) => *scanned += n_bytes,
                        Err(_) => return (0, CallStatus::NotACall),
                    }
                    if !json.is_done() {
                        let status = if end.is_none() {
                            CallStatus::NeedsText
                        } else {
                            CallStatus::NotACall
                        };
                        return (0, status);
                    }
                    let Some((name, arguments)) = read_whole(out) else {
                        return (0, CallStatus::NotACall);
                    };
                    at = *scanned;
                    let Some(name) = called_tool(&name, tools, is_tagged) else {
                        return (0, CallStatus::NotACall);
                    };
                    events.push(CallEvent::Name(name));
                    events.push(CallEvent::Arguments(arguments));
                    self.phase = JsonCallPhase::Closing;
                }
                JsonCallPhase::Arguments(json) => {
                    let mut out = String::new();
                    let limit = ArgumentsLimit::find(rest, self.closing.as_deref(), end);
                    match json.push(&rest[..limit.n_bytes], &mut out) {
                        Ok(n_bytes) => {
                            at += n_bytes;
                            if json.is_done() {
                                self.phase = JsonCallPhase::Rest(None);
                            } else if limit.is_closed || end == Some(ReplyEnd::Eos) {
                                json.close(&mut out);
                                self.repaired = true;
                                self.phase = JsonCallPhase::Closing;
                            }
                        }
                        Err(UnrepairableAt(read)) => {
                            at += read;
                            json.close(&mut out);
                            self.repaired = true;
                            self.phase = JsonCallPhase::Skip;
                        }
                    }
                    if !out.is_empty() {
                        events.push(CallEvent::Arguments(out));
                    }
                    if let JsonCallPhase::Arguments(_) = self.phase {
                        let status = if end.is_none() {
                            CallStatus::NeedsText
                        } else {
                            CallStatus::Truncated
                        };
                        return (at, status);
                    }
                }
                JsonCallPhase::Rest(further) => match read_rest(rest, further) {
                    Some(n_bytes) => {
                        at += n_bytes;
                        self.phase = JsonCallPhase::Closing;
                    }
                    None if end.is_some() => return (text.len(), self.complete()),
                    None => return (text.len(), CallStatus::NeedsText),
                },
                JsonCallPhase::Closing => return self.read_closing(text, at, end),
                JsonCallPhase::Skip => return self.skip(text, at, end),
            }
        }
    }

    fn complete(&self) -> CallStatus {
        CallStatus::Complete {
            repaired: self.repaired,
        }
    }

    fn read_closing(
        &mut self,
        text: &str,
        at: usize,
        end: Option<ReplyEnd>,
    ) -> (usize, CallStatus) {
        let Some(closing) = &self.closing else {
            return (at, self.complete());
        };
        // Models often write one brace too many.
        let mut behind = at + leading_blank_len(&text[at..]);
        while text[behind..].starts_with('}') {
            behind += 1;
            behind += leading_blank_len(&text[behind..]);
        }
        match match_prefix(&text[behind..], closing) {
            PrefixMatch::Yes => (behind + closing.len(), self.complete()),
            PrefixMatch::Partial if end.is_none() => (at, CallStatus::NeedsText),
            PrefixMatch::Partial => (text.len(), self.complete()),
            PrefixMatch::No => (at, self.complete()),
        }
    }

    fn skip(&mut self, text: &str, at: usize, end: Option<ReplyEnd>) -> (usize, CallStatus) {
        let Some(closing) = &self.closing else {
            return (at, self.complete());
        };
        for (offset, _) in text[at..].match_indices('<') {
            let here = at + offset;
            match (
                match_prefix(&text[here..], closing),
                match_prefix(&text[here..], &self.markup.tool_calls.open),
            ) {
                (PrefixMatch::Yes, _) => return (here + closing.len(), self.complete()),
                (_, PrefixMatch::Yes) => return (here, self.complete()),
                (PrefixMatch::No, PrefixMatch::No) => {}
                _ if end.is_none() => return (here, CallStatus::NeedsText),
                _ => {}
            }
        }
        let status = if end.is_none() {
            CallStatus::NeedsText
        } else {
            self.complete()
        };
        (text.len(), status)
    }
}

/// The name of the called tool. Between tags it need not be declared: the client learns that the
/// model called a tool it does not have.
fn called_tool(name: &str, tools: &ToolSet, is_tagged: bool) -> Option<String> {
    match tools.find(name) {
        Some(tool) => Some(tool.name.clone()),
        None => (is_tagged && may_name_a_tool(name)).then(|| name.to_owned()),
    }
}

/// The text that can belong to the arguments.
struct ArgumentsLimit {
    n_bytes: usize,
    /// Whether the closing tag follows. It ends arguments of any state: on a line of its own it is
    /// no JSON, not even inside a string.
    is_closed: bool,
}

impl ArgumentsLimit {
    fn find(text: &str, closing: Option<&str>, end: Option<ReplyEnd>) -> ArgumentsLimit {
        let Some(closing) = closing else {
            return ArgumentsLimit {
                n_bytes: text.len(),
                is_closed: false,
            };
        };
        let closing = format!("\n{closing}");
        match text.find(&closing) {
            Some(n_bytes) => ArgumentsLimit {
                n_bytes,
                is_closed: true,
            },
            None => ArgumentsLimit {
                n_bytes: match end {
                    Some(_) => text.len(),
                    None => text.len() - partial_match_len(text, &[&closing]),
                },
                is_closed: false,
            },
        }
    }
}

/// Reads `{"name": "..", "arguments": ` up to the opening brace of the arguments.
fn read_head(text: &str) -> ObjectHead {
    read_name_first(text).unwrap_or_else(|other| other)
}

fn read_name_first(text: &str) -> Result<ObjectHead, ObjectHead> {
    let mut at = 0;
    for word in ["{", "\"name\"", ":", "\""] {
        expect(text, &mut at, &[word])?;
    }
    let name_end = match text[at..].find(['"', '\\', '\n']) {
        Some(length) => at + length,
        None if text.len() - at > MAX_NAME_BYTES => return Err(ObjectHead::OtherOrder),
        None => return Err(ObjectHead::TooShort),
    };
    if !text[name_end..].starts_with('"') {
        return Err(ObjectHead::OtherOrder);
    }
    let name = text[at..name_end].to_owned();
    at = name_end + 1;
    expect(text, &mut at, &[","])?;
    expect(text, &mut at, &["\"arguments\"", "\"parameters\""])?;
    expect(text, &mut at, &[":"])?;
    at += leading_blank_len(&text[at..]);
    match text[at..].chars().next() {
        None => Err(ObjectHead::TooShort),
        Some('{') => Ok(ObjectHead::NameFirst {
            name,
            arguments: at,
        }),
        Some(_) => Err(ObjectHead::OtherOrder),
    }
}

/// Skips blanks and one of `words` at `at`.
fn expect(text: &str, at: &mut usize, words: &[&str]) -> Result<(), ObjectHead> {
    *at += leading_blank_len(&text[*at..]);
    let rest = &text[*at..];
    match words.iter().find(|word| rest.starts_with(**word)) {
        Some(word) => {
            *at += word.len();
            Ok(())
        }
        None if match_any_prefix(rest, words) == PrefixMatch::Partial => Err(ObjectHead::TooShort),
        None => Err(ObjectHead::OtherOrder),
    }
}

/// Name and arguments of a complete object: in any order, wrapped, or with arguments as a string.
fn read_whole(json: &str) -> Option<(String, String)> {
    let value: Value = serde_json::from_str(json).ok()?;
    let holder = match value.get("function") {
        Some(Value::Object(_)) => value.get("function")?,
        _ => &value,
    };
    let name = match holder.get("name") {
        Some(name) => name.as_str()?,
        // The wrapper may also be `{"function": "name", "arguments": ..}`.
        None => value.get("function")?.as_str()?,
    };
    let arguments = holder.get("arguments").or_else(|| holder.get("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::Object(_)) => arguments?.to_string(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".to_owned(),
        Some(Value::String(text)) => {
            let repaired = super::json_repair::repair(text)?;
            serde_json::from_str::<Value>(&repaired)
                .ok()?
                .is_object()
                .then_some(repaired)?
        }
        Some(_) => return None,
    };
    Some((name.to_owned(), arguments))
}

/// Bytes up to the closing brace of the object; `None` if it is not there yet. Anything else ends
/// the object at once.
fn read_rest(text: &str, further: &mut Option<JsonRepair>) -> Option<usize> {
    let mut at = 0;
    if further.is_none() {
        at = leading_blank_len(text);
        match text[at..].chars().next() {
            None => return None,
            Some('}') => return Some(at + 1),
            Some(',') => {
                // Further fields are read as an object of their own and dropped.
                let mut json = JsonRepair::default();
                json.push("{", &mut String::new()).ok()?;
                *further = Some(json);
                at += 1;
            }
            Some(_) => return Some(0),
        }
    }
    let json = further.as_mut()?;
    match json.push(&text[at..], &mut String::new()) {
        Ok(n_bytes) if json.is_done() => Some(at + n_bytes),
        Ok(_) => None,
        Err(UnrepairableAt(read)) => Some(at + read),
    }
}
