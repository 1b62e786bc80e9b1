//! Stream events: a block starts with its first byte and ends before the next block.

use serde::Serialize;
use serde_json::Map;

use super::response::{ContentBlock, MessageResponse, MessageUsage, StopReason, tool_use_id};
use crate::reply::ReplyDelta;
use crate::request::ReasoningVisibility;

/// One event; its name is the value of its field `type`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesEvent {
    /// The first event.
    MessageStart {
        /// Without content.
        message: MessageResponse,
    },
    /// Keeps the connection alive.
    Ping {},
    /// A block starts, empty.
    ContentBlockStart {
        /// Which block, from 0.
        index: usize,
        /// Its kind.
        content_block: ContentBlock,
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
        delta: MessageDelta,
        /// Final counts.
        usage: MessageUsage,
    },
    /// The last event.
    MessageStop {},
}

impl MessagesEvent {
    /// The event's name.
    pub fn name(&self) -> &'static str {
        match self {
            MessagesEvent::MessageStart { .. } => "message_start",
            MessagesEvent::Ping {} => "ping",
            MessagesEvent::ContentBlockStart { .. } => "content_block_start",
            MessagesEvent::ContentBlockDelta { .. } => "content_block_delta",
            MessagesEvent::ContentBlockStop { .. } => "content_block_stop",
            MessagesEvent::MessageDelta { .. } => "message_delta",
            MessagesEvent::MessageStop {} => "message_stop",
        }
    }
}

/// An increment of a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlockDelta {
    /// More reasoning.
    ThinkingDelta {
        /// The next stretch.
        thinking: String,
    },
    /// The signature, once, at the end of reasoning.
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
pub struct MessageDelta {
    /// The reason.
    pub stop_reason: StopReason,
    /// The stop string that ended the text.
    pub stop_sequence: Option<String>,
}

/// The block that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    Tool,
}

/// Turns reply deltas into block events.
#[derive(Debug)]
pub struct ContentBlockStream {
    open: Option<OpenBlock>,
    /// Index of the open block, or of the next one.
    index: usize,
    signature: String,
    /// Whether reasoning is shown.
    visibility: ReasoningVisibility,
}

impl ContentBlockStream {
    /// No block yet; reasoning is signed with `signature`.
    pub fn new(signature: String) -> ContentBlockStream {
        ContentBlockStream {
            open: None,
            index: 0,
            signature,
            visibility: ReasoningVisibility::Shown,
        }
    }

    /// Shows reasoning as `visibility` says.
    pub fn with_reasoning(self, visibility: ReasoningVisibility) -> ContentBlockStream {
        ContentBlockStream { visibility, ..self }
    }

    /// Adds the next delta.
    pub fn push(&mut self, piece: ReplyDelta) -> Vec<MessagesEvent> {
        let mut events = Vec::new();
        let delta = match piece {
            ReplyDelta::Reasoning(_) if self.visibility == ReasoningVisibility::Excluded => {
                return events;
            }
            ReplyDelta::Reasoning(thinking) => {
                if self.open != Some(OpenBlock::Thinking) {
                    let empty = ContentBlock::Thinking {
                        thinking: String::new(),
                        signature: String::new(),
                    };
                    self.begin(OpenBlock::Thinking, empty, &mut events);
                }
                if self.visibility == ReasoningVisibility::Omitted {
                    return events;
                }
                BlockDelta::ThinkingDelta { thinking }
            }
            ReplyDelta::Content(text) => {
                if self.open != Some(OpenBlock::Text) {
                    let empty = ContentBlock::Text {
                        text: String::new(),
                    };
                    self.begin(OpenBlock::Text, empty, &mut events);
                }
                BlockDelta::TextDelta { text }
            }
            ReplyDelta::ToolCall { id, name, .. } => {
                let empty = ContentBlock::ToolUse {
                    id: tool_use_id(&id),
                    name,
                    input: Map::new(),
                };
                self.begin(OpenBlock::Tool, empty, &mut events);
                return events;
            }
            ReplyDelta::ToolArguments { fragment, .. } => BlockDelta::InputJsonDelta {
                partial_json: fragment,
            },
        };
        let index = self.index;
        events.push(MessagesEvent::ContentBlockDelta { index, delta });
        events
    }

    /// Closes the open block.
    pub fn finish(&mut self) -> Vec<MessagesEvent> {
        let mut events = Vec::new();
        self.close(&mut events);
        events
    }

    fn begin(
        &mut self,
        kind: OpenBlock,
        content_block: ContentBlock,
        events: &mut Vec<MessagesEvent>,
    ) {
        self.close(events);
        self.open = Some(kind);
        let index = self.index;
        events.push(MessagesEvent::ContentBlockStart {
            index,
            content_block,
        });
    }

    fn close(&mut self, events: &mut Vec<MessagesEvent>) {
        let Some(kind) = self.open.take() else {
            return;
        };
        let index = self.index;
        if kind == OpenBlock::Thinking {
            let signature = self.signature.clone();
            let delta = BlockDelta::SignatureDelta { signature };
            events.push(MessagesEvent::ContentBlockDelta { index, delta });
        }
        events.push(MessagesEvent::ContentBlockStop { index });
        self.index += 1;
    }
}
