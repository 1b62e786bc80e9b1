//! The state machine behind the reply parser, over text.
//!
//! Text is taken from the front as soon as its part is certain; what is not yet certain stays. Every
//! decision is the one that the whole text would lead to, so cuts in the text do not show.

mod content;

use super::ids::CallIds;
use super::ledger::{Ledger, Place};
use super::markdown::Markdown;
use super::{Piece, ReplyConfig, Stop};
use crate::reasoning::{self, Beginning, CLOSE};
use crate::stop::held_back;
use crate::tools::{CallEvent, CallParser, End, Opening, Outcome};

const CALL_TAG: &str = "<tool_call>";

/// Where the reply stands, and the text that is not certain yet.
#[derive(Debug)]
pub(super) struct Machine {
    config: ReplyConfig,
    /// How calls may begin, with the text each begins with.
    openings: Vec<(String, Opening)>,
    state: State,
    text: String,
    /// Place of `text` in the visible text.
    base: usize,
    /// Openings before this place turned out to be text.
    ignore_before: usize,
    /// No closing tag of thinking begins before this place.
    close_from: usize,
    /// No stop string begins before this place.
    stop_from: usize,
    markdown: Markdown,
    /// Some text was given out already.
    content_begun: bool,
    n_tokens: usize,
    ids: CallIds,
    begun_calls: usize,
    complete_calls: usize,
    malformed: usize,
    stopped: Option<Stop>,
}

#[derive(Debug)]
enum State {
    /// Thinking may begin here.
    Start,
    /// Behind the tag that opens thinking.
    ReasoningStart,
    Reasoning,
    /// Inside what may be a call in the middle of thinking; `read` bytes of the text are the parser's.
    ReasoningCall {
        parser: CallParser,
        read: usize,
        events: Vec<CallEvent>,
    },
    /// Behind the tag that closes thinking.
    AfterReasoning,
    Content,
    /// Inside a call, or what may be one; `lead` bytes of blanks stand before it.
    Call {
        parser: CallParser,
        lead: usize,
        is_certain: bool,
    },
    /// Behind a call.
    AfterCall,
    /// Nothing comes any more.
    Over,
}

/// Whether the machine got anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Moved,
    Stuck,
}

impl Machine {
    pub(super) fn new(config: ReplyConfig) -> Machine {
        let state = match (config.split_reasoning, config.starts_in_reasoning) {
            (true, true) => State::ReasoningStart,
            (true, false) => State::Start,
            (false, _) => State::Content,
        };
        let mut openings = Vec::new();
        if !config.tools.is_empty() {
            openings.extend([
                Opening::CallTag,
                Opening::CodeTag,
                Opening::Function,
                Opening::Bare,
            ]);
            openings.extend(
                config
                    .tools
                    .iter()
                    .map(|tool| Opening::Named(tool.name.clone())),
            );
        }
        Machine {
            openings: openings
                .into_iter()
                .map(|opening| (opening.text(), opening))
                .collect(),
            state,
            text: String::new(),
            base: 0,
            ignore_before: 0,
            close_from: 0,
            stop_from: 0,
            markdown: Markdown::default(),
            content_begun: false,
            n_tokens: 0,
            ids: CallIds::new(config.call_id_seed),
            begun_calls: 0,
            complete_calls: 0,
            malformed: 0,
            stopped: None,
            config,
        }
    }

    pub(super) fn stopped(&self) -> Option<&Stop> {
        self.stopped.as_ref()
    }

    pub(super) fn calls(&self) -> usize {
        self.complete_calls
    }

    pub(super) fn malformed(&self) -> usize {
        self.malformed
    }

    pub(super) fn is_inside_call(&self) -> bool {
        self.begun_calls > self.complete_calls
    }

    /// Takes more text, `n_tokens` tokens into the reply.
    pub(super) fn take(
        &mut self,
        text: &str,
        n_tokens: usize,
        ledger: &mut Ledger,
        pieces: &mut Vec<Piece>,
    ) {
        self.n_tokens = n_tokens;
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        while self.step(None, ledger, pieces) == Progress::Moved {}
    }

    /// Decides about everything that is left.
    pub(super) fn finish(&mut self, end: End, ledger: &mut Ledger, pieces: &mut Vec<Piece>) {
        while self.step(Some(end), ledger, pieces) == Progress::Moved {}
        self.drop_text(self.text.len(), Place::Hidden, ledger);
    }

    fn step(&mut self, end: Option<End>, ledger: &mut Ledger, pieces: &mut Vec<Piece>) -> Progress {
        if self.text.is_empty() && !matches!(self.state, State::Call { .. }) {
            return Progress::Stuck;
        }
        match self.state {
            State::Start => self.start(end, ledger),
            State::ReasoningStart => match (reasoning::first_break(&self.text), end) {
                (None, None) => Progress::Stuck,
                (length, _) => {
                    self.drop_text(length.unwrap_or(0), Place::Hidden, ledger);
                    self.go(State::Reasoning)
                }
            },
            State::Reasoning => self.reasoning(end, ledger, pieces),
            State::ReasoningCall { .. } => self.reasoning_call(end, ledger, pieces),
            State::AfterReasoning => match (reasoning::blank_lines(&self.text), end) {
                (None, None) => Progress::Stuck,
                (length, _) => {
                    self.drop_text(length.unwrap_or(self.text.len()), Place::Hidden, ledger);
                    self.go(State::Content)
                }
            },
            State::Content => self.content(end, ledger, pieces),
            State::Call { .. } => self.call(end, ledger, pieces),
            State::AfterCall => {
                let blank = self.text.len() - self.text.trim_start().len();
                self.drop_text(blank, Place::Hidden, ledger);
                if self.text.is_empty() {
                    Progress::Stuck
                } else {
                    self.go(State::Content)
                }
            }
            State::Over => {
                self.drop_text(self.text.len(), Place::Hidden, ledger);
                Progress::Stuck
            }
        }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::Moved
    }

    /// Takes `n_bytes` from the front of the text; they went to `place`.
    fn drop_text(&mut self, n_bytes: usize, place: Place, ledger: &mut Ledger) {
        self.base += n_bytes;
        self.text.drain(..n_bytes);
        ledger.advance(self.base, place);
    }

    fn give_reasoning(&mut self, n_bytes: usize, ledger: &mut Ledger, pieces: &mut Vec<Piece>) {
        if n_bytes > 0 {
            let text = self.text[..n_bytes].to_owned();
            self.markdown.advance(&text);
            pieces.push(Piece::Reasoning(text));
            self.drop_text(n_bytes, Place::Reasoning, ledger);
        }
    }

    fn start(&mut self, end: Option<End>, ledger: &mut Ledger) -> Progress {
        match reasoning::beginning(&self.text) {
            Beginning::Thinking { tag } => {
                self.drop_text(tag, Place::Hidden, ledger);
                self.go(State::ReasoningStart)
            }
            // A stop string made of blanks must not wait for what comes behind them.
            Beginning::TooShort if end.is_none() && self.stop_hit().is_none() => Progress::Stuck,
            _ => self.go(State::Content),
        }
    }

    fn reasoning(
        &mut self,
        end: Option<End>,
        ledger: &mut Ledger,
        pieces: &mut Vec<Piece>,
    ) -> Progress {
        let close = self.find_close();
        let call = self.call_in_reasoning();
        if let Some(at) = call
            && close.is_none_or(|close| at + CALL_TAG.len() < close + CLOSE.len())
        {
            self.give_reasoning(at, ledger, pieces);
            let parser = CallParser::new(Opening::CallTag);
            return self.go(State::ReasoningCall {
                parser,
                read: 0,
                events: Vec::new(),
            });
        }
        if let Some(at) = close {
            let thought = reasoning::without_last_breaks(&self.text[..at]);
            self.give_reasoning(thought, ledger, pieces);
            self.drop_text(at - thought + CLOSE.len(), Place::Hidden, ledger);
            self.markdown = Markdown::default();
            return self.go(State::AfterReasoning);
        }
        let held = match end {
            Some(_) => 0,
            None if self.config.tools.is_empty() => reasoning::possible_close(&self.text),
            None => held_back(&self.text, &[CLOSE, CALL_TAG]),
        };
        let certain = self.text.len() - held;
        let certain = match end {
            Some(_) => certain,
            // Line breaks before the closing tag are not part of the thought.
            None => reasoning::without_last_breaks(&self.text[..certain]),
        };
        self.give_reasoning(certain, ledger, pieces);
        Progress::Stuck
    }

    /// Where thinking is closed. What was searched once is not searched again.
    fn find_close(&mut self) -> Option<usize> {
        let from = self.close_from.saturating_sub(self.base);
        let found = self.text[from..].find(CLOSE).map(|at| from + at);
        let next = found.unwrap_or(self.text.len() - reasoning::possible_close(&self.text));
        self.close_from = self.base + next;
        found
    }

    /// A call tag at the beginning of a line of thinking.
    fn call_in_reasoning(&self) -> Option<usize> {
        if self.config.tools.is_empty() {
            return None;
        }
        let mut markdown = self.markdown.clone();
        let mut seen = 0;
        for (at, _) in self.text.match_indices(CALL_TAG) {
            markdown.advance(&self.text[seen..at]);
            seen = at;
            let counts = markdown.begins_line() && !markdown.is_code();
            if counts && self.base + at >= self.ignore_before {
                return Some(at);
            }
        }
        None
    }

    /// A call in the middle of thinking is believed only when it is complete, before thinking is closed.
    fn reasoning_call(
        &mut self,
        end: Option<End>,
        ledger: &mut Ledger,
        pieces: &mut Vec<Piece>,
    ) -> Progress {
        let close = self.find_close();
        let State::ReasoningCall {
            parser,
            read,
            events,
        } = &mut self.state
        else {
            return Progress::Stuck;
        };
        let limit = match (close, end) {
            (Some(close), _) => close,
            (None, Some(_)) => self.text.len(),
            (None, None) => self.text.len() - reasoning::possible_close(&self.text),
        };
        let call_end = end.filter(|_| close.is_none());
        let within = self.text.get(*read..limit).unwrap_or_default();
        let (consumed, outcome) = parser.feed(within, call_end, &self.config.tools, events);
        *read += consumed;
        match outcome {
            Outcome::More if close.is_none() => Progress::Stuck,
            Outcome::Complete { mended } => {
                let (read, events) = (*read, std::mem::take(events));
                self.give_events(events, pieces);
                self.drop_text(read, Place::Call, ledger);
                self.end_call(mended)
            }
            Outcome::More | Outcome::NotACall | Outcome::Unfinished => {
                self.ignore_before = self.base + 1;
                self.malformed += 1;
                tracing::debug!("what began like a tool call in thinking is thinking");
                self.go(State::Reasoning)
            }
        }
    }

    fn call(&mut self, end: Option<End>, ledger: &mut Ledger, pieces: &mut Vec<Piece>) -> Progress {
        let State::Call {
            parser,
            lead,
            is_certain,
        } = &mut self.state
        else {
            return Progress::Stuck;
        };
        let mut events = Vec::new();
        let (consumed, outcome) =
            parser.feed(&self.text[*lead..], end, &self.config.tools, &mut events);
        if outcome == Outcome::NotACall {
            self.ignore_before = self.base + *lead + 1;
            self.malformed += 1;
            tracing::debug!("what began like a tool call is text");
            return self.go(State::Content);
        }
        if !events.is_empty() || *is_certain {
            let lead = std::mem::take(lead);
            *is_certain = true;
            self.drop_text(lead, Place::Hidden, ledger);
            self.give_events(events, pieces);
            self.drop_text(consumed, Place::Call, ledger);
        }
        match outcome {
            Outcome::Complete { mended } => self.end_call(mended),
            Outcome::Unfinished => self.go(State::Over),
            Outcome::More | Outcome::NotACall => Progress::Stuck,
        }
    }

    fn give_events(&mut self, events: Vec<CallEvent>, pieces: &mut Vec<Piece>) {
        for event in events {
            match event {
                CallEvent::Name(name) => {
                    let id = self.ids.next();
                    pieces.push(Piece::ToolCall {
                        index: self.begun_calls,
                        id,
                        name,
                    });
                    self.begun_calls += 1;
                }
                CallEvent::Arguments(fragment) => {
                    let index = self.begun_calls.saturating_sub(1);
                    pieces.push(Piece::ToolArguments { index, fragment });
                }
            }
        }
    }

    fn end_call(&mut self, mended: bool) -> Progress {
        self.complete_calls += 1;
        self.malformed += usize::from(mended);
        self.content_begun = true;
        self.markdown.begin_block();
        if self.config.parallel_tool_calls {
            return self.go(State::AfterCall);
        }
        self.stopped = Some(Stop::AfterCall);
        self.go(State::Over)
    }
}
