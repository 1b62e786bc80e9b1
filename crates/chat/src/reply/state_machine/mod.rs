//! The state machine of the reply parser, over text.
//!
//! Text is consumed from the front as soon as it is certain; the rest stays. Every decision is the
//! one the whole text would lead to, so chunk boundaries do not matter.

mod content;

use std::sync::Arc;

use contract::ModelMarkup;

use super::attribution::{TokenAttribution, TokenPart};
use super::call_ids::CallIds;
use super::markdown::MarkdownTracker;
use super::{EarlyStop, ReplyConfig, ReplyDelta};
use crate::reasoning::{self, ReplyStart};
use crate::stop::partial_match_len;
use crate::tools::{CallEvent, CallParser, CallScope, CallStart, CallStatus, ReplyEnd};

/// The state of a reply and its undecided text.
#[derive(Debug)]
pub(super) struct ReplyStateMachine {
    config: ReplyConfig,
    markup: Arc<ModelMarkup>,
    /// Call starts, each with its text.
    call_starts: Vec<(String, CallStart)>,
    state: ReplyState,
    text: String,
    /// Offset of `text` in the visible text.
    base: usize,
    /// Call starts before this offset turned out to be text.
    ignore_before: usize,
    /// No closing reasoning tag starts before this offset.
    close_search_from: usize,
    /// No stop string starts before this offset.
    stop_search_from: usize,
    markdown: MarkdownTracker,
    /// Whether a call interrupted reasoning whose closing tag has not come. Only then the tag is a
    /// tag in content; else the model writes about it.
    reasoning_is_open: bool,
    /// Whether content was emitted.
    has_content: bool,
    n_tokens: usize,
    ids: CallIds,
    started_calls: usize,
    complete_calls: usize,
    malformed: usize,
    stopped: Option<EarlyStop>,
}

#[derive(Debug)]
enum ReplyState {
    /// Reasoning may start here.
    Start,
    /// After the opening reasoning tag.
    ReasoningStart,
    Reasoning,
    /// Inside a possible call within reasoning; the parser has read `read` bytes.
    ReasoningCall {
        parser: CallParser,
        read: usize,
        events: Vec<CallEvent>,
    },
    /// After the closing reasoning tag.
    AfterReasoning,
    Content,
    /// Inside a call or a possible call, preceded by `leading_blanks` bytes of blanks.
    Call {
        parser: CallParser,
        leading_blanks: usize,
        is_confirmed: bool,
    },
    /// After a call.
    AfterCall,
    /// The reply is over.
    Finished,
}

/// Whether a step made progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepProgress {
    Advanced,
    NeedsText,
}

impl ReplyStateMachine {
    pub(super) fn new(config: ReplyConfig, markup: Arc<ModelMarkup>) -> ReplyStateMachine {
        let state = match (config.split_reasoning, config.starts_in_reasoning) {
            (true, true) => ReplyState::ReasoningStart,
            (true, false) => ReplyState::Start,
            (false, _) => ReplyState::Content,
        };
        let mut call_starts = Vec::new();
        if !config.tools.is_empty() {
            call_starts.extend([
                CallStart::CallTag,
                CallStart::CodeTag,
                CallStart::Function,
                CallStart::Bare,
            ]);
            call_starts.extend(
                config
                    .tools
                    .iter()
                    .map(|tool| CallStart::Named(tool.name.clone())),
            );
        }
        ReplyStateMachine {
            call_starts: call_starts
                .into_iter()
                .map(|call_start| (call_start.text(&markup.tool_calls), call_start))
                .collect(),
            state,
            text: String::new(),
            base: 0,
            ignore_before: 0,
            close_search_from: 0,
            stop_search_from: 0,
            markdown: MarkdownTracker::default(),
            reasoning_is_open: false,
            has_content: false,
            n_tokens: 0,
            ids: CallIds::new(config.call_id_seed),
            started_calls: 0,
            complete_calls: 0,
            malformed: 0,
            stopped: None,
            config,
            markup,
        }
    }

    pub(super) fn stopped(&self) -> Option<&EarlyStop> {
        self.stopped.as_ref()
    }

    pub(super) fn calls(&self) -> usize {
        self.complete_calls
    }

    pub(super) fn malformed(&self) -> usize {
        self.malformed
    }

    pub(super) fn is_inside_call(&self) -> bool {
        self.started_calls > self.complete_calls
    }

    /// Parses more text; the reply has `n_tokens` tokens so far.
    pub(super) fn take(
        &mut self,
        text: &str,
        n_tokens: usize,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) {
        self.n_tokens = n_tokens;
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        while self.step(None, attribution, deltas) == StepProgress::Advanced {}
    }

    /// Decides all remaining text.
    pub(super) fn finish(
        &mut self,
        end: ReplyEnd,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) {
        while self.step(Some(end), attribution, deltas) == StepProgress::Advanced {}
        self.consume(self.text.len(), TokenPart::Hidden, attribution);
    }

    fn step(
        &mut self,
        end: Option<ReplyEnd>,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) -> StepProgress {
        if self.text.is_empty() && !matches!(self.state, ReplyState::Call { .. }) {
            return StepProgress::NeedsText;
        }
        match self.state {
            ReplyState::Start => self.start(end, attribution),
            ReplyState::ReasoningStart => match (reasoning::leading_newline_len(&self.text), end) {
                (None, None) => StepProgress::NeedsText,
                (length, _) => {
                    self.consume(length.unwrap_or(0), TokenPart::Hidden, attribution);
                    self.transition(ReplyState::Reasoning)
                }
            },
            ReplyState::Reasoning => self.reasoning(end, attribution, deltas),
            ReplyState::ReasoningCall { .. } => self.reasoning_call(end, attribution, deltas),
            ReplyState::AfterReasoning => {
                match (reasoning::leading_blank_lines_len(&self.text), end) {
                    (None, None) => StepProgress::NeedsText,
                    (length, _) => {
                        self.consume(
                            length.unwrap_or(self.text.len()),
                            TokenPart::Hidden,
                            attribution,
                        );
                        self.transition(ReplyState::Content)
                    }
                }
            }
            ReplyState::Content => self.content(end, attribution, deltas),
            ReplyState::Call { .. } => self.call(end, attribution, deltas),
            ReplyState::AfterCall => {
                let blank = self.text.len() - self.text.trim_start().len();
                self.consume(blank, TokenPart::Hidden, attribution);
                if self.text.is_empty() {
                    StepProgress::NeedsText
                } else {
                    self.transition(ReplyState::Content)
                }
            }
            ReplyState::Finished => {
                self.consume(self.text.len(), TokenPart::Hidden, attribution);
                StepProgress::NeedsText
            }
        }
    }

    fn transition(&mut self, state: ReplyState) -> StepProgress {
        self.state = state;
        StepProgress::Advanced
    }

    /// Consumes `n_bytes` from the front of the text for a part of the reply.
    fn consume(&mut self, n_bytes: usize, place: TokenPart, attribution: &mut TokenAttribution) {
        self.base += n_bytes;
        self.text.drain(..n_bytes);
        attribution.advance(self.base, place);
    }

    fn emit_reasoning(
        &mut self,
        n_bytes: usize,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) {
        if n_bytes > 0 {
            let text = self.text[..n_bytes].to_owned();
            self.markdown.advance(&text);
            deltas.push(ReplyDelta::Reasoning(text));
            self.consume(n_bytes, TokenPart::Reasoning, attribution);
        }
    }

    fn start(&mut self, end: Option<ReplyEnd>, attribution: &mut TokenAttribution) -> StepProgress {
        match reasoning::classify_start(&self.text, &self.markup.reasoning.open) {
            ReplyStart::Thinking { tag } => {
                self.consume(tag, TokenPart::Hidden, attribution);
                self.transition(ReplyState::ReasoningStart)
            }
            // A blank stop string must not wait for the text after it.
            ReplyStart::Undecided if end.is_none() && self.stop_hit().is_none() => {
                StepProgress::NeedsText
            }
            _ => self.transition(ReplyState::Content),
        }
    }

    fn reasoning(
        &mut self,
        end: Option<ReplyEnd>,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) -> StepProgress {
        let markup = Arc::clone(&self.markup);
        let close = self.find_close();
        let call = self.call_in_reasoning();
        if let Some((at, scope)) = call
            && close.is_none_or(|close| {
                at + markup.tool_calls.open.len() < close + markup.reasoning.close.len()
            })
        {
            self.emit_reasoning(at, attribution, deltas);
            let parser = CallParser::new(CallStart::CallTag, scope, &markup).in_reasoning();
            return self.transition(ReplyState::ReasoningCall {
                parser,
                read: 0,
                events: Vec::new(),
            });
        }
        if let Some(at) = close {
            let thought = reasoning::len_without_trailing_newlines(&self.text[..at]);
            self.emit_reasoning(thought, attribution, deltas);
            self.consume(
                at - thought + markup.reasoning.close.len(),
                TokenPart::Hidden,
                attribution,
            );
            self.markdown = MarkdownTracker::default();
            return self.transition(ReplyState::AfterReasoning);
        }
        let held = match end {
            Some(_) => 0,
            None if self.config.tools.is_empty() => {
                reasoning::partial_close_len(&self.text, &self.markup.reasoning.close)
            }
            None => partial_match_len(
                &self.text,
                &[&markup.reasoning.close, &markup.tool_calls.open],
            ),
        };
        let certain = self.text.len() - held;
        let certain = match end {
            Some(_) => certain,
            // Line breaks before the closing tag are not reasoning.
            None => reasoning::len_without_trailing_newlines(&self.text[..certain]),
        };
        self.emit_reasoning(certain, attribution, deltas);
        StepProgress::NeedsText
    }

    /// Offset of the closing reasoning tag; no text is searched twice.
    fn find_close(&mut self) -> Option<usize> {
        let from = self.close_search_from.saturating_sub(self.base);
        let found = self.text[from..]
            .find(&*self.markup.reasoning.close)
            .map(|at| from + at);
        let next = found.unwrap_or(
            self.text.len()
                - reasoning::partial_close_len(&self.text, &self.markup.reasoning.close),
        );
        self.close_search_from = self.base + next;
        found
    }

    /// Offset of a call tag in reasoning, and what must follow it there.
    fn call_in_reasoning(&self) -> Option<(usize, CallScope)> {
        if self.config.tools.is_empty() {
            return None;
        }
        let mut markdown = self.markdown.clone();
        let mut seen = 0;
        for (at, _) in self.text.match_indices(&*self.markup.tool_calls.open) {
            markdown.advance(&self.text[seen..at]);
            seen = at;
            if self.base + at >= self.ignore_before {
                let scope = match (markdown.is_code(), markdown.begins_line()) {
                    (true, _) => CallScope::DeclaredFunction,
                    (false, true) => CallScope::Any,
                    (false, false) => CallScope::Function,
                };
                return Some((at, scope));
            }
        }
        None
    }

    /// Parses a possible call within reasoning. It counts only if it completes before reasoning
    /// ends.
    fn reasoning_call(
        &mut self,
        end: Option<ReplyEnd>,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) -> StepProgress {
        let close = self.find_close();
        let ReplyState::ReasoningCall {
            parser,
            read,
            events,
        } = &mut self.state
        else {
            return StepProgress::NeedsText;
        };
        let limit = match (close, end) {
            (Some(close), _) => close,
            (None, Some(_)) => self.text.len(),
            (None, None) => {
                self.text.len()
                    - reasoning::partial_close_len(&self.text, &self.markup.reasoning.close)
            }
        };
        let within = self.text.get(*read..limit).unwrap_or_default();
        let call_end = match close {
            None => end,
            // The end of reasoning behind a closed call is the end of the call's text.
            Some(_) => within
                .trim_end()
                .ends_with(&*self.markup.tool_calls.close)
                .then_some(ReplyEnd::Eos),
        };
        let (consumed, status) = parser.feed(within, call_end, &self.config.tools, events);
        *read += consumed;
        match status {
            CallStatus::NeedsText if close.is_none() => StepProgress::NeedsText,
            CallStatus::Complete { repaired } => {
                let (read, events) = (*read, std::mem::take(events));
                self.reasoning_is_open = true;
                self.emit_call_events(events, deltas);
                self.consume(read, TokenPart::Call, attribution);
                self.end_call(repaired)
            }
            CallStatus::NeedsText | CallStatus::NotACall | CallStatus::Truncated => {
                self.ignore_before = self.base + 1;
                self.malformed += 1;
                tracing::debug!("what began like a tool call in thinking is thinking");
                self.transition(ReplyState::Reasoning)
            }
        }
    }

    fn call(
        &mut self,
        end: Option<ReplyEnd>,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) -> StepProgress {
        let ReplyState::Call {
            parser,
            leading_blanks,
            is_confirmed,
        } = &mut self.state
        else {
            return StepProgress::NeedsText;
        };
        let mut events = Vec::new();
        let (consumed, status) = parser.feed(
            &self.text[*leading_blanks..],
            end,
            &self.config.tools,
            &mut events,
        );
        if status == CallStatus::NotACall {
            self.ignore_before = self.base + *leading_blanks + 1;
            self.malformed += 1;
            tracing::debug!("what began like a tool call is text");
            return self.transition(ReplyState::Content);
        }
        if !events.is_empty() || *is_confirmed {
            let leading_blanks = std::mem::take(leading_blanks);
            *is_confirmed = true;
            self.consume(leading_blanks, TokenPart::Hidden, attribution);
            self.emit_call_events(events, deltas);
            self.consume(consumed, TokenPart::Call, attribution);
        }
        match status {
            CallStatus::Complete { repaired } => self.end_call(repaired),
            CallStatus::Truncated => self.transition(ReplyState::Finished),
            CallStatus::NeedsText | CallStatus::NotACall => StepProgress::NeedsText,
        }
    }

    fn emit_call_events(&mut self, events: Vec<CallEvent>, deltas: &mut Vec<ReplyDelta>) {
        for event in events {
            match event {
                CallEvent::Name(name) => {
                    let id = self.ids.next();
                    deltas.push(ReplyDelta::ToolCall {
                        index: self.started_calls,
                        id,
                        name,
                    });
                    self.started_calls += 1;
                }
                CallEvent::Arguments(fragment) => {
                    let index = self.started_calls.saturating_sub(1);
                    deltas.push(ReplyDelta::ToolArguments { index, fragment });
                }
            }
        }
    }

    fn end_call(&mut self, repaired: bool) -> StepProgress {
        self.complete_calls += 1;
        self.malformed += usize::from(repaired);
        self.has_content = true;
        self.markdown.begin_block();
        if self.config.parallel_tool_calls {
            return self.transition(ReplyState::AfterCall);
        }
        self.stopped = Some(EarlyStop::AfterCall);
        self.transition(ReplyState::Finished)
    }
}
