//! Attributes each token to a part of the reply.

use std::collections::VecDeque;

/// The part of a reply a token belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TokenPart {
    /// None: tags, blanks around them, control tokens, text after a stop string.
    Hidden,
    /// A tool call.
    Call,
    /// Reasoning.
    Reasoning,
    /// Content.
    Content,
}

/// Tokens whose text is not fully consumed, by byte range in the visible text.
///
/// A token that spans several parts counts for the greatest: content before reasoning, reasoning
/// before calls.
#[derive(Debug, Default)]
pub(super) struct TokenAttribution {
    pending: VecDeque<PendingToken>,
    attributed: Vec<(usize, TokenPart)>,
    next_ordinal: usize,
    /// Visible bytes consumed.
    consumed: usize,
}

#[derive(Debug)]
struct PendingToken {
    ordinal: usize,
    start: usize,
    /// `None` while the token ends inside a code point.
    end: Option<usize>,
    place: TokenPart,
}

impl TokenAttribution {
    /// Records the next token. If `is_whole`, its text ends at `end`, as does that of earlier
    /// incomplete tokens.
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

    /// All recorded texts end at `end`.
    pub(super) fn complete(&mut self, end: usize) {
        for token in self.pending.iter_mut().rev() {
            if token.end.is_some() {
                break;
            }
            token.end = Some(end);
        }
        self.settle();
    }

    /// The next bytes, up to `end`, belong to this part.
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

    /// Attributes all pending tokens as they are.
    pub(super) fn finish(&mut self) {
        self.attributed.extend(
            self.pending
                .drain(..)
                .map(|token| (token.ordinal, token.place)),
        );
    }

    /// Tokens attributed since the last call, in order.
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
