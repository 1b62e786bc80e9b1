//! Finds control and user-defined strings in a text.

use std::collections::HashMap;
use std::ops::Range;

use contract::{TokenId, TokenKind, Vocab};

use crate::error::ChatError;

/// Strings that are one token whatever surrounds them.
pub(super) struct SpecialStrings {
    /// By first byte, longest first, so that the first match is the leftmost longest.
    by_first_byte: HashMap<u8, Vec<SpecialString>>,
}

struct SpecialString {
    text: String,
    id: TokenId,
    /// Whether it matches in literal text too: SentencePiece's user-defined tokens are pieces of
    /// ordinary text, such as runs of blanks and line breaks.
    in_literals: bool,
}

/// A special string found in a text.
pub(super) struct SpecialMatch {
    pub(super) id: TokenId,
    pub(super) range: Range<usize>,
}

impl SpecialStrings {
    pub(super) fn new(vocab: &Vocab) -> Result<SpecialStrings, ChatError> {
        let mut by_first_byte: HashMap<u8, Vec<SpecialString>> = HashMap::new();
        for (index, (text, kind)) in vocab.tokens.iter().zip(&vocab.kinds).enumerate() {
            if !matches!(kind, TokenKind::Control | TokenKind::UserDefined) {
                continue;
            }
            let Some(first) = text.bytes().next() else {
                continue;
            };
            let id = TokenId(
                u32::try_from(index)
                    .map_err(|_| ChatError::setup("the vocabulary has more than 2^32 tokens"))?,
            );
            let bucket = by_first_byte.entry(first).or_default();
            if let Some(other) = bucket.iter().find(|other| other.text == *text) {
                return Err(ChatError::setup(format!(
                    "tokens {} and {id} of the vocabulary are both {text:?}",
                    other.id
                )));
            }
            bucket.push(SpecialString {
                text: text.clone(),
                id,
                in_literals: vocab.pieces.is_some() && *kind == TokenKind::UserDefined,
            });
        }
        for bucket in by_first_byte.values_mut() {
            bucket.sort_by_key(|special| std::cmp::Reverse(special.text.len()));
        }
        Ok(SpecialStrings { by_first_byte })
    }

    pub(super) fn id_of(&self, text: &str) -> Option<TokenId> {
        let bucket = self.by_first_byte.get(text.as_bytes().first()?)?;
        bucket
            .iter()
            .find(|special| special.text == text)
            .map(|special| special.id)
    }

    /// Special strings of `text` from left to right, without overlap. A string that overlaps one of
    /// the `literals` (in order, disjoint) is skipped, unless it is a piece of ordinary text.
    pub(super) fn find_all<'a>(
        &'a self,
        text: &'a str,
        literals: &'a [Range<usize>],
    ) -> impl Iterator<Item = SpecialMatch> + 'a {
        let bytes = text.as_bytes();
        let mut at = 0;
        let mut next_literal = 0;
        std::iter::from_fn(move || {
            while at < bytes.len() {
                let Some(bucket) = self.by_first_byte.get(&bytes[at]) else {
                    at += 1;
                    continue;
                };
                while literals
                    .get(next_literal)
                    .is_some_and(|range| range.end <= at)
                {
                    next_literal += 1;
                }
                let hit = bucket.iter().find(|special| {
                    let end = at + special.text.len();
                    let masked = literals
                        .get(next_literal)
                        .is_some_and(|range| range.start < end);
                    (special.in_literals || !masked)
                        && bytes[at..].starts_with(special.text.as_bytes())
                });
                if let Some(special) = hit {
                    let range = at..at + special.text.len();
                    at = range.end;
                    return Some(SpecialMatch {
                        id: special.id,
                        range,
                    });
                }
                at += 1;
            }
            None
        })
    }
}
