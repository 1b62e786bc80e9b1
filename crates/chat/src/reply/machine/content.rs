//! Text: stop strings, stray tags, and where calls begin.

use super::{Machine, Progress, State};
use crate::reasoning::CLOSE;
use crate::reply::ledger::{Ledger, Place};
use crate::reply::{Piece, Stop};
use crate::stop::{find_first, held_back};
use crate::tools::{CallParser, End, Opening};

/// Something in the text that is not text. Of several, the one whose last byte comes first counts, since
/// that is the first to be certain.
enum Mark {
    /// A stop string begins here.
    Stop { start: usize, which: usize },
    /// A closing tag of thinking that nobody opened.
    Stray { start: usize },
    /// A call may begin here.
    Call { start: usize, opening: Opening },
}

impl Machine {
    pub(super) fn content(
        &mut self,
        end: Option<End>,
        ledger: &mut Ledger,
        pieces: &mut Vec<Piece>,
    ) -> Progress {
        match self.first_mark() {
            Some(Mark::Stop { start, which }) => {
                self.give_content(start, ledger, pieces);
                let stop = self.config.stop.get(which).cloned().unwrap_or_default();
                self.stopped = Some(Stop::StopString(stop));
                self.go(State::Over)
            }
            Some(Mark::Stray { start }) => {
                self.give_content(start, ledger, pieces);
                self.drop_text(CLOSE.len(), Place::Hidden, ledger);
                Progress::Moved
            }
            Some(Mark::Call { start, opening }) => {
                // Blanks before a call go with it, should it be one.
                let text = self.text[..start].trim_end().len();
                self.give_content(text, ledger, pieces);
                let parser = CallParser::new(opening);
                self.go(State::Call {
                    parser,
                    lead: start - text,
                    is_certain: false,
                })
            }
            None => {
                let certain = if end.is_some() {
                    self.text.len()
                } else {
                    self.certain_len()
                };
                self.give_content(certain, ledger, pieces);
                Progress::Stuck
            }
        }
    }

    fn give_content(&mut self, n_bytes: usize, ledger: &mut Ledger, pieces: &mut Vec<Piece>) {
        if n_bytes > 0 {
            let text = self.text[..n_bytes].to_owned();
            self.markdown.advance(&text);
            self.content_begun |= !text.trim().is_empty();
            pieces.push(Piece::Content(text));
            self.drop_text(n_bytes, Place::Content, ledger);
        }
    }

    /// Where a stop string begins, and which, if they count yet.
    pub(super) fn stop_hit(&mut self) -> Option<(usize, usize)> {
        if self.n_tokens < self.config.min_tokens || self.config.stop.is_empty() {
            return None;
        }
        let from = self.stop_from.saturating_sub(self.base);
        let found = find_first(&self.text[from..], &self.config.stop);
        if found.is_none() {
            let held = held_back(&self.text[from..], &self.config.stop);
            self.stop_from = self.base + self.text.len() - held;
        }
        found.map(|(start, which)| (from + start, which))
    }

    fn first_mark(&mut self) -> Option<Mark> {
        let mut best: Option<(usize, Mark)> = None;
        if let Some((start, which)) = self.stop_hit() {
            best = Some((
                start + self.config.stop[which].len(),
                Mark::Stop { start, which },
            ));
        }
        if self.config.split_reasoning
            && let Some(start) = self.find_close()
        {
            let end = start + CLOSE.len();
            if best.as_ref().is_none_or(|(other, _)| end < *other) {
                best = Some((end, Mark::Stray { start }));
            }
        }
        let limit = best.as_ref().map_or(self.text.len() + 1, |(end, _)| *end);
        match self.first_opening(limit) {
            Some((start, opening)) => Some(Mark::Call {
                start,
                opening: opening.clone(),
            }),
            None => best.map(|(_, mark)| mark),
        }
    }

    /// The opening that is complete first, of those that stand where a call may begin, if it is complete
    /// before byte `limit`.
    fn first_opening(&self, mut limit: usize) -> Option<(usize, &Opening)> {
        if self.openings.is_empty() {
            return None;
        }
        let mut best = None;
        let mut markdown = self.markdown.clone();
        let mut seen = 0;
        for (start, _) in self.text.match_indices(['<', '{']) {
            // A longer opening may be overtaken by a shorter one inside it, but by none behind it.
            if start >= limit {
                break;
            }
            markdown.advance(&self.text[seen..start]);
            seen = start;
            if self.base + start < self.ignore_before || markdown.is_code() {
                continue;
            }
            let rest = &self.text[start..];
            for (text, opening) in &self.openings {
                let fits = match opening {
                    Opening::Bare => !self.content_begun && self.text[..start].trim().is_empty(),
                    opening => !opening.needs_line_start() || markdown.begins_line(),
                };
                if fits && rest.starts_with(text.as_str()) && start + text.len() < limit {
                    limit = start + text.len();
                    best = Some((start, opening));
                }
            }
        }
        best
    }

    /// Bytes of text that can be nothing else any more.
    fn certain_len(&self) -> usize {
        let text = &self.text;
        let mut held = 0;
        if self.n_tokens >= self.config.min_tokens {
            held = held_back(text, &self.config.stop);
        }
        if self.config.split_reasoning {
            held = held.max(held_back(text, &[CLOSE]));
        }
        // All openings that are longer than one letter begin with this one.
        if text.contains('<') {
            for (opening, _) in &self.openings {
                held = held.max(held_back(text, &[opening]));
            }
        }
        let certain = text.len() - held;
        if self.openings.is_empty() {
            return certain;
        }
        // Blanks wait for what follows: before a call they go.
        text[..certain].trim_end().len()
    }
}
