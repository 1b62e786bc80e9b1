//! Which part of the reply each token ended up in.

use std::collections::VecDeque;

/// Where a token's text went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Nowhere: tags, blanks around them, control tokens, text behind a stop string.
    Hidden,
    /// Into a tool call.
    Call,
    /// Into thinking.
    Reasoning,
    /// Into the text.
    Content,
}

/// Tokens whose text is not settled yet, by the byte ranges they cover in the visible text.
///
/// A token that covers several places counts for the greatest of them: content before thinking, thinking
/// before calls.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    waiting: VecDeque<Entry>,
    placed: Vec<(usize, Place)>,
    next_ordinal: usize,
    /// Visible bytes settled so far.
    settled: usize,
}

#[derive(Debug)]
struct Entry {
    ordinal: usize,
    start: usize,
    /// `None` while the token's last bytes wait for the rest of a code point.
    end: Option<usize>,
    place: Place,
}

impl Ledger {
    /// Enters the next token. `is_whole` says that its text ends at `end`, and with it that of the tokens
    /// before it.
    pub(super) fn enter(&mut self, start: usize, end: usize, is_whole: bool) {
        self.waiting.push_back(Entry {
            ordinal: self.next_ordinal,
            start,
            end: None,
            place: Place::Hidden,
        });
        self.next_ordinal += 1;
        if is_whole {
            self.complete(end);
        }
    }

    /// All texts entered so far end at `end`.
    pub(super) fn complete(&mut self, end: usize) {
        for entry in self.waiting.iter_mut().rev() {
            if entry.end.is_some() {
                break;
            }
            entry.end = Some(end);
        }
        self.settle();
    }

    /// The next bytes, up to `end`, went to `place`.
    pub(super) fn advance(&mut self, end: usize, place: Place) {
        for entry in &mut self.waiting {
            if entry.start >= end {
                break;
            }
            entry.place = entry.place.max(place);
        }
        self.settled = end;
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(entry) = self.waiting.front()
            && entry.end.is_some_and(|end| end <= self.settled)
        {
            self.placed.push((entry.ordinal, entry.place));
            self.waiting.pop_front();
        }
    }

    /// Settles everything that is left as hidden.
    pub(super) fn finish(&mut self) {
        self.placed.extend(
            self.waiting
                .drain(..)
                .map(|entry| (entry.ordinal, entry.place)),
        );
    }

    /// Tokens settled since the last call, in order.
    pub(super) fn take(&mut self) -> Vec<(usize, Place)> {
        std::mem::take(&mut self.placed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_settled_when_its_last_byte_is() {
        let mut ledger = Ledger::default();
        ledger.enter(0, 2, true);
        ledger.enter(2, 6, true);
        ledger.advance(3, Place::Content);
        assert_eq!(ledger.take(), [(0, Place::Content)]);
        ledger.advance(6, Place::Hidden);
        assert_eq!(ledger.take(), [(1, Place::Content)]);
    }

    #[test]
    fn parts_of_a_code_point_are_settled_together() {
        let mut ledger = Ledger::default();
        ledger.enter(0, 1, false);
        ledger.advance(1, Place::Content);
        ledger.enter(1, 1, false);
        assert_eq!(ledger.take(), []);
        ledger.enter(1, 5, true);
        ledger.advance(5, Place::Content);
        let all = [
            (0, Place::Content),
            (1, Place::Content),
            (2, Place::Content),
        ];
        assert_eq!(ledger.take(), all);
    }

    #[test]
    fn a_token_without_text_is_hidden() {
        let mut ledger = Ledger::default();
        ledger.enter(0, 0, true);
        assert_eq!(ledger.take(), [(0, Place::Hidden)]);
    }
}
