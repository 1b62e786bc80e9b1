//! Requests for logits at a position, and the returned rows.

use std::sync::Arc;

use crate::{MassQuery, TokenId};

/// The logits that one prefill position or one tree node returns.
#[derive(Debug, Clone, Default)]
pub struct LogitsRequest {
    /// The part of the row to return.
    pub selection: LogitsSelection,
    /// Logits processors applied before ranking; `None` keeps raw logits.
    pub processors: Option<Arc<LogitsProcessors>>,
    /// With [`LogitsSelection::Full`]: what the row is for. A device may then return the part that
    /// decides, with [`LogitsRow::mass`], instead of the row.
    pub mass: Option<MassQuery>,
}

/// The part of a logits row to return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogitsSelection {
    /// No row.
    #[default]
    None,
    /// The `k >= 1` best tokens by edited logit, best first; ties go to the lower id.
    TopK(usize),
    /// Every token in id order.
    Full,
}

impl LogitsRequest {
    /// No row.
    pub const NONE: LogitsRequest = LogitsRequest {
        selection: LogitsSelection::None,
        processors: None,
        mass: None,
    };

    /// The `k` best tokens by raw logit.
    pub fn top_k(k: usize) -> LogitsRequest {
        LogitsRequest {
            selection: LogitsSelection::TopK(k),
            processors: None,
            mass: None,
        }
    }

    /// The whole raw row.
    pub fn full() -> LogitsRequest {
        LogitsRequest {
            selection: LogitsSelection::Full,
            processors: None,
            mass: None,
        }
    }
}

/// Logits processors, applied in this order: mask, bias, repetition, frequency and presence
/// penalty.
///
/// For token `t` with raw logit `x`:
/// ```text
/// x = -inf                                    where `allowed` excludes t
/// x += bias[t]
/// x = x > 0 ? x / repetition : x * repetition where counts[t].seen
/// x -= frequency * counts[t].generated + presence * (counts[t].generated > 0)
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LogitsProcessors {
    /// The allowed tokens; `None` allows all.
    pub allowed: Option<Arc<TokenMask>>,
    /// Added to single logits; lists each token at most once.
    pub bias: Vec<(TokenId, f32)>,
    /// Repetition penalty, 1.0 for none; above 0.
    pub repetition: f32,
    /// Frequency penalty, 0.0 for none.
    pub frequency: f32,
    /// Presence penalty, 0.0 for none.
    pub presence: f32,
    /// Token counts for the penalties; lists each token at most once.
    pub counts: Vec<TokenCount>,
}

/// How often a token has occurred, for the penalties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCount {
    /// The token.
    pub token: TokenId,
    /// Whether it occurs in the repetition window (prompt and output).
    pub seen: bool,
    /// Number of times it was generated.
    pub generated: u32,
}

impl Default for LogitsProcessors {
    fn default() -> LogitsProcessors {
        LogitsProcessors {
            allowed: None,
            bias: Vec::new(),
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
            counts: Vec::new(),
        }
    }
}

impl LogitsProcessors {
    /// Applies the processors to a whole row `[vocab]`. Ignores ids beyond the row.
    ///
    /// This function is the definition: every device must return the same values.
    pub fn apply(&self, logits: &mut [f32]) {
        if let Some(allowed) = &self.allowed {
            for (i, x) in logits.iter_mut().enumerate() {
                if !allowed.contains(TokenId(i as u32)) {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        for &(token, bias) in &self.bias {
            if let Some(x) = logits.get_mut(token.index()) {
                *x += bias;
            }
        }
        for count in &self.counts {
            let Some(x) = logits.get_mut(count.token.index()) else {
                continue;
            };
            if count.seen && self.repetition != 1.0 {
                *x = if *x > 0.0 {
                    *x / self.repetition
                } else {
                    *x * self.repetition
                };
            }
            if count.generated > 0 {
                *x -= self.frequency * count.generated as f32 + self.presence;
            }
        }
    }
}

/// A set of tokens as a bit set over the vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u64>,
}

impl TokenMask {
    /// The empty set over `vocab` tokens.
    pub fn none(vocab: usize) -> TokenMask {
        TokenMask {
            words: vec![0; vocab.div_ceil(64)],
        }
    }

    /// The set of all `vocab` tokens.
    pub fn all(vocab: usize) -> TokenMask {
        let mut mask = TokenMask {
            words: vec![u64::MAX; vocab.div_ceil(64)],
        };
        if let (Some(last), rest @ 1..) = (mask.words.last_mut(), vocab % 64) {
            *last = (1 << rest) - 1;
        }
        mask
    }

    /// The set over `vocab` tokens with these [`words`](TokenMask::words). Drops words and bits
    /// beyond the vocabulary; missing words are empty.
    pub fn from_words(vocab: usize, words: impl IntoIterator<Item = u64>) -> TokenMask {
        let mut mask = TokenMask::all(vocab);
        let words = words.into_iter().chain(std::iter::repeat(0));
        for (word, given) in mask.words.iter_mut().zip(words) {
            *word &= given;
        }
        mask
    }

    /// Adds a token. Ignores ids beyond the vocabulary.
    pub fn insert(&mut self, token: TokenId) {
        if let Some(word) = self.words.get_mut(token.index() / 64) {
            *word |= 1 << (token.index() % 64);
        }
    }

    /// Removes a token.
    pub fn remove(&mut self, token: TokenId) {
        if let Some(word) = self.words.get_mut(token.index() / 64) {
            *word &= !(1 << (token.index() % 64));
        }
    }

    /// Whether a token is in the set.
    pub fn contains(&self, token: TokenId) -> bool {
        self.words
            .get(token.index() / 64)
            .is_some_and(|w| w >> (token.index() % 64) & 1 == 1)
    }

    /// Adds the tokens of `other`, a set over the same vocabulary.
    pub fn unite(&mut self, other: &TokenMask) {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word |= other;
        }
    }

    /// Removes the tokens that are not in `other`, a set over the same vocabulary.
    pub fn intersect(&mut self, other: &TokenMask) {
        let others = other.words.iter().copied().chain(std::iter::repeat(0));
        for (word, other) in self.words.iter_mut().zip(others) {
            *word &= other;
        }
    }

    /// The words, lowest ids first, bit `i % 64` of word `i / 64` for token `i`.
    pub fn words(&self) -> &[u64] {
        &self.words
    }
}

/// The target's logits at one position.
///
/// `ids`, `logits` and `raw` have one length: `k` or less for [`LogitsSelection::TopK`], the
/// vocabulary for [`LogitsSelection::Full`] (then `ids` counts 0, 1, 2, …), nothing for
/// [`LogitsSelection::None`]. A row that answers a [`MassQuery`] by a part has the token at the
/// share, or the best tokens down to [`MassCut::least_mass`](crate::MassCut::least_mass).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogitsRow {
    /// The tokens, best first for `TopK`, in id order for `Full`.
    pub ids: Vec<TokenId>,
    /// Edited logits of `ids`, for sampling.
    pub logits: Vec<f32>,
    /// Raw logits of `ids`, for reported logprobs.
    pub raw: Vec<f32>,
    /// Log-sum-exp of the whole edited row.
    pub lse: f32,
    /// Log-sum-exp of the whole raw row.
    pub raw_lse: f32,
    /// Total mass of the whole edited row, if the row answers a [`MassQuery`] by a part; else 0.
    pub mass: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logit_edits_apply_in_documented_order() {
        let mut allowed = TokenMask::all(4);
        allowed.remove(TokenId(3));
        let processors = LogitsProcessors {
            allowed: Some(Arc::new(allowed)),
            bias: vec![(TokenId(0), 1.0), (TokenId(9), 5.0)],
            repetition: 2.0,
            frequency: 0.5,
            presence: 0.25,
            counts: vec![
                TokenCount {
                    token: TokenId(0),
                    seen: true,
                    generated: 2,
                },
                TokenCount {
                    token: TokenId(1),
                    seen: true,
                    generated: 0,
                },
                TokenCount {
                    token: TokenId(2),
                    seen: false,
                    generated: 1,
                },
            ],
        };
        let mut row = [3.0, -1.0, 1.0, 7.0];
        processors.apply(&mut row);
        assert_eq!(
            row,
            [(3.0 + 1.0) / 2.0 - 1.25, -2.0, 0.25, f32::NEG_INFINITY]
        );
    }

    #[test]
    fn full_mask_sets_no_bit_beyond_the_vocabulary() {
        for vocab in [1, 63, 64, 65, 128] {
            let mask = TokenMask::all(vocab);
            let ones: u32 = mask.words().iter().map(|w| w.count_ones()).sum();
            assert_eq!(ones as usize, vocab);
            assert!(!mask.contains(TokenId(vocab as u32)));
        }
    }
}
