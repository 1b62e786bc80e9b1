//! From a reply's tokens to its parts: thinking, text, tool calls.

mod ids;
mod ledger;
mod machine;
mod markdown;

use std::collections::HashSet;
use std::sync::Arc;

use contract::{TokenId, TokenKind};

use self::ledger::Ledger;
pub use self::ledger::Place;
use self::machine::Machine;
use crate::conversation::{Message, Role, ToolCall};
use crate::detokenize::{Detokenizer, is_visible};
use crate::openai::request::parse_arguments;
use crate::openai::response::{FinishReason, FunctionOut, ToolCallOut};
use crate::reasoning;
use crate::tokenizer::Tokenizer;
pub use crate::tools::End;
use crate::tools::ToolSet;

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
    /// More of a call's arguments; all fragments of one call joined are a JSON object, unless the text
    /// ended inside the call.
    ToolArguments {
        /// Which call of the reply.
        index: usize,
        /// The next stretch of JSON.
        fragment: String,
    },
}

/// What to look for in a reply.
#[derive(Debug, Clone, Default)]
pub struct ReplyConfig {
    /// The prompt left a thinking block open.
    pub starts_in_reasoning: bool,
    /// Tell thinking from text. Otherwise everything, tags included, is text.
    pub split_reasoning: bool,
    /// Tools whose calls are recognised; none leaves all text as it is.
    pub tools: ToolSet,
    /// Whether a reply may hold several calls. Otherwise it ends with the first.
    pub parallel_tool_calls: bool,
    /// Strings that end the text. They are looked for in the text alone, not in thinking or calls.
    pub stop: Vec<String>,
    /// Stop strings count only once so many tokens have come.
    pub min_tokens: usize,
    /// Call ids are made from this.
    pub call_id_seed: u64,
}

/// Why the reply is over although the model would go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// This stop string came up.
    StopString(String),
    /// A call is complete, and only one was wanted.
    AfterCall,
}

/// What a reply came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Tokens taken in, hidden ones included; none behind a stop.
    pub tokens: usize,
    /// Tokens of thinking.
    pub reasoning_tokens: usize,
    /// Tokens of text.
    pub content_tokens: usize,
    /// Complete calls.
    pub calls: usize,
    /// Calls that had to be mended, and text that was no call after all though it began like one.
    pub malformed: usize,
    /// The text ended inside a call.
    pub open_call: bool,
}

impl Summary {
    /// Why the choice ended, given how its tokens ended. A complete call outranks everything.
    pub fn finish_reason(&self, end: End) -> FinishReason {
        match end {
            _ if self.calls > 0 => FinishReason::ToolCalls,
            End::Eos | End::Stopped => FinishReason::Stop,
            End::Length => FinishReason::Length,
        }
    }
}

/// Takes one choice's tokens and gives its parts as soon as they are certain.
///
/// The parts do not depend on how the text is cut into tokens or how tokens are grouped into calls of
/// [`push`](ReplyParser::push), except in how finely they are cut themselves. Nothing is lost but tags,
/// stop strings with what follows them, and blanks beside tags.
#[derive(Debug)]
pub struct ReplyParser {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    /// Control tokens whose text is a tag we look for.
    tags: HashSet<TokenId>,
    machine: Machine,
    ledger: Ledger,
    /// Bytes of visible text so far.
    n_bytes: usize,
    summary: Summary,
    /// Settled tokens that were not asked for yet.
    placed: Vec<(usize, Place)>,
    is_finished: bool,
}

impl ReplyParser {
    /// A parser at the start of a reply.
    pub fn new(tokenizer: Arc<Tokenizer>, config: ReplyConfig) -> ReplyParser {
        let mut tags: Vec<&str> = Vec::new();
        if config.split_reasoning {
            tags.extend([reasoning::OPEN, reasoning::CLOSE]);
        }
        if !config.tools.is_empty() {
            tags.extend(["<tool_call>", "</tool_call>"]);
        }
        let tags = tags
            .into_iter()
            .filter_map(|tag| tokenizer.id_of(tag))
            .filter(|id| tokenizer.kind(*id) == TokenKind::Control)
            .collect();
        ReplyParser {
            detokenizer: Detokenizer::new(tokenizer.clone()),
            tokenizer,
            tags,
            machine: Machine::new(config),
            ledger: Ledger::default(),
            n_bytes: 0,
            summary: Summary::default(),
            placed: Vec::new(),
            is_finished: false,
        }
    }

    /// Takes the next tokens. After a stop, or after [`finish`](ReplyParser::finish), nothing comes.
    pub fn push(&mut self, tokens: &[TokenId]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for token in tokens {
            if self.stopped().is_some() || self.is_finished {
                break;
            }
            self.summary.tokens += 1;
            let mut text = String::new();
            if self.tags.contains(token) {
                self.detokenizer.push_visible(*token, &mut text);
            } else if is_visible(&self.tokenizer, *token) {
                text = self.detokenizer.push(&[*token]);
            }
            let start = self.n_bytes;
            self.n_bytes += text.len();
            self.ledger
                .enter(start, self.n_bytes, !self.detokenizer.is_waiting());
            self.machine
                .take(&text, self.summary.tokens, &mut self.ledger, &mut pieces);
        }
        self.settle();
        merge(pieces)
    }

    /// Why the reply is over, if it is over before its tokens are: the choice is to be cancelled and then
    /// finished with [`End::Stopped`].
    pub fn stopped(&self) -> Option<&Stop> {
        self.machine.stopped()
    }

    /// Gives what was held back. Calls after the first give nothing.
    pub fn finish(&mut self, end: End) -> Vec<Piece> {
        if self.is_finished {
            return Vec::new();
        }
        self.is_finished = true;
        let mut pieces = Vec::new();
        let text = self.detokenizer.finish();
        self.n_bytes += text.len();
        self.ledger.complete(self.n_bytes);
        self.machine
            .take(&text, self.summary.tokens, &mut self.ledger, &mut pieces);
        self.machine.finish(end, &mut self.ledger, &mut pieces);
        self.ledger.finish();
        self.settle();
        merge(pieces)
    }

    /// Where tokens went, by their ordinal in this choice, in order; each token once, as soon as all of its
    /// text is settled.
    pub fn take_placed(&mut self) -> Vec<(usize, Place)> {
        std::mem::take(&mut self.placed)
    }

    /// What the reply has come to so far.
    pub fn summary(&self) -> Summary {
        let machine = &self.machine;
        Summary {
            calls: machine.calls(),
            malformed: machine.malformed(),
            open_call: machine.is_inside_call(),
            ..self.summary
        }
    }

    fn settle(&mut self) {
        let placed = self.ledger.take();
        for (_, place) in &placed {
            match place {
                Place::Reasoning => self.summary.reasoning_tokens += 1,
                Place::Content => self.summary.content_tokens += 1,
                Place::Hidden | Place::Call => {}
            }
        }
        self.placed.extend(placed);
    }
}

/// Joins neighbours of one kind.
fn merge(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (merged.last_mut(), &piece) {
            (Some(Piece::Content(text)), Piece::Content(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more)) => text.push_str(more),
            (
                Some(Piece::ToolArguments { index, fragment }),
                Piece::ToolArguments {
                    index: other,
                    fragment: more,
                },
            ) if index == other => fragment.push_str(more),
            _ => merged.push(piece),
        }
    }
    merged
}

/// The token that opens a call, if the vocabulary has one: banning it keeps a model from calling.
pub fn call_opening_token(tokenizer: &Tokenizer) -> Option<TokenId> {
    tokenizer.id_of("<tool_call>")
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

impl Reply {
    /// The message that a client sends back for this reply; with its thoughts where `thoughts` says so and there are any.
    pub fn message(&self, thoughts: bool) -> Message {
        let call = |call: &ToolCallOut| ToolCall {
            id: Some(call.id.clone()),
            name: call.function.name.clone(),
            arguments: parse_arguments(&call.function.arguments, &call.function.name),
        };
        Message {
            reasoning: (thoughts && !self.reasoning.is_empty()).then(|| self.reasoning.clone()),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            ..Message::new(Role::Assistant, self.content.as_str())
        }
    }
}

impl Extend<Piece> for Reply {
    fn extend<T: IntoIterator<Item = Piece>>(&mut self, pieces: T) {
        pieces.into_iter().for_each(|piece| self.push(piece));
    }
}

#[cfg(test)]
mod tests;
