//! Which part of the reply each token ended up in.

use std::collections::VecDeque;

/// Where a token's text went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TokenPart {
    /// Nowhere: tags, blanks around them, control tokens, text behind a stop string.
    Hidden,
    /// Into a tool call.
    Call,
    /// Into thinking.
    Reasoning,
    /// Into the text.
    Content,
}

/// Tokens whose text is not consumed yet, by the byte ranges they cover in the visible text.
///
/// A token that covers several places counts for the greatest of them: content before thinking, thinking
/// before calls.
#[derive(Debug, Default)]
pub(super) struct TokenAttribution {
    pending: VecDeque<PendingToken>,
    attributed: Vec<(usize, TokenPart)>,
    next_ordinal: usize,
    /// Visible bytes consumed so far.
    consumed: usize,
}

#[derive(Debug)]
struct PendingToken {
    ordinal: usize,
    start: usize,
    /// `None` while the token's last bytes wait for the rest of a code point.
    end: Option<usize>,
    place: TokenPart,
}

impl TokenAttribution {
    /// Enters the next token. `is_whole` says that its text ends at `end`, and with it that of the tokens
    /// before it.
    pub(super) fn record(&mut self, start: usize, end: usize, is_whole: bool) {
        self.pending.push_back(PendingToken {
            ordinal: self.next_ordinal,
            start,
            end: None,
            place: TokenPart::Hidden,
        });
        self.next_ordinal += 1;
        if is_whole {
            self.complete(end);
        }
    }

    /// All texts entered so far end at `end`.
    pub(super) fn complete(&mut self, end: usize) {
        for token in self.pending.iter_mut().rev() {
            if token.end.is_some() {
                break;
            }
            token.end = Some(end);
        }
        self.settle();
    }

    /// The next bytes, up to `end`, went to `place`.
    pub(super) fn advance(&mut self, end: usize, place: TokenPart) {
        for token in &mut self.pending {
            if token.start >= end {
                break;
            }
            token.place = token.place.max(place);
        }
        self.consumed = end;
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(token) = self.pending.front()
            && token.end.is_some_and(|end| end <= self.consumed)
        {
            self.attributed.push((token.ordinal, token.place));
            self.pending.pop_front();
        }
    }

    /// Settles everything that is left as hidden.
    pub(super) fn finish(&mut self) {
        self.attributed.extend(
            self.pending
                .drain(..)
                .map(|token| (token.ordinal, token.place)),
        );
    }

    /// Tokens consumed since the last call, in order.
    pub(super) fn take(&mut self) -> Vec<(usize, TokenPart)> {
        std::mem::take(&mut self.attributed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_attributed_with_its_last_byte() {
        let mut attribution = TokenAttribution::default();
        attribution.record(0, 2, true);
        attribution.record(2, 6, true);
        attribution.advance(3, TokenPart::Content);
        assert_eq!(attribution.take(), [(0, TokenPart::Content)]);
        attribution.advance(6, TokenPart::Hidden);
        assert_eq!(attribution.take(), [(1, TokenPart::Content)]);
    }

    #[test]
    fn tokens_of_one_code_point_are_attributed_together() {
        let mut attribution = TokenAttribution::default();
        attribution.record(0, 1, false);
        attribution.advance(1, TokenPart::Content);
        attribution.record(1, 1, false);
        assert_eq!(attribution.take(), []);
        attribution.record(1, 5, true);
        attribution.advance(5, TokenPart::Content);
        let all = [
            (0, TokenPart::Content),
            (1, TokenPart::Content),
            (2, TokenPart::Content),
        ];
        assert_eq!(attribution.take(), all);
    }

    #[test]
    fn token_without_text_is_hidden() {
        let mut attribution = TokenAttribution::default();
        attribution.record(0, 0, true);
        assert_eq!(attribution.take(), [(0, TokenPart::Hidden)]);
    }
}
