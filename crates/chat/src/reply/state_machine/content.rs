//! Content: stop strings and call starts.

use super::{ReplyState, ReplyStateMachine, StepProgress};
use crate::reply::attribution::{TokenAttribution, TokenPart};
use crate::reply::{EarlyStop, ReplyDelta};
use crate::stop::{find_earliest_match, partial_match_len};
use crate::tools::{CallParser, CallScope, CallStart, ReplyEnd};

/// A mark in the content. Of several, the one whose last byte comes first counts, since it is
/// certain first.
enum ContentMark {
    /// A stop string.
    Stop { start: usize, which: usize },
    /// The closing tag of reasoning that a call interrupted.
    ReasoningClose { start: usize },
    /// A possible call.
    Call {
        start: usize,
        call_start: CallStart,
        scope: CallScope,
    },
}

impl ReplyStateMachine {
    pub(super) fn content(
        &mut self,
        end: Option<ReplyEnd>,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) -> StepProgress {
        match self.first_mark() {
            Some(ContentMark::Stop { start, which }) => {
                let stop = self.config.stop.get(which).cloned().unwrap_or_default();
                let end = if self.config.include_stop {
                    start + stop.len()
                } else {
                    start
                };
                self.emit_content(end, attribution, deltas);
                self.stopped = Some(EarlyStop::StopString(stop));
                self.transition(ReplyState::Finished)
            }
            Some(ContentMark::ReasoningClose { start }) => {
                self.emit_content(start, attribution, deltas);
                self.consume(
                    self.markup.reasoning.close.len(),
                    TokenPart::Hidden,
                    attribution,
                );
                self.reasoning_is_open = false;
                self.transition(ReplyState::AfterReasoning)
            }
            Some(ContentMark::Call {
                start,
                call_start,
                scope,
            }) => {
                // Blanks before a call are dropped with it.
                let text = self.text[..start].trim_end().len();
                self.emit_content(text, attribution, deltas);
                let parser = CallParser::new(call_start, scope, &self.markup);
                self.transition(ReplyState::Call {
                    parser,
                    leading_blanks: start - text,
                    is_confirmed: false,
                })
            }
            None => {
                let certain = if end.is_some() {
                    self.text.len()
                } else {
                    self.decided_len()
                };
                self.emit_content(certain, attribution, deltas);
                StepProgress::NeedsText
            }
        }
    }

    fn emit_content(
        &mut self,
        n_bytes: usize,
        attribution: &mut TokenAttribution,
        deltas: &mut Vec<ReplyDelta>,
    ) {
        if n_bytes > 0 {
            let text = self.text[..n_bytes].to_owned();
            self.markdown.advance(&text);
            self.has_content |= !text.trim().is_empty();
            deltas.push(ReplyDelta::Content(text));
            self.consume(n_bytes, TokenPart::Content, attribution);
        }
    }

    /// Start and index of a matched stop string, once they count.
    pub(super) fn stop_hit(&mut self) -> Option<(usize, usize)> {
        if self.n_tokens < self.config.min_tokens || self.config.stop.is_empty() {
            return None;
        }
        let from = self.stop_search_from.saturating_sub(self.base);
        let found = find_earliest_match(&self.text[from..], &self.config.stop);
        if found.is_none() {
            let held = partial_match_len(&self.text[from..], &self.config.stop);
            self.stop_search_from = self.base + self.text.len() - held;
        }
        found.map(|(start, which)| (from + start, which))
    }

    fn first_mark(&mut self) -> Option<ContentMark> {
        let mut best: Option<(usize, ContentMark)> = None;
        if let Some((start, which)) = self.stop_hit() {
            best = Some((
                start + self.config.stop[which].len(),
                ContentMark::Stop { start, which },
            ));
        }
        if self.reasoning_is_open
            && let Some(start) = self.find_close()
        {
            let end = start + self.markup.reasoning.close.len();
            if best.as_ref().is_none_or(|(other, _)| end < *other) {
                best = Some((end, ContentMark::ReasoningClose { start }));
            }
        }
        let limit = best.as_ref().map_or(self.text.len() + 1, |(end, _)| *end);
        match self.first_call_start(limit) {
            Some((start, call_start, scope)) => Some(ContentMark::Call {
                start,
                call_start: call_start.clone(),
                scope,
            }),
            None => best.map(|(_, mark)| mark),
        }
    }

    /// The call start that completes first at a valid position, if it completes before byte
    /// `limit`.
    fn first_call_start(&self, mut limit: usize) -> Option<(usize, &CallStart, CallScope)> {
        if self.call_starts.is_empty() {
            return None;
        }
        let mut best = None;
        let mut markdown = self.markdown.clone();
        let mut seen = 0;
        for (start, _) in self.text.match_indices(['<', '{']) {
            // A longer start may lose to a shorter one inside it, but to none after it.
            if start >= limit {
                break;
            }
            markdown.advance(&self.text[seen..start]);
            seen = start;
            if self.base + start < self.ignore_before {
                continue;
            }
            let scope = if markdown.is_code() {
                CallScope::DeclaredFunction
            } else {
                CallScope::Any
            };
            let rest = &self.text[start..];
            for (text, call_start) in &self.call_starts {
                let fits = match call_start {
                    call_start if markdown.is_code() => call_start.may_stand_in_code(),
                    CallStart::Bare => !self.has_content && self.text[..start].trim().is_empty(),
                    call_start => !call_start.needs_line_start() || markdown.begins_line(),
                };
                if fits && rest.starts_with(text.as_str()) && start + text.len() < limit {
                    limit = start + text.len();
                    best = Some((start, call_start, scope));
                }
            }
        }
        best
    }

    /// Bytes that are certainly content.
    fn decided_len(&self) -> usize {
        let text = &self.text;
        let mut held = 0;
        if self.n_tokens >= self.config.min_tokens {
            held = partial_match_len(text, &self.config.stop);
        }
        if self.reasoning_is_open {
            held = held.max(partial_match_len(text, &[&self.markup.reasoning.close]));
        }
        // All call starts longer than one character begin with `<`.
        if text.contains('<') {
            for (call_start, _) in &self.call_starts {
                held = held.max(partial_match_len(text, &[call_start]));
            }
        }
        let certain = text.len() - held;
        if self.call_starts.is_empty() {
            return certain;
        }
        // Blanks wait for the next text: before a call they are dropped.
        text[..certain].trim_end().len()
    }
}
