//! One choice of a reply as it grows: from generated tokens to what a client sees of them.

use std::sync::Arc;

use chat::Tokenizer;
use chat::openai::response::ChatLogprobs;
use chat::reply::{
    EarlyStop, FinishReason, Reply, ReplyConfig, ReplyDelta, ReplyEnd, ReplyParser, ReplyStats,
};
use contract::TokenId;
use decode::{FinishReason as Ended, OutputToken, ReasoningEnd, ReasoningHandle};

use crate::ids;
use crate::text::logprobs::{PendingTokens, ShownToken};
use crate::text::repetition::RepetitionDetector;

/// What all choices of a request have in common.
#[derive(Clone)]
pub struct ChoiceConfig {
    /// Turns tokens into text.
    pub tokenizer: Arc<Tokenizer>,
    /// What is told apart in the text, and what ends it. The seed of call ids is each choice's own.
    pub reply_config: ReplyConfig,
    /// Tokens that end the text and are not shown.
    pub stop_tokens: Vec<TokenId>,
    /// Whether logprobs were asked for.
    pub logprobs: bool,
}

/// A stretch of a reply and the tokens behind it.
#[derive(Debug, Clone)]
pub struct Part {
    /// The stretch.
    pub piece: ReplyDelta,
    /// The tokens it shows, if logprobs were asked for.
    pub shown: Vec<ShownToken>,
}

/// One choice.
pub struct Choice {
    parser: ReplyParser,
    stop_tokens: Vec<TokenId>,
    pending: Option<PendingTokens>,
    over: bool,
    /// Whether a stop token came.
    stopped: bool,
    /// Where its thinking is held, if it is.
    reasoning_handle: Option<Arc<ReasoningHandle>>,
    /// Closes thinking.
    reasoning_end_token: Option<TokenId>,
    /// Whether that came.
    reasoning_cut: bool,
    /// Looks for a text that goes round and round behind a thought that was closed.
    repetition: RepetitionDetector,
    /// Whether it did.
    is_degenerate: bool,
}

impl Choice {
    /// A choice that has not begun.
    pub fn new(config: &ChoiceConfig) -> Choice {
        let reply_config = ReplyConfig {
            call_id_seed: ids::random_seed(),
            ..config.reply_config.clone()
        };
        let tokenizer = &config.tokenizer;
        Choice {
            parser: ReplyParser::new(Arc::clone(tokenizer), reply_config),
            stop_tokens: config.stop_tokens.clone(),
            pending: config
                .logprobs
                .then(|| PendingTokens::new(Arc::clone(tokenizer))),
            over: false,
            stopped: false,
            reasoning_handle: None,
            reasoning_end_token: tokenizer.id_of(&tokenizer.markup().reasoning.close),
            reasoning_cut: false,
            repetition: RepetitionDetector::default(),
            is_degenerate: false,
        }
    }

    /// The same, with its thinking held by `reins`.
    pub fn with_reasoning(self, reasoning_handle: Option<Arc<ReasoningHandle>>) -> Choice {
        Choice {
            reasoning_handle,
            ..self
        }
    }

    /// Where its thinking is held, if it is.
    pub fn reasoning_handle(&self) -> Option<&Arc<ReasoningHandle>> {
        self.reasoning_handle.as_ref()
    }

    /// How its thinking ended.
    pub fn reasoning_end(&self) -> ReasoningEnd {
        self.reasoning_handle
            .as_ref()
            .map_or(ReasoningEnd::Natural, |reasoning_handle| {
                reasoning_handle.end()
            })
    }

    /// Whether it was ended because it said the same over and over.
    pub fn is_degenerate(&self) -> bool {
        self.is_degenerate
    }

    /// Whether its end was told.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether nothing that may still be generated would be shown.
    pub fn wants_no_more(&self) -> bool {
        self.stopped || self.is_degenerate || self.parser.stopped().is_some()
    }

    /// The stop string that ended the text, if one did.
    pub fn stop_string(&self) -> Option<&str> {
        match self.parser.stopped() {
            Some(EarlyStop::StopString(text)) => Some(text),
            _ => None,
        }
    }

    /// Tokens generated, up to the end of the text.
    pub fn n_tokens(&self) -> usize {
        self.parser.summary().tokens + usize::from(self.stopped)
    }

    /// What it has come to.
    pub fn summary(&self) -> ReplyStats {
        self.parser.summary()
    }

    /// Takes new tokens and gives what became certain with them.
    pub fn push(&mut self, tokens: Vec<OutputToken>) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut ids = Vec::with_capacity(tokens.len());
        for token in tokens {
            if self.wants_no_more() {
                break;
            }
            if self.stop_tokens.contains(&token.id) {
                self.stopped = true;
                break;
            }
            if self.reasoning_cut && self.repetition.repeats(token.id) {
                self.is_degenerate = true;
            }
            // The engine is ahead: how the thought ended is known before its tokens are seen here.
            let is_close = self.reasoning_end_token == Some(token.id);
            self.reasoning_cut |= is_close && self.reasoning_end() == ReasoningEnd::Hard;
            match &mut self.pending {
                None => ids.push(token.id),
                Some(pending) => {
                    // One by one, so that each text meets no more tokens than it could be made of.
                    let id = token.id;
                    pending.push(token);
                    let pieces = self.parser.push(&[id]);
                    self.attribute(pieces, &mut parts);
                }
            }
        }
        let pieces = self.parser.push(&ids);
        self.attribute(pieces, &mut parts);
        parts
    }

    /// Ends the choice and gives what was held back, and the reason to tell.
    pub fn finish(&mut self, ended: Ended) -> (Vec<Part>, FinishReason) {
        self.over = true;
        let end = match ended {
            _ if self.is_degenerate => ReplyEnd::Length,
            _ if self.wants_no_more() => ReplyEnd::Stopped,
            Ended::Eos => ReplyEnd::Eos,
            Ended::Length | Ended::ContextFull => ReplyEnd::Length,
            Ended::Cancelled => ReplyEnd::Stopped,
        };
        let pieces = self.parser.finish(end);
        let mut parts = Vec::new();
        self.attribute(pieces, &mut parts);
        (parts, self.parser.summary().finish_reason(end))
    }

    fn attribute(&mut self, pieces: Vec<ReplyDelta>, parts: &mut Vec<Part>) {
        for piece in pieces {
            let shown = match (&mut self.pending, &piece) {
                (Some(pending), ReplyDelta::Content(text) | ReplyDelta::Reasoning(text)) => {
                    pending.show(text)
                }
                _ => Vec::new(),
            };
            parts.push(Part { piece, shown });
        }
    }

    /// Logprobs of a part as chat answers list them; `None` if none were asked for.
    pub fn chat_logprobs(&self, part: &Part) -> Option<ChatLogprobs> {
        let listed = self.pending.as_ref()?.listed(&part.shown);
        let mut logprobs = ChatLogprobs::default();
        match part.piece {
            ReplyDelta::Content(_) => logprobs.content = listed,
            ReplyDelta::Reasoning(_) => logprobs.reasoning_content = listed,
            ReplyDelta::ToolCall { .. } | ReplyDelta::ToolArguments { .. } => return None,
        }
        Some(logprobs)
    }
}

/// A whole reply, collected from its parts.
#[derive(Debug, Default)]
pub struct CollectedReply {
    /// Text, thinking, calls.
    pub reply: Reply,
    /// Logprobs of all of it.
    pub logprobs: ChatLogprobs,
}

impl CollectedReply {
    /// Adds the next part of `choice`.
    pub fn push(&mut self, choice: &Choice, part: Part) {
        if let Some(logprobs) = choice.chat_logprobs(&part) {
            self.logprobs.content.extend(logprobs.content);
            let thinking = logprobs.reasoning_content;
            self.logprobs.reasoning_content.extend(thinking);
        }
        self.reply.push(part.piece);
    }
}
