//! One choice of a reply as it grows: from generated tokens to what a client sees of them.

use std::sync::Arc;

use chat::Tokenizer;
use chat::detokenize::Detokenizer;
use chat::openai::response::{ChatLogprobs, FinishReason};
use chat::reply::{Piece, Reply};
use chat::stop::StopMatcher;
use chat::tools::ToolSet;
use contract::TokenId;
use decode::{FinishReason as Ended, OutToken};

use crate::logprobs::{Pending, Shown};

/// What all choices of a chat request have in common.
#[derive(Clone)]
pub struct ChoicePlan {
    /// Turns tokens into text.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether the prompt left a thinking block open.
    pub opens_reasoning: bool,
    /// Whether tags stay in the text instead of being read.
    pub raw: bool,
    /// Tools whose calls are read.
    pub tools: ToolSet,
    /// Whether a reply may hold several calls.
    pub parallel_tools: bool,
    /// Strings that end the text.
    pub stops: Vec<String>,
    /// Tokens that end the text and are not shown.
    pub stop_tokens: Vec<TokenId>,
    /// Whether logprobs were asked for.
    pub logprobs: bool,
}

/// A stretch of a reply and the tokens behind it.
#[derive(Debug, Clone)]
pub struct Part {
    /// The stretch.
    pub piece: Piece,
    /// The tokens it shows, if logprobs were asked for.
    pub shown: Vec<Shown>,
}

/// One choice.
pub struct Choice {
    voice: Voice,
    stop_tokens: Vec<TokenId>,
    pending: Option<Pending>,
    n_tokens: usize,
    over: bool,
    /// Whether a stop token came.
    stopped: bool,
}

/// How tokens are read.
enum Voice {
    /// All is text.
    Plain(Plain),
}

struct Plain {
    detokenizer: Detokenizer,
    stops: StopMatcher,
}

impl Choice {
    /// A chat reply that has not begun.
    pub fn chat(plan: &ChoicePlan) -> Choice {
        let stops = plan.stops.clone();
        let plain = Choice::plain(&plan.tokenizer, stops, &plan.stop_tokens);
        plain.with_logprobs(&plan.tokenizer, plan.logprobs)
    }

    /// A text without structure that has not begun.
    pub fn plain(
        tokenizer: &Arc<Tokenizer>,
        stops: Vec<String>,
        stop_tokens: &[TokenId],
    ) -> Choice {
        let plain = Plain {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer)),
            stops: StopMatcher::new(stops),
        };
        Choice {
            voice: Voice::Plain(plain),
            stop_tokens: stop_tokens.to_vec(),
            pending: None,
            n_tokens: 0,
            over: false,
            stopped: false,
        }
    }

    /// Keeps track of which tokens stand behind which text, if `wanted`.
    pub fn with_logprobs(mut self, tokenizer: &Arc<Tokenizer>, wanted: bool) -> Choice {
        self.pending = wanted.then(|| Pending::new(Arc::clone(tokenizer)));
        self
    }

    /// Whether its end was told.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether nothing that may still be generated would be shown.
    pub fn wants_no_more(&self) -> bool {
        self.stopped
            || match &self.voice {
                Voice::Plain(plain) => plain.stops.hit().is_some(),
            }
    }

    /// Tokens generated.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Of these, thinking.
    pub fn reasoning_tokens(&self) -> usize {
        match &self.voice {
            Voice::Plain(_) => 0,
        }
    }

    /// Calls begun.
    pub fn n_tool_calls(&self) -> usize {
        match &self.voice {
            Voice::Plain(_) => 0,
        }
    }

    /// Takes new tokens and gives what became certain with them.
    pub fn push(&mut self, tokens: Vec<OutToken>) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut ids = Vec::with_capacity(tokens.len());
        for token in tokens {
            if self.stopped {
                break;
            }
            self.n_tokens += 1;
            if self.stop_tokens.contains(&token.id) {
                self.stopped = true;
                break;
            }
            match &mut self.pending {
                None => ids.push(token.id),
                Some(pending) => {
                    // One by one, so that each text meets no more tokens than it could be made of.
                    let id = token.id;
                    pending.push(token);
                    let pieces = self.voice.push(&[id]);
                    self.attribute(pieces, &mut parts);
                }
            }
        }
        let pieces = self.voice.push(&ids);
        self.attribute(pieces, &mut parts);
        parts
    }

    /// Ends the choice and gives what was held back, and the reason to tell.
    pub fn finish(&mut self, ended: Ended) -> (Vec<Part>, FinishReason) {
        self.over = true;
        let reason = match ended {
            Ended::Eos => FinishReason::Stop,
            Ended::Length | Ended::ContextFull => FinishReason::Length,
            // A choice is cancelled from here only after its text was complete.
            Ended::Cancelled => FinishReason::Stop,
        };
        let (pieces, reason) = match &mut self.voice {
            Voice::Plain(plain) => (plain.finish(), reason),
        };
        let mut parts = Vec::new();
        self.attribute(pieces, &mut parts);
        (parts, reason)
    }

    fn attribute(&mut self, pieces: Vec<Piece>, parts: &mut Vec<Part>) {
        for piece in pieces {
            let shown = match (&mut self.pending, &piece) {
                (Some(pending), Piece::Content(text) | Piece::Reasoning(text)) => {
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
            Piece::Content(_) => logprobs.content = listed,
            Piece::Reasoning(_) => logprobs.reasoning_content = listed,
            Piece::ToolCall { .. } | Piece::ToolArguments { .. } => return None,
        }
        Some(logprobs)
    }
}

impl Voice {
    fn push(&mut self, ids: &[TokenId]) -> Vec<Piece> {
        if ids.is_empty() {
            return Vec::new();
        }
        match self {
            Voice::Plain(plain) => {
                let text = plain.detokenizer.push(ids);
                content(plain.stops.push(&text))
            }
        }
    }
}

impl Plain {
    fn finish(&mut self) -> Vec<Piece> {
        if self.stops.hit().is_some() {
            return Vec::new();
        }
        let rest = self.detokenizer.finish();
        let mut text = self.stops.push(&rest);
        text.push_str(&self.stops.finish());
        content(text)
    }
}

fn content(text: String) -> Vec<Piece> {
    match text.is_empty() {
        true => Vec::new(),
        false => vec![Piece::Content(text)],
    }
}

/// A whole reply, collected from its parts.
#[derive(Debug, Default)]
pub struct Collected {
    /// Text, thinking, calls.
    pub reply: Reply,
    /// Logprobs of all of it.
    pub logprobs: ChatLogprobs,
}

impl Collected {
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
