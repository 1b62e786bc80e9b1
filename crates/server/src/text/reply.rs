//! One choice of a response: from generated tokens to response parts.

use std::sync::Arc;

use chat::Tokenizer;
use chat::openai::response::{ChatLogprobs, MatchedStop};
use chat::reply::{
    EarlyStop, FinishReason, Reply, ReplyConfig, ReplyDelta, ReplyEnd, ReplyParser, ReplyStats,
};
use contract::TokenId;
use decode::{FinishReason as Ended, OutputToken, ReasoningEnd, ReasoningHandle};

use crate::ids;
use crate::text::logprobs::{PendingTokens, SentToken};
use crate::text::repetition::RepetitionDetector;

/// Configuration common to all choices of a request.
#[derive(Clone)]
pub struct ChoiceConfig {
    /// Turns tokens into text.
    pub tokenizer: Arc<Tokenizer>,
    /// Parser configuration; each choice has its own call id seed.
    pub reply_config: ReplyConfig,
    /// Stop tokens; shown only with [`ReplyConfig::include_stop`].
    pub stop_tokens: Vec<TokenId>,
    /// Whether the ids of all tokens are kept.
    pub keeps_token_ids: bool,
    /// Whether logprobs were asked for.
    pub logprobs: bool,
}

/// A part of a reply and its tokens.
#[derive(Debug, Clone)]
pub struct Part {
    /// The increment of text, reasoning or a tool call.
    pub delta: ReplyDelta,
    /// The tokens whose text it has, if logprobs were requested.
    pub tokens: Vec<SentToken>,
}

/// One choice.
pub struct Choice {
    parser: ReplyParser,
    stop_tokens: Vec<TokenId>,
    /// Whether the stop token is part of the text.
    shows_stop_token: bool,
    /// Ids of all tokens up to the end of the text, if they are kept.
    token_ids: Option<Vec<u32>>,
    pending: Option<PendingTokens>,
    over: bool,
    /// The stop token that was generated.
    stop_token: Option<TokenId>,
    /// Control handle of its reasoning, if it reasons.
    reasoning_handle: Option<Arc<ReasoningHandle>>,
    /// Token that ends reasoning.
    reasoning_end_token: Option<TokenId>,
    /// Whether a budget cut the reasoning.
    reasoning_cut: bool,
    /// Detects repetition after a cut reasoning.
    repetition: RepetitionDetector,
    /// Whether repetition ended the choice.
    is_degenerate: bool,
}

impl Choice {
    /// A fresh choice.
    pub fn new(config: &ChoiceConfig) -> Choice {
        let reply_config = ReplyConfig {
            call_id_seed: ids::random_seed(),
            ..config.reply_config.clone()
        };
        let tokenizer = &config.tokenizer;
        Choice {
            parser: ReplyParser::new(Arc::clone(tokenizer), reply_config),
            stop_tokens: config.stop_tokens.clone(),
            shows_stop_token: config.reply_config.include_stop,
            token_ids: config.keeps_token_ids.then(Vec::new),
            pending: config
                .logprobs
                .then(|| PendingTokens::new(Arc::clone(tokenizer))),
            over: false,
            stop_token: None,
            reasoning_handle: None,
            reasoning_end_token: tokenizer
                .reasoning_tags()
                .and_then(|tags| tokenizer.id_of(&tags.close)),
            reasoning_cut: false,
            repetition: RepetitionDetector::default(),
            is_degenerate: false,
        }
    }

    /// Attaches the reasoning control handle.
    pub fn with_reasoning(self, reasoning_handle: Option<Arc<ReasoningHandle>>) -> Choice {
        Choice {
            reasoning_handle,
            ..self
        }
    }

    /// Control handle of its reasoning, if it reasons.
    pub fn reasoning_handle(&self) -> Option<&Arc<ReasoningHandle>> {
        self.reasoning_handle.as_ref()
    }

    /// How its reasoning ended.
    pub fn reasoning_end(&self) -> ReasoningEnd {
        self.reasoning_handle
            .as_ref()
            .map_or(ReasoningEnd::Natural, |reasoning_handle| {
                reasoning_handle.end()
            })
    }

    /// Whether repetition ended it.
    pub fn is_degenerate(&self) -> bool {
        self.is_degenerate
    }

    /// Whether its end was emitted.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether a stop token, a stop string or repetition has ended the text. Later tokens are not
    /// sent.
    pub fn has_stopped(&self) -> bool {
        self.stop_token.is_some() || self.is_degenerate || self.parser.stopped().is_some()
    }

    /// The stop string that ended the text, if any.
    pub fn stop_string(&self) -> Option<&str> {
        match self.parser.stopped() {
            Some(EarlyStop::StopString(text)) => Some(text),
            _ => None,
        }
    }

    /// What of the request ended the text, if anything did.
    pub fn matched_stop(&self) -> Option<MatchedStop> {
        match (self.parser.stopped(), self.stop_token) {
            (Some(EarlyStop::StopString(text)), _) => Some(MatchedStop::Text(text.clone())),
            (None, Some(token)) => Some(MatchedStop::Token(token.0)),
            (Some(EarlyStop::AfterCall), _) | (None, None) => None,
        }
    }

    /// Tokens generated up to the end of the text.
    pub fn n_tokens(&self) -> usize {
        // A hidden stop token behind a stop string is not part of the reply.
        let is_hidden = !self.shows_stop_token && self.parser.stopped().is_none();
        self.parser.summary().tokens + usize::from(self.stop_token.is_some() && is_hidden)
    }

    /// Ids of these tokens; empty if they are not kept.
    pub fn token_ids(&self) -> &[u32] {
        self.token_ids.as_deref().unwrap_or_default()
    }

    /// Statistics so far.
    pub fn summary(&self) -> ReplyStats {
        self.parser.summary()
    }

    /// Adds new tokens and returns the parts that are now final.
    pub fn push(&mut self, tokens: Vec<OutputToken>) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut ids = Vec::with_capacity(tokens.len());
        for token in tokens {
            if self.has_stopped() {
                break;
            }
            if let Some(all) = &mut self.token_ids {
                all.push(token.id.0);
            }
            if self.stop_tokens.contains(&token.id) {
                self.stop_token = Some(token.id);
                if !self.shows_stop_token {
                    break;
                }
            }
            if self.reasoning_cut && self.repetition.repeats(token.id) {
                self.is_degenerate = true;
            }
            // The engine runs ahead: the handle knows the end of reasoning before its tokens arrive
            // here.
            let is_close = self.reasoning_end_token == Some(token.id);
            self.reasoning_cut |= is_close && self.reasoning_end() == ReasoningEnd::Hard;
            match &mut self.pending {
                None => ids.push(token.id),
                Some(pending) => {
                    // One token at a time, so that each part maps to its own tokens.
                    let id = token.id;
                    pending.push(token);
                    let deltas = self.parser.push(&[id]);
                    self.attribute(deltas, &mut parts);
                }
            }
        }
        let deltas = self.parser.push(&ids);
        self.attribute(deltas, &mut parts);
        // The text may have ended in the middle of these tokens.
        let n_tokens = self.n_tokens();
        if let Some(all) = &mut self.token_ids {
            all.truncate(n_tokens);
        }
        parts
    }

    /// Finishes the choice; returns the parts held back and the finish reason.
    pub fn finish(&mut self, ended: Ended) -> (Vec<Part>, FinishReason) {
        self.over = true;
        let end = match ended {
            _ if self.is_degenerate => ReplyEnd::Length,
            _ if self.has_stopped() => ReplyEnd::Stopped,
            Ended::Eos => ReplyEnd::Eos,
            Ended::Length | Ended::ContextFull => ReplyEnd::Length,
            Ended::Cancelled => ReplyEnd::Stopped,
        };
        let deltas = self.parser.finish(end);
        let mut parts = Vec::new();
        self.attribute(deltas, &mut parts);
        (parts, self.parser.summary().finish_reason(end))
    }

    fn attribute(&mut self, deltas: Vec<ReplyDelta>, parts: &mut Vec<Part>) {
        for delta in deltas {
            let tokens = match (&mut self.pending, &delta) {
                (Some(pending), ReplyDelta::Content(text) | ReplyDelta::Reasoning(text)) => {
                    pending.take_tokens_of(text)
                }
                _ => Vec::new(),
            };
            parts.push(Part { delta, tokens });
        }
    }

    /// Logprobs of a part in the chat format; `None` if not requested.
    pub fn chat_logprobs(&self, part: &Part) -> Option<ChatLogprobs> {
        let listed = self.pending.as_ref()?.listed(&part.tokens);
        let mut logprobs = ChatLogprobs::default();
        match part.delta {
            ReplyDelta::Content(_) => logprobs.content = listed,
            ReplyDelta::Reasoning(_) => logprobs.reasoning_content = listed,
            ReplyDelta::ToolCall { .. } | ReplyDelta::ToolArguments { .. } => return None,
        }
        Some(logprobs)
    }
}

/// A complete reply.
#[derive(Debug, Default)]
pub struct CollectedReply {
    /// Text, reasoning and tool calls.
    pub reply: Reply,
    /// All its logprobs.
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
        self.reply.push(part.delta);
    }
}
