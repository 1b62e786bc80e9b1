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
    pub(super) fn stop_hit(&self) -> Option<(usize, usize)> {
        if self.n_tokens < self.config.min_tokens {
            return None;
        }
        find_first(&self.text, &self.config.stop)
    }

    fn first_mark(&self) -> Option<Mark> {
        let mut best: Option<(usize, Mark)> = None;
        let mut offer = |end: usize, mark: Mark| {
            if best.as_ref().is_none_or(|(other, _)| end < *other) {
                best = Some((end, mark));
            }
        };
        if let Some((start, which)) = self.stop_hit() {
            offer(
                start + self.config.stop[which].len(),
                Mark::Stop { start, which },
            );
        }
        if self.config.split_reasoning
            && let Some(start) = self.text.find(CLOSE)
        {
            offer(start + CLOSE.len(), Mark::Stray { start });
        }
        if let Some((start, end, opening)) = self.first_opening() {
            offer(
                end,
                Mark::Call {
                    start,
                    opening: opening.clone(),
                },
            );
        }
        best.map(|(_, mark)| mark)
    }

    /// The opening that is complete first, of those that stand where a call may begin.
    fn first_opening(&self) -> Option<(usize, usize, &Opening)> {
        if self.openings.is_empty() || !self.text.contains(['<', '{']) {
            return None;
        }
        let mut found: Vec<(usize, usize, &Opening)> = Vec::new();
        for (text, opening) in &self.openings {
            for (start, _) in self.text.match_indices(text.as_str()) {
                if self.base + start >= self.ignore_before {
                    found.push((start, start + text.len(), opening));
                }
                if *opening == Opening::Bare {
                    // Only the very first thing of a reply can be a bare call.
                    break;
                }
            }
        }
        found.sort_by_key(|(start, ..)| *start);
        let mut markdown = self.markdown.clone();
        let mut seen = 0;
        let mut valid: Vec<(usize, usize, &Opening)> = Vec::new();
        for (start, end, opening) in found {
            markdown.advance(&self.text[seen..start]);
            seen = start;
            let fits = match opening {
                Opening::Bare => !self.content_begun && self.text[..start].trim().is_empty(),
                opening => !opening.needs_line_start() || markdown.begins_line(),
            };
            if fits && !markdown.is_code() {
                valid.push((start, end, opening));
            }
        }
        valid.into_iter().min_by_key(|(_, end, _)| *end)
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
