//! What a client gets as events: blocks that begin when their first byte exists and end before the next.

use serde::Serialize;
use serde_json::Map;

use super::response::{Block, Message, MessageUsage, StopReason, tool_use_id};
use crate::reply::Piece;

/// One event; its name is the value of its field `type`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The first event.
    MessageStart {
        /// Without content.
        message: Message,
    },
    /// Nothing; keeps the connection awake.
    Ping {},
    /// A block begins, empty.
    ContentBlockStart {
        /// Which block, from 0.
        index: usize,
        /// Its kind.
        content_block: Block,
    },
    /// A block grows.
    ContentBlockDelta {
        /// Which block.
        index: usize,
        /// By what.
        delta: BlockDelta,
    },
    /// A block is complete.
    ContentBlockStop {
        /// Which block.
        index: usize,
    },
    /// How the message ended.
    MessageDelta {
        /// Why it ended.
        delta: Ending,
        /// Final counts.
        usage: MessageUsage,
    },
    /// The last event.
    MessageStop {},
}

impl Event {
    /// The event's name.
    pub fn name(&self) -> &'static str {
        match self {
            Event::MessageStart { .. } => "message_start",
            Event::Ping {} => "ping",
            Event::ContentBlockStart { .. } => "content_block_start",
            Event::ContentBlockDelta { .. } => "content_block_delta",
            Event::ContentBlockStop { .. } => "content_block_stop",
            Event::MessageDelta { .. } => "message_delta",
            Event::MessageStop {} => "message_stop",
        }
    }
}

/// What a block grows by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlockDelta {
    /// More thinking.
    ThinkingDelta {
        /// The next stretch.
        thinking: String,
    },
    /// The signature, once, at the end of thinking.
    SignatureDelta {
        /// Opaque.
        signature: String,
    },
    /// More text.
    TextDelta {
        /// The next stretch.
        text: String,
    },
    /// More of a tool's input; all stretches joined are one JSON object.
    InputJsonDelta {
        /// The next stretch.
        partial_json: String,
    },
}

/// Why a message ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ending {
    /// The reason.
    pub stop_reason: StopReason,
    /// The stop string that ended the text.
    pub stop_sequence: Option<String>,
}

/// The block that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    Tool,
}

/// Turns pieces of a reply into events of blocks.
#[derive(Debug)]
pub struct Blocks {
    open: Option<Open>,
    /// Index of the open block, or of the next one.
    index: usize,
    signature: String,
    /// What was thought is not told, only that something was.
    omits_thinking: bool,
}

impl Blocks {
    /// No block yet; thinking will be signed with `signature`.
    pub fn new(signature: String) -> Blocks {
        Blocks {
            open: None,
            index: 0,
            signature,
            omits_thinking: false,
        }
    }

    /// The same, with the text of thinking left out.
    pub fn omitting_thinking(self, omits_thinking: bool) -> Blocks {
        Blocks {
            omits_thinking,
            ..self
        }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: Piece) -> Vec<Event> {
        let mut events = Vec::new();
        let delta = match piece {
            Piece::Reasoning(thinking) => {
                if self.open != Some(Open::Thinking) {
                    let empty = Block::Thinking {
                        thinking: String::new(),
                        signature: String::new(),
                    };
                    self.begin(Open::Thinking, empty, &mut events);
                }
                if self.omits_thinking {
                    return events;
                }
                BlockDelta::ThinkingDelta { thinking }
            }
            Piece::Content(text) => {
                if self.open != Some(Open::Text) {
                    let empty = Block::Text {
                        text: String::new(),
                    };
                    self.begin(Open::Text, empty, &mut events);
                }
                BlockDelta::TextDelta { text }
            }
            Piece::ToolCall { id, name, .. } => {
                let empty = Block::ToolUse {
                    id: tool_use_id(&id),
                    name,
                    input: Map::new(),
                };
                self.begin(Open::Tool, empty, &mut events);
                return events;
            }
            Piece::ToolArguments { fragment, .. } => BlockDelta::InputJsonDelta {
                partial_json: fragment,
            },
        };
        let index = self.index;
        events.push(Event::ContentBlockDelta { index, delta });
        events
    }

    /// Closes what is open.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.close(&mut events);
        events
    }

    fn begin(&mut self, kind: Open, content_block: Block, events: &mut Vec<Event>) {
        self.close(events);
        self.open = Some(kind);
        let index = self.index;
        events.push(Event::ContentBlockStart {
            index,
            content_block,
        });
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        let Some(kind) = self.open.take() else {
            return;
        };
        let index = self.index;
        if kind == Open::Thinking {
            let signature = self.signature.clone();
            let delta = BlockDelta::SignatureDelta { signature };
            events.push(Event::ContentBlockDelta { index, delta });
        }
        events.push(Event::ContentBlockStop { index });
        self.index += 1;
    }
}
