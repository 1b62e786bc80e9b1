//! Scores a text and selects which segments of it stay.

use std::ops::Range;

use chat::SpecialTokens;
use compress::{
    ContentPart, ScoredToken, SegmentLimits, Selection, SelectionQuery, SelectionSettings, select,
};
use contract::TokenId;

use super::scorer_thread::ScoringClient;
use super::{PromptCompressor, ScoringError};

/// The longest block of code that is kept whole, in tokens of the budget's share.
const BLOCK_SHARE: usize = 8;
/// Bytes of a token, about.
const TOKEN_BYTES: usize = 4;

/// A text with its tokens, as the served model reads it.
#[derive(Clone, Copy)]
pub(super) struct TokenizedText<'a> {
    pub(super) text: &'a str,
    pub(super) ids: &'a [TokenId],
    /// First byte of each token.
    pub(super) starts: &'a [usize],
    /// How a scorer with another tokenizer reads it.
    pub(super) special: SpecialTokens,
}

impl TokenizedText<'_> {
    fn tokens_in(&self, bytes: &Range<usize>) -> Range<usize> {
        let first = self.starts.partition_point(|start| *start < bytes.start);
        first..self.starts.partition_point(|start| *start < bytes.end)
    }
}

/// Byte ranges of a text.
pub(super) struct MarkedRanges {
    /// Parts that may be shortened, in order.
    pub(super) parts: Vec<Range<usize>>,
    /// What the parts are searched for.
    pub(super) query: Range<usize>,
    /// The byte at whose end the scorer's tail lies.
    pub(super) tail_end: usize,
}

impl PromptCompressor {
    /// Scores a text and selects segments of its parts; `keep` is their share of tokens.
    pub(super) fn selection(
        &self,
        of: TokenizedText<'_>,
        marked: &MarkedRanges,
        keep: f64,
        client: ScoringClient<'_>,
    ) -> Result<Selection, ScoringError> {
        let scores = self.scores(of, marked.tail_end, client)?;
        let tokens: Vec<Vec<ScoredToken>> = marked
            .parts
            .iter()
            .map(|part| {
                let token = |at: usize| ScoredToken {
                    id: of.ids[at].0,
                    start: of.starts[at] - part.start,
                    score: scores.at(of.starts[at]),
                };
                of.tokens_in(part).map(token).collect()
            })
            .collect();
        let ranges = marked.parts.iter().zip(&tokens);
        let parts: Vec<ContentPart<'_>> = ranges
            .map(|(part, tokens)| ContentPart {
                text: &of.text[part.clone()],
                tokens,
            })
            .collect();
        let ids = of.ids[of.tokens_in(&marked.query)].iter();
        let ids: Vec<u32> = ids.map(|id| id.0).collect();
        let query = SelectionQuery {
            text: &of.text[marked.query.clone()],
            tokens: &ids,
        };
        let total: usize = tokens.iter().map(Vec::len).sum();
        let block_bytes = (total as f64 * keep) as usize / BLOCK_SHARE * TOKEN_BYTES;
        let limits = SegmentLimits::default();
        let settings = SelectionSettings {
            keep,
            limits: SegmentLimits {
                block_bytes: block_bytes.clamp(limits.sentence_bytes, 4 * limits.block_bytes),
                ..limits
            },
            ..SelectionSettings::default()
        };
        Ok(select(&parts, query, &settings))
    }

    /// Scores of a text up to byte `end`.
    fn scores(
        &self,
        of: TokenizedText<'_>,
        end: usize,
        client: ScoringClient<'_>,
    ) -> Result<ByteScores, ScoringError> {
        let n = of.starts.partition_point(|start| *start < end);
        let (ids, starts) = match &self.tokenizer {
            None => (of.ids[..n].to_vec(), of.starts[..n].to_vec()),
            Some(own) => {
                let text = &of.text[..end];
                let ids = own.encode(text, of.special);
                let ids = ids.map_err(|error| ScoringError::Text(error.to_string()))?;
                let starts = own.token_starts(text, &ids).ok_or_else(|| {
                    ScoringError::Text("the scorer's tokens are not those of the text".to_owned())
                })?;
                (ids, starts)
            }
        };
        let mut settings = self.settings.score;
        settings.tail_tokens = settings.tail_tokens.min(ids.len());
        let scores = self.scorer.score(ids, settings, client)?;
        Ok(ByteScores {
            starts,
            scores,
            chunk: settings.chunk,
        })
    }
}

/// Scores of a text by byte.
struct ByteScores {
    /// First byte of each of the scorer's tokens.
    starts: Vec<usize>,
    /// Per chunk of these tokens.
    scores: Vec<f32>,
    chunk: usize,
}

impl ByteScores {
    /// The score of the token that byte `at` lies in; 0 behind the scored text.
    fn at(&self, at: usize) -> f32 {
        let token = self.starts.partition_point(|start| *start <= at).max(1) - 1;
        self.scores.get(token / self.chunk).copied().unwrap_or(0.0)
    }
}
