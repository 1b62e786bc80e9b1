//! What a client gets as events: items that begin when their first byte exists, each added once and done once.

use std::sync::Arc;

use serde_json::{Value, json};

use super::response::{Item, Part, Status};
use super::tools::{Spoken, ToolNames};
use crate::openai::response::TokenLogprob;
use crate::reply::Piece;

/// One event; its data repeats the name under `type` and carries its number.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The event's name.
    pub name: &'static str,
    /// One JSON object.
    pub data: Value,
}

/// Turns pieces of a reply into items and the events about them.
#[derive(Debug)]
pub struct Items {
    names: Arc<ToolNames>,
    summary: bool,
    /// Ids of items are made from this.
    stem: String,
    sequence: u64,
    done: Vec<Item>,
    open: Option<Open>,
}

/// The item that is open.
#[derive(Debug)]
struct Open {
    id: String,
    kind: Kind,
    /// What it holds so far: text, thinking, or arguments.
    text: String,
    /// Logprobs of its text, if they are told.
    logprobs: Vec<Value>,
}

#[derive(Debug)]
enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, spoken: Spoken },
}

impl Items {
    /// No items yet. `stem` makes ids differ between answers; `summary` tells thinking as a summary.
    pub fn new(names: Arc<ToolNames>, summary: bool, stem: String) -> Items {
        Items {
            names,
            summary,
            stem,
            sequence: 0,
            done: Vec::new(),
            open: None,
        }
    }

    /// The next event of the stream, with these fields.
    pub fn event(&mut self, name: &'static str, fields: Value) -> Event {
        let mut data = json!({"type": name, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(data), Value::Object(fields)) = (&mut data, fields) {
            data.extend(fields);
        }
        Event { name, data }
    }

    /// The items that are done.
    pub fn done(&self) -> &[Item] {
        &self.done
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: Piece) -> Vec<Event> {
        self.push_with(piece, Vec::new())
    }

    /// Takes the next piece with the logprobs of its tokens; those of anything but text are not told.
    pub fn push_with(&mut self, piece: Piece, logprobs: Vec<TokenLogprob>) -> Vec<Event> {
        let logprobs: Vec<Value> = logprobs.iter().map(|token| json!(token)).collect();
        let mut events = Vec::new();
        match piece {
            Piece::Reasoning(text) => {
                if !matches!(&self.open, Some(open) if matches!(open.kind, Kind::Reasoning)) {
                    self.begin(Kind::Reasoning, "rs", &mut events);
                }
                self.grow(&text, Vec::new(), &mut events);
            }
            Piece::Content(text) => {
                if !matches!(&self.open, Some(open) if matches!(open.kind, Kind::Message)) {
                    self.begin(Kind::Message, "msg", &mut events);
                }
                self.grow(&text, logprobs, &mut events);
            }
            Piece::ToolCall { id, name, .. } => {
                let spoken = self.names.spoken(&name);
                let prefix = match spoken {
                    Spoken::Function { .. } => "fc",
                    Spoken::Custom { .. } => "ctc",
                };
                let call_id = id;
                self.begin(Kind::Call { call_id, spoken }, prefix, &mut events);
            }
            Piece::ToolArguments { fragment, .. } => self.grow(&fragment, Vec::new(), &mut events),
        }
        events
    }

    /// Closes what is open; `is_cut` says whether a token limit ended it.
    pub fn finish(&mut self, is_cut: bool) -> Vec<Event> {
        let mut events = Vec::new();
        let status = match is_cut {
            true => Status::Incomplete,
            false => Status::Completed,
        };
        self.close(status, &mut events);
        events
    }

    fn begin(&mut self, kind: Kind, prefix: &str, events: &mut Vec<Event>) {
        self.close(Status::Completed, events);
        let index = self.done.len();
        let open = Open {
            id: format!("{prefix}_{}{index:02x}", self.stem),
            kind,
            text: String::new(),
            logprobs: Vec::new(),
        };
        let item = self.item(&open, Status::InProgress);
        let added = json!({"output_index": index, "item": item});
        events.push(self.event("response.output_item.added", added));
        if let Some((name, key)) = self.part_event(&open.kind, Edge::Added) {
            let fields = at(&open, index, key, json!({"part": self.part(&open)}));
            events.push(self.event(name, fields));
        }
        self.open = Some(open);
    }

    fn grow(&mut self, text: &str, logprobs: Vec<Value>, events: &mut Vec<Event>) {
        let Some(mut open) = self.open.take() else {
            return;
        };
        open.text.push_str(text);
        let index = self.done.len();
        let named = match &open.kind {
            Kind::Reasoning if self.summary => Some((
                "response.reasoning_summary_text.delta",
                Some("summary_index"),
            )),
            Kind::Reasoning => Some(("response.reasoning_text.delta", Some("content_index"))),
            Kind::Message => Some(("response.output_text.delta", Some("content_index"))),
            Kind::Call { spoken, .. } => match spoken {
                Spoken::Function { .. } => Some(("response.function_call_arguments.delta", None)),
                // The free text is inside the arguments; it is told once they are complete.
                Spoken::Custom { .. } => None,
            },
        };
        if let Some((name, key)) = named {
            let mut fields = json!({"delta": text});
            if matches!(open.kind, Kind::Message) {
                fields["logprobs"] = json!(logprobs);
            }
            let fields = at(&open, index, key, fields);
            events.push(self.event(name, fields));
        }
        open.logprobs.extend(logprobs);
        self.open = Some(open);
    }

    fn close(&mut self, status: Status, events: &mut Vec<Event>) {
        let Some(open) = self.open.take() else {
            return;
        };
        let index = self.done.len();
        let item = self.item(&open, status);
        match (&open.kind, &item) {
            (_, Item::CustomToolCall { input, .. }) => {
                let delta = at(&open, index, None, json!({"delta": input}));
                events.push(self.event("response.custom_tool_call_input.delta", delta));
                let done = at(&open, index, None, json!({"input": input}));
                events.push(self.event("response.custom_tool_call_input.done", done));
            }
            (
                Kind::Call { .. },
                Item::FunctionCall {
                    name, arguments, ..
                },
            ) => {
                let fields = json!({"name": name, "arguments": arguments});
                let done = at(&open, index, None, fields);
                events.push(self.event("response.function_call_arguments.done", done));
            }
            (kind, _) => {
                let (name, key) = match kind {
                    Kind::Reasoning if self.summary => {
                        ("response.reasoning_summary_text.done", "summary_index")
                    }
                    Kind::Reasoning => ("response.reasoning_text.done", "content_index"),
                    _ => ("response.output_text.done", "content_index"),
                };
                let mut fields = json!({"text": open.text});
                if matches!(kind, Kind::Message) {
                    fields["logprobs"] = json!(open.logprobs);
                }
                let done = at(&open, index, Some(key), fields);
                events.push(self.event(name, done));
            }
        }
        if let Some((name, key)) = self.part_event(&open.kind, Edge::Done) {
            let fields = at(&open, index, key, json!({"part": self.part(&open)}));
            events.push(self.event(name, fields));
        }
        let done = json!({"output_index": index, "item": item});
        events.push(self.event("response.output_item.done", done));
        self.done.push(item);
    }

    /// The event that begins or ends the part of an item that has parts.
    fn part_event(&self, kind: &Kind, edge: Edge) -> Option<(&'static str, Option<&'static str>)> {
        let is_summary = match kind {
            Kind::Call { .. } => return None,
            Kind::Reasoning => self.summary,
            Kind::Message => false,
        };
        Some(match (is_summary, edge) {
            (true, Edge::Added) => (
                "response.reasoning_summary_part.added",
                Some("summary_index"),
            ),
            (true, Edge::Done) => (
                "response.reasoning_summary_part.done",
                Some("summary_index"),
            ),
            (false, Edge::Added) => ("response.content_part.added", Some("content_index")),
            (false, Edge::Done) => ("response.content_part.done", Some("content_index")),
        })
    }

    fn part(&self, open: &Open) -> Part {
        match open.kind {
            Kind::Reasoning if self.summary => Part::SummaryText {
                text: open.text.clone(),
            },
            Kind::Reasoning => Part::ReasoningText {
                text: open.text.clone(),
            },
            Kind::Message | Kind::Call { .. } => Part::output(&open.text, &open.logprobs),
        }
    }

    /// The item as it stands; one that has only begun holds no parts.
    fn item(&self, open: &Open, status: Status) -> Item {
        let id = open.id.clone();
        let has_begun = status != Status::InProgress;
        let parts = || has_begun.then(|| self.part(open)).into_iter().collect();
        match &open.kind {
            Kind::Reasoning => {
                let (summary, content) = match self.summary {
                    true => (parts(), Vec::new()),
                    false => (Vec::new(), parts()),
                };
                Item::Reasoning {
                    id,
                    summary,
                    content,
                    encrypted_content: None,
                    status,
                }
            }
            Kind::Message => Item::Message {
                id,
                status,
                role: "assistant",
                content: parts(),
            },
            Kind::Call { call_id, spoken } => match spoken {
                Spoken::Function { name, namespace } => Item::FunctionCall {
                    id,
                    call_id: call_id.clone(),
                    name: name.clone(),
                    namespace: namespace.clone(),
                    arguments: open.text.clone(),
                    status,
                },
                Spoken::Custom { name } => Item::CustomToolCall {
                    id,
                    call_id: call_id.clone(),
                    name: name.clone(),
                    input: free_text(&open.text),
                    status,
                },
            },
        }
    }
}

#[derive(Clone, Copy)]
enum Edge {
    Added,
    Done,
}

/// Where an event belongs, and its own fields behind that. `key` names the index of its part, which is 0.
fn at(open: &Open, output_index: usize, key: Option<&str>, own: Value) -> Value {
    let mut fields = json!({"item_id": open.id, "output_index": output_index});
    if let Some(key) = key {
        fields[key] = json!(0);
    }
    if let (Value::Object(fields), Value::Object(own)) = (&mut fields, own) {
        fields.extend(own);
    }
    fields
}

/// The free text in the arguments of a tool that takes nothing else; what is no such object is the text itself.
fn free_text(arguments: &str) -> String {
    match serde_json::from_str::<Value>(arguments) {
        Ok(Value::Object(map)) => match map.get("input") {
            Some(Value::String(text)) => text.clone(),
            _ => arguments.to_owned(),
        },
        _ => arguments.to_owned(),
    }
}
