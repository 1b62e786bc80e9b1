//! From a reply's tokens to its parts: thinking, text, tool calls.

use crate::openai::response::{FunctionOut, ToolCallOut};

/// A part of a reply, in the order in which it became certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// More thinking.
    Reasoning(String),
    /// More text.
    Content(String),
    /// A tool call begins.
    ToolCall {
        /// Which call of the reply, from 0.
        index: usize,
        /// `call_` and 24 hexadecimal digits.
        id: String,
        /// The declared tool.
        name: String,
    },
    /// More of a call's arguments; all fragments of one call joined are a JSON object.
    ToolArguments {
        /// Which call of the reply.
        index: usize,
        /// The next stretch of JSON.
        fragment: String,
    },
}

/// A whole reply, for answers in one piece.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reply {
    /// All thinking.
    pub reasoning: String,
    /// All text.
    pub content: String,
    /// All calls.
    pub tool_calls: Vec<ToolCallOut>,
}

impl Reply {
    /// Adds the next piece.
    pub fn push(&mut self, piece: Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::Content(text) => self.content.push_str(&text),
            Piece::ToolCall { id, name, .. } => self.tool_calls.push(ToolCallOut {
                id,
                kind: "function",
                function: FunctionOut {
                    name,
                    arguments: String::new(),
                },
            }),
            Piece::ToolArguments { index, fragment } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.function.arguments.push_str(&fragment);
                }
            }
        }
    }
}

impl Extend<Piece> for Reply {
    fn extend<T: IntoIterator<Item = Piece>>(&mut self, pieces: T) {
        pieces.into_iter().for_each(|piece| self.push(piece));
    }
}
