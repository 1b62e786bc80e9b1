//! From a reply's tokens to its parts: thinking, text, tool calls.

mod attribution;
mod call_ids;
mod markdown;
mod state_machine;
mod usage;

use std::collections::HashSet;
use std::sync::Arc;

use contract::{TokenId, TokenKind};

use self::attribution::TokenAttribution;
pub use self::attribution::TokenPart;
use self::state_machine::ReplyStateMachine;
pub use self::usage::{FinishReason, SpeculationTimings, Timings, TokenLogprob, TopLogprob, Usage};
use crate::conversation::{Message, Role, ToolCall, parse_arguments};
use crate::detokenize::{Detokenizer, is_visible};
use crate::tokenizer::Tokenizer;
pub use crate::tools::ReplyEnd;
use crate::tools::ToolSet;

/// A part of a reply, in the order in which it became certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyDelta {
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
pub enum EarlyStop {
    /// This stop string came up.
    StopString(String),
    /// A call is complete, and only one was wanted.
    AfterCall,
}

/// What a reply came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplyStats {
    /// Tokens taken in, hidden ones included; none behind a stop.
    pub tokens: usize,
    /// Tokens of thinking.
    pub reasoning_tokens: usize,
    /// Tokens of text.
    pub content_tokens: usize,
    /// Complete calls.
    pub calls: usize,
    /// Calls that had to be repaired, and text that was no call after all though it began like one.
    pub malformed: usize,
    /// The text ended inside a call.
    pub open_call: bool,
}

impl ReplyStats {
    /// Why the choice ended, given how its tokens ended. A complete call outranks everything.
    pub fn finish_reason(&self, end: ReplyEnd) -> FinishReason {
        match end {
            _ if self.calls > 0 => FinishReason::ToolCalls,
            ReplyEnd::Eos | ReplyEnd::Stopped => FinishReason::Stop,
            ReplyEnd::Length => FinishReason::Length,
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
    machine: ReplyStateMachine,
    attribution: TokenAttribution,
    /// Bytes of visible text so far.
    visible_bytes: usize,
    summary: ReplyStats,
    /// Settled tokens that were not asked for yet.
    attributed: Vec<(usize, TokenPart)>,
    is_finished: bool,
}

impl ReplyParser {
    /// A parser at the start of a reply.
    pub fn new(tokenizer: Arc<Tokenizer>, config: ReplyConfig) -> ReplyParser {
        let markup = Arc::clone(tokenizer.markup());
        let mut tags: Vec<&str> = Vec::new();
        if config.split_reasoning {
            tags.extend([&*markup.reasoning.open, &*markup.reasoning.close]);
        }
        if !config.tools.is_empty() {
            tags.extend([&*markup.tool_calls.open, &*markup.tool_calls.close]);
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
            machine: ReplyStateMachine::new(config, markup),
            attribution: TokenAttribution::default(),
            visible_bytes: 0,
            summary: ReplyStats::default(),
            attributed: Vec::new(),
            is_finished: false,
        }
    }

    /// Takes the next tokens. After a stop, or after [`finish`](ReplyParser::finish), nothing comes.
    pub fn push(&mut self, tokens: &[TokenId]) -> Vec<ReplyDelta> {
        let mut deltas = Vec::new();
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
            let start = self.visible_bytes;
            self.visible_bytes += text.len();
            self.attribution
                .record(start, self.visible_bytes, !self.detokenizer.is_waiting());
            self.machine.take(
                &text,
                self.summary.tokens,
                &mut self.attribution,
                &mut deltas,
            );
        }
        self.settle();
        merge(deltas)
    }

    /// Why the reply is over, if it is over before its tokens are: the choice is to be cancelled and then
    /// finished with [`ReplyEnd::Stopped`].
    pub fn stopped(&self) -> Option<&EarlyStop> {
        self.machine.stopped()
    }

    /// Gives what was held back. Calls after the first give nothing.
    pub fn finish(&mut self, end: ReplyEnd) -> Vec<ReplyDelta> {
        if self.is_finished {
            return Vec::new();
        }
        self.is_finished = true;
        let mut deltas = Vec::new();
        let text = self.detokenizer.finish();
        self.visible_bytes += text.len();
        self.attribution.complete(self.visible_bytes);
        self.machine.take(
            &text,
            self.summary.tokens,
            &mut self.attribution,
            &mut deltas,
        );
        self.machine.finish(end, &mut self.attribution, &mut deltas);
        self.attribution.finish();
        self.settle();
        merge(deltas)
    }

    /// Where tokens went, by their ordinal in this choice, in order; each token once, as soon as all of its
    /// text is settled.
    pub fn take_token_parts(&mut self) -> Vec<(usize, TokenPart)> {
        std::mem::take(&mut self.attributed)
    }

    /// What the reply has come to so far.
    pub fn summary(&self) -> ReplyStats {
        let machine = &self.machine;
        ReplyStats {
            calls: machine.calls(),
            malformed: machine.malformed(),
            open_call: machine.is_inside_call(),
            ..self.summary
        }
    }

    fn settle(&mut self) {
        let attributed = self.attribution.take();
        for (_, place) in &attributed {
            match place {
                TokenPart::Reasoning => self.summary.reasoning_tokens += 1,
                TokenPart::Content => self.summary.content_tokens += 1,
                TokenPart::Hidden | TokenPart::Call => {}
            }
        }
        self.attributed.extend(attributed);
    }
}

/// Joins neighbours of one kind.
fn merge(deltas: Vec<ReplyDelta>) -> Vec<ReplyDelta> {
    let mut merged: Vec<ReplyDelta> = Vec::with_capacity(deltas.len());
    for delta in deltas {
        match (merged.last_mut(), &delta) {
            (Some(ReplyDelta::Content(text)), ReplyDelta::Content(more))
            | (Some(ReplyDelta::Reasoning(text)), ReplyDelta::Reasoning(more)) => {
                text.push_str(more)
            }
            (
                Some(ReplyDelta::ToolArguments { index, fragment }),
                ReplyDelta::ToolArguments {
                    index: other,
                    fragment: more,
                },
            ) if index == other => fragment.push_str(more),
            _ => merged.push(delta),
        }
    }
    merged
}

/// The token that opens a call, if the vocabulary has one: banning it keeps a model from calling.
pub fn tool_call_start_token(tokenizer: &Tokenizer) -> Option<TokenId> {
    tokenizer.id_of(&tokenizer.markup().tool_calls.open)
}

/// A whole reply, for answers in one delta.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reply {
    /// All thinking.
    pub reasoning: String,
    /// All text.
    pub content: String,
    /// All calls.
    pub tool_calls: Vec<ReplyToolCall>,
}

/// A tool call of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyToolCall {
    /// `call_` and 24 hexadecimal digits.
    pub id: String,
    /// The tool.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl Reply {
    /// Adds the next delta.
    pub fn push(&mut self, delta: ReplyDelta) {
        match delta {
            ReplyDelta::Reasoning(text) => self.reasoning.push_str(&text),
            ReplyDelta::Content(text) => self.content.push_str(&text),
            ReplyDelta::ToolCall { id, name, .. } => self.tool_calls.push(ReplyToolCall {
                id,
                name,
                arguments: String::new(),
            }),
            ReplyDelta::ToolArguments { index, fragment } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
            }
        }
    }
}

impl Reply {
    /// The message that a client sends back for this reply; with its reasoning where `keep_reasoning` says so and there are any.
    pub fn to_message(&self, keep_reasoning: bool) -> Message {
        let call = |call: &ReplyToolCall| ToolCall {
            id: Some(call.id.clone()),
            name: call.name.clone(),
            arguments: parse_arguments(&call.arguments, &call.name),
        };
        Message {
            reasoning: (keep_reasoning && !self.reasoning.is_empty())
                .then(|| self.reasoning.clone()),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            ..Message::new(Role::Assistant, self.content.as_str())
        }
    }
}

impl Extend<ReplyDelta> for Reply {
    fn extend<T: IntoIterator<Item = ReplyDelta>>(&mut self, deltas: T) {
        deltas.into_iter().for_each(|delta| self.push(delta));
    }
}

#[cfg(test)]
mod tests;
