//! Splits a reply's tokens into reasoning, content and tool calls.

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
pub use self::usage::{
    CompressionTimings, FinishReason, LlamaServerTimings, SourceTimings, SpeculationTimings,
    Timings, TokenLogprob, TopLogprob, Usage, WindowTimings,
};
use crate::conversation::{Message, Role, ToolCall, parse_arguments};
use crate::detokenize::{Detokenizer, is_visible};
use crate::tokenizer::Tokenizer;
pub use crate::tools::ReplyEnd;
use crate::tools::ToolSet;

/// An increment of a reply, emitted as soon as it is certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyDelta {
    /// More reasoning.
    Reasoning(String),
    /// More text.
    Content(String),
    /// A tool call starts.
    ToolCall {
        /// Which call of the reply, from 0.
        index: usize,
        /// `call_` and 24 hexadecimal digits.
        id: String,
        /// The declared tool.
        name: String,
    },
    /// More arguments. All fragments of a call join to a JSON object, unless the text ended inside
    /// the call.
    ToolArguments {
        /// Which call of the reply.
        index: usize,
        /// The next JSON text.
        fragment: String,
    },
}

/// How a reply is parsed.
#[derive(Debug, Clone, Default)]
pub struct ReplyConfig {
    /// Whether the prompt ends inside reasoning.
    pub starts_in_reasoning: bool,
    /// Whether to split reasoning from content. Otherwise, or if the model defines no reasoning
    /// tags, everything is content, tags included.
    pub split_reasoning: bool,
    /// Tools whose calls are parsed; without tools, calls are text.
    pub tools: ToolSet,
    /// Whether a reply may hold several calls. Otherwise the first call ends it.
    pub parallel_tool_calls: bool,
    /// Stop strings; they match in content only, not in reasoning or calls.
    pub stop: Vec<String>,
    /// Whether the content includes the stop string that ends it.
    pub include_stop: bool,
    /// Stop strings are ignored before this many tokens.
    pub min_tokens: usize,
    /// Seed of the call ids.
    pub call_id_seed: u64,
}

/// Why a reply ends before the model ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EarlyStop {
    /// This stop string matched.
    StopString(String),
    /// A call is complete, and parallel calls are off.
    AfterCall,
}

/// Counts of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplyStats {
    /// Tokens, hidden ones included; none after a stop.
    pub tokens: usize,
    /// Reasoning tokens.
    pub reasoning_tokens: usize,
    /// Tokens of text.
    pub content_tokens: usize,
    /// Complete calls.
    pub calls: usize,
    /// Repaired calls, and text that only started like a call.
    pub malformed: usize,
    /// The text ended inside a call.
    pub open_call: bool,
}

impl ReplyStats {
    /// The finish reason, given how the tokens ended. A complete call takes precedence.
    pub fn finish_reason(&self, end: ReplyEnd) -> FinishReason {
        match end {
            _ if self.calls > 0 => FinishReason::ToolCalls,
            ReplyEnd::Eos | ReplyEnd::Stopped => FinishReason::Stop,
            ReplyEnd::Length => FinishReason::Length,
        }
    }
}

/// Parses the tokens of one choice and emits its parts as soon as they are certain.
///
/// The result is independent of how the text is split into tokens and of how tokens are batched in
/// [`push`](ReplyParser::push); only the size of the deltas varies. Tags, adjacent blanks, and stop
/// strings with the text after them are dropped; nothing else is.
#[derive(Debug)]
pub struct ReplyParser {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    /// Control tokens whose text is a tag to parse.
    tags: HashSet<TokenId>,
    machine: ReplyStateMachine,
    attribution: TokenAttribution,
    /// Bytes of visible text.
    visible_bytes: usize,
    summary: ReplyStats,
    /// Attributed tokens that were not taken yet.
    attributed: Vec<(usize, TokenPart)>,
    is_finished: bool,
}

impl ReplyParser {
    /// A parser at the start of a reply.
    pub fn new(tokenizer: Arc<Tokenizer>, mut config: ReplyConfig) -> ReplyParser {
        config.split_reasoning &= tokenizer.reasoning_tags().is_some();
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

    /// Parses the next tokens. After a stop or [`finish`](ReplyParser::finish), nothing is emitted.
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

    /// Why the reply is over, if it ended early. The caller cancels the choice and finishes with
    /// [`ReplyEnd::Stopped`].
    pub fn stopped(&self) -> Option<&EarlyStop> {
        self.machine.stopped()
    }

    /// Emits the text still held back. Further calls emit nothing.
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

    /// Tokens by ordinal with the part they belong to, in order; each once, when all of its text is
    /// attributed.
    pub fn take_token_parts(&mut self) -> Vec<(usize, TokenPart)> {
        std::mem::take(&mut self.attributed)
    }

    /// Counts so far.
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

/// Joins adjacent deltas of one kind.
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

/// The token that starts a tool call, if the vocabulary has one; banning it prevents calls.
pub fn tool_call_start_token(tokenizer: &Tokenizer) -> Option<TokenId> {
    tokenizer.id_of(&tokenizer.markup().tool_calls.open)
}

/// A whole reply.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reply {
    /// The reasoning.
    pub reasoning: String,
    /// The content.
    pub content: String,
    /// The calls.
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
    /// The assistant message a client would send back; `keep_reasoning` includes the reasoning.
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
