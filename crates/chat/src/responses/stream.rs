//! Stream events: an item starts with its first byte; each is added once and done once.

use std::sync::Arc;

use serde_json::{Value, json};

use super::response::{ContentPart, ItemStatus, OutputItem};
use super::tools::{ClientToolName, ToolNames};
use crate::reply::{ReplyDelta, TokenLogprob};

/// An event; its data repeats the name as `type` and carries a sequence number.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponsesEvent {
    /// The event's name.
    pub name: &'static str,
    /// One JSON object.
    pub data: Value,
}

/// Turns reply deltas into items and their events.
#[derive(Debug)]
pub struct OutputItemStream {
    names: Arc<ToolNames>,
    summary: bool,
    /// Stem of the item ids.
    stem: String,
    sequence: u64,
    done: Vec<OutputItem>,
    open: Option<OpenItem>,
}

/// The item that is open.
#[derive(Debug)]
struct OpenItem {
    id: String,
    kind: OpenItemKind,
    /// Its text, reasoning or arguments so far.
    text: String,
    /// Logprobs of its text, if requested.
    logprobs: Vec<Value>,
}

#[derive(Debug)]
enum OpenItemKind {
    Reasoning,
    Message,
    Call {
        call_id: String,
        client_name: ClientToolName,
    },
}

impl OutputItemStream {
    /// No items yet. `stem` makes ids unique across responses; `summary` returns reasoning as a
    /// summary.
    pub fn new(names: Arc<ToolNames>, summary: bool, stem: String) -> OutputItemStream {
        OutputItemStream {
            names,
            summary,
            stem,
            sequence: 0,
            done: Vec::new(),
            open: None,
        }
    }

    /// The next event of the stream, with these fields.
    pub fn next_event(&mut self, name: &'static str, fields: Value) -> ResponsesEvent {
        let mut data = json!({"type": name, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(data), Value::Object(fields)) = (&mut data, fields) {
            data.extend(fields);
        }
        ResponsesEvent { name, data }
    }

    /// The items that are done.
    pub fn done(&self) -> &[OutputItem] {
        &self.done
    }

    /// Adds the next delta.
    pub fn push(&mut self, piece: ReplyDelta) -> Vec<ResponsesEvent> {
        self.push_with(piece, Vec::new())
    }

    /// Adds the next delta with the logprobs of its tokens; only text carries logprobs.
    pub fn push_with(
        &mut self,
        piece: ReplyDelta,
        logprobs: Vec<TokenLogprob>,
    ) -> Vec<ResponsesEvent> {
        let logprobs: Vec<Value> = logprobs.iter().map(|token| json!(token)).collect();
        let mut events = Vec::new();
        match piece {
            ReplyDelta::Reasoning(text) => {
                if !matches!(&self.open, Some(open) if matches!(open.kind, OpenItemKind::Reasoning))
                {
                    self.begin(OpenItemKind::Reasoning, "rs", &mut events);
                }
                self.append(&text, Vec::new(), &mut events);
            }
            ReplyDelta::Content(text) => {
                if !matches!(&self.open, Some(open) if matches!(open.kind, OpenItemKind::Message)) {
                    self.begin(OpenItemKind::Message, "msg", &mut events);
                }
                self.append(&text, logprobs, &mut events);
            }
            ReplyDelta::ToolCall { id, name, .. } => {
                let client_name = self.names.client_name(&name);
                let prefix = match client_name {
                    ClientToolName::Function { .. } => "fc",
                    ClientToolName::Custom { .. } => "ctc",
                };
                let call_id = id;
                self.begin(
                    OpenItemKind::Call {
                        call_id,
                        client_name,
                    },
                    prefix,
                    &mut events,
                );
            }
            ReplyDelta::ToolArguments { fragment, .. } => {
                self.append(&fragment, Vec::new(), &mut events)
            }
        }
        events
    }

    /// Closes the open item; `hit_token_limit` marks it as incomplete.
    pub fn finish(&mut self, hit_token_limit: bool) -> Vec<ResponsesEvent> {
        let mut events = Vec::new();
        let status = if hit_token_limit {
            ItemStatus::Incomplete
        } else {
            ItemStatus::Completed
        };
        self.close(status, &mut events);
        events
    }

    fn begin(&mut self, kind: OpenItemKind, prefix: &str, events: &mut Vec<ResponsesEvent>) {
        self.close(ItemStatus::Completed, events);
        let index = self.done.len();
        let open = OpenItem {
            id: format!("{prefix}_{}{index:02x}", self.stem),
            kind,
            text: String::new(),
            logprobs: Vec::new(),
        };
        let item = self.item(&open, ItemStatus::InProgress);
        let added = json!({"output_index": index, "item": item});
        events.push(self.next_event("response.output_item.added", added));
        if let Some((name, key)) = self.part_event(&open.kind, PartEdge::Added) {
            let fields = at(&open, index, key, json!({"part": self.part(&open)}));
            events.push(self.next_event(name, fields));
        }
        self.open = Some(open);
    }

    fn append(&mut self, text: &str, logprobs: Vec<Value>, events: &mut Vec<ResponsesEvent>) {
        let Some(mut open) = self.open.take() else {
            return;
        };
        open.text.push_str(text);
        let index = self.done.len();
        let named = match &open.kind {
            OpenItemKind::Reasoning if self.summary => Some((
                "response.reasoning_summary_text.delta",
                Some("summary_index"),
            )),
            OpenItemKind::Reasoning => {
                Some(("response.reasoning_text.delta", Some("content_index")))
            }
            OpenItemKind::Message => Some(("response.output_text.delta", Some("content_index"))),
            OpenItemKind::Call { client_name, .. } => match client_name {
                ClientToolName::Function { .. } => {
                    Some(("response.function_call_arguments.delta", None))
                }
                // Free text is inside the arguments and is sent once they are complete.
                ClientToolName::Custom { .. } => None,
            },
        };
        if let Some((name, key)) = named {
            let mut fields = json!({"delta": text});
            if matches!(open.kind, OpenItemKind::Message) {
                fields["logprobs"] = json!(logprobs);
            }
            let fields = at(&open, index, key, fields);
            events.push(self.next_event(name, fields));
        }
        open.logprobs.extend(logprobs);
        self.open = Some(open);
    }

    fn close(&mut self, status: ItemStatus, events: &mut Vec<ResponsesEvent>) {
        let Some(open) = self.open.take() else {
            return;
        };
        let index = self.done.len();
        let item = self.item(&open, status);
        match (&open.kind, &item) {
            (_, OutputItem::CustomToolCall { input, .. }) => {
                let delta = at(&open, index, None, json!({"delta": input}));
                events.push(self.next_event("response.custom_tool_call_input.delta", delta));
                let done = at(&open, index, None, json!({"input": input}));
                events.push(self.next_event("response.custom_tool_call_input.done", done));
            }
            (
                OpenItemKind::Call { .. },
                OutputItem::FunctionCall {
                    name, arguments, ..
                },
            ) => {
                let fields = json!({"name": name, "arguments": arguments});
                let done = at(&open, index, None, fields);
                events.push(self.next_event("response.function_call_arguments.done", done));
            }
            (kind, _) => {
                let (name, key) = match kind {
                    OpenItemKind::Reasoning if self.summary => {
                        ("response.reasoning_summary_text.done", "summary_index")
                    }
                    OpenItemKind::Reasoning => ("response.reasoning_text.done", "content_index"),
                    _ => ("response.output_text.done", "content_index"),
                };
                let mut fields = json!({"text": open.text});
                if matches!(kind, OpenItemKind::Message) {
                    fields["logprobs"] = json!(open.logprobs);
                }
                let done = at(&open, index, Some(key), fields);
                events.push(self.next_event(name, done));
            }
        }
        if let Some((name, key)) = self.part_event(&open.kind, PartEdge::Done) {
            let fields = at(&open, index, key, json!({"part": self.part(&open)}));
            events.push(self.next_event(name, fields));
        }
        let done = json!({"output_index": index, "item": item});
        events.push(self.next_event("response.output_item.done", done));
        self.done.push(item);
    }

    /// The event that starts or ends an item's part.
    fn part_event(
        &self,
        kind: &OpenItemKind,
        edge: PartEdge,
    ) -> Option<(&'static str, Option<&'static str>)> {
        let is_summary = match kind {
            OpenItemKind::Call { .. } => return None,
            OpenItemKind::Reasoning => self.summary,
            OpenItemKind::Message => false,
        };
        Some(match (is_summary, edge) {
            (true, PartEdge::Added) => (
                "response.reasoning_summary_part.added",
                Some("summary_index"),
            ),
            (true, PartEdge::Done) => (
                "response.reasoning_summary_part.done",
                Some("summary_index"),
            ),
            (false, PartEdge::Added) => ("response.content_part.added", Some("content_index")),
            (false, PartEdge::Done) => ("response.content_part.done", Some("content_index")),
        })
    }

    fn part(&self, open: &OpenItem) -> ContentPart {
        match open.kind {
            OpenItemKind::Reasoning if self.summary => ContentPart::SummaryText {
                text: open.text.clone(),
            },
            OpenItemKind::Reasoning => ContentPart::ReasoningText {
                text: open.text.clone(),
            },
            OpenItemKind::Message | OpenItemKind::Call { .. } => {
                ContentPart::output(&open.text, &open.logprobs)
            }
        }
    }

    /// The item so far; a new one has no parts.
    fn item(&self, open: &OpenItem, status: ItemStatus) -> OutputItem {
        let id = open.id.clone();
        let has_begun = status != ItemStatus::InProgress;
        let parts = || has_begun.then(|| self.part(open)).into_iter().collect();
        match &open.kind {
            OpenItemKind::Reasoning => {
                let (summary, content) = if self.summary {
                    (parts(), Vec::new())
                } else {
                    (Vec::new(), parts())
                };
                OutputItem::Reasoning {
                    id,
                    summary,
                    content,
                    status,
                }
            }
            OpenItemKind::Message => OutputItem::Message {
                id,
                status,
                role: "assistant",
                content: parts(),
            },
            OpenItemKind::Call {
                call_id,
                client_name,
            } => match client_name {
                ClientToolName::Function { name, namespace } => OutputItem::FunctionCall {
                    id,
                    call_id: call_id.clone(),
                    name: name.clone(),
                    namespace: namespace.clone(),
                    arguments: open.text.clone(),
                    status,
                },
                ClientToolName::Custom { name } => OutputItem::CustomToolCall {
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
enum PartEdge {
    Added,
    Done,
}

/// An event's position and its fields. `key` names the index of its part, which is 0.
fn at(open: &OpenItem, output_index: usize, key: Option<&str>, own: Value) -> Value {
    let mut fields = json!({"item_id": open.id, "output_index": output_index});
    if let Some(key) = key {
        fields[key] = json!(0);
    }
    if let (Value::Object(fields), Value::Object(own)) = (&mut fields, own) {
        fields.extend(own);
    }
    fields
}

/// The free text in a custom tool's arguments; other arguments are the text themselves.
fn free_text(arguments: &str) -> String {
    match serde_json::from_str::<Value>(arguments) {
        Ok(Value::Object(map)) => match map.get("input") {
            Some(Value::String(text)) => text.clone(),
            _ => arguments.to_owned(),
        },
        _ => arguments.to_owned(),
    }
}
