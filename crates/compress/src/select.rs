//! Selects the segments that stay.
//!
//! Two lists of segments take turns, so that the first has about two thirds of the kept tokens at
//! any budget:
//! 1. what repeats the query ([`crate::anchor`], [`crate::words`]), the heaviest words first,
//! 2. all others: head and tail of each content and the neighbours of the heaviest matches, then by
//!    score;
//!
//! among equals the better score per token goes first, then the earlier place. A segment is taken
//! if it still fits the budget. So the kept tokens never exceed the budget, no dropped segment
//! would still fit, and a larger budget never keeps fewer tokens.

use std::ops::Range;

use crate::anchor::{self, AnchorSettings};
use crate::segment::{self, SegmentLimits};
use crate::words;

/// The content of a message, or a part of it, that may be shortened.
#[derive(Debug, Clone, Copy)]
pub struct ContentPart<'a> {
    /// The text.
    pub text: &'a str,
    /// Its tokens in order. A token belongs to the segment that its first byte lies in.
    pub tokens: &'a [ScoredToken],
}

/// A token of a content with its score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoredToken {
    /// Its id.
    pub id: u32,
    /// Its first byte in the content.
    pub start: usize,
    /// How much the query depends on it; only the order matters. NaN counts as the lowest score.
    pub score: f32,
}

/// What the contents are searched for.
#[derive(Debug, Clone, Copy, Default)]
pub struct SelectionQuery<'a> {
    /// The text.
    pub text: &'a str,
    /// Ids of its tokens.
    pub tokens: &'a [u32],
}

/// What to keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelectionSettings {
    /// Share of the tokens of all contents to keep, between 0 and 1.
    pub keep: f64,
    /// The longest segments.
    pub limits: SegmentLimits,
    /// The head and the tail of a content have this many tokens each, and at most one in 256.
    pub edge_tokens: usize,
    /// Which anchors count.
    pub anchors: AnchorSettings,
}

impl Default for SelectionSettings {
    fn default() -> SelectionSettings {
        SelectionSettings {
            keep: 0.05,
            limits: SegmentLimits::default(),
            edge_tokens: 64,
            anchors: AnchorSettings::default(),
        }
    }
}

/// The parts of the contents that stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Byte ranges of each content, in order, adjacent ones joined.
    pub kept: Vec<Vec<Range<usize>>>,
    /// Tokens of all contents.
    pub tokens_before: usize,
    /// Tokens of the kept segments.
    pub tokens_after: usize,
}

impl Selection {
    /// The kept text of content `part`, whose whole text is `text`.
    pub fn text(&self, part: usize, text: &str) -> String {
        let ranges = self.kept.get(part).into_iter().flatten();
        ranges.filter_map(|range| text.get(range.clone())).collect()
    }
}

/// One segment of a content.
#[derive(Debug)]
struct RankedSegment {
    part: usize,
    bytes: Range<usize>,
    ids: Vec<u32>,
    /// Mean score of its tokens.
    score: f32,
    /// Lies at the head or the tail of its content.
    is_edge: bool,
}

/// Tokens of segments that repeat the query for each token of others.
const MATCHES_TO_OTHERS: usize = 2;

/// Selects segments of `parts` for a query.
///
/// With `keep` of 1 every byte stays.
pub fn select(
    parts: &[ContentPart<'_>],
    query: SelectionQuery<'_>,
    settings: &SelectionSettings,
) -> Selection {
    let mut candidates = Vec::new();
    for (part, content) in parts.iter().enumerate() {
        add_candidates(part, *content, settings, &mut candidates);
    }
    let tokens_before = candidates.iter().map(|found| found.ids.len()).sum();
    let mut left = budget(tokens_before, settings.keep);
    let mut is_kept = vec![false; candidates.len()];
    for at in order(parts, &candidates, query, settings) {
        let tokens = candidates[at].ids.len();
        if tokens <= left {
            left -= tokens;
            is_kept[at] = true;
        }
    }
    let mut kept: Vec<Vec<Range<usize>>> = vec![Vec::new(); parts.len()];
    let mut tokens_after = 0;
    for (found, _) in candidates.iter().zip(&is_kept).filter(|(_, kept)| **kept) {
        tokens_after += found.ids.len();
        let ranges = &mut kept[found.part];
        match ranges.last_mut() {
            Some(last) if last.end == found.bytes.start => last.end = found.bytes.end,
            _ => ranges.push(found.bytes.clone()),
        }
    }
    Selection {
        kept,
        tokens_before,
        tokens_after,
    }
}

/// The segments in the order in which they are taken; it does not depend on the budget.
fn order(
    parts: &[ContentPart<'_>],
    candidates: &[RankedSegment],
    query: SelectionQuery<'_>,
    settings: &SelectionSettings,
) -> Vec<usize> {
    let ids: Vec<Vec<u32>> = candidates.iter().map(|found| found.ids.clone()).collect();
    let texts = candidates.iter();
    let texts: Vec<&str> = texts
        .map(|found| &parts[found.part].text[found.bytes.clone()])
        .collect();
    let runs = anchor::find(&ids, query.tokens, settings.anchors);
    let n_tokens = ids.iter().map(Vec::len).sum();
    let words = words::find(&texts, query.text, settings.anchors.most_hits(n_tokens));
    let is_near = |at: usize, other: usize| {
        let neighbour = candidates.get(other);
        words.get(other).is_some_and(|found| found.is_strong)
            && neighbour.is_some_and(|found| found.part == candidates[at].part)
    };
    let comes_first =
        |at: usize| candidates[at].is_edge || is_near(at, at + 1) || at > 0 && is_near(at, at - 1);
    let by_score = |at: &usize, other: &usize| {
        let score = |at: &usize| candidates[*at].score;
        score(other).total_cmp(&score(at)).then(at.cmp(other))
    };
    let (mut matches, mut others): (Vec<usize>, Vec<usize>) =
        (0..candidates.len()).partition(|at| runs[*at] || words[*at].weight > 0.0);
    matches.sort_by(|at, other| {
        let weight = |at: &usize| words[*at].weight;
        weight(other)
            .total_cmp(&weight(at))
            .then(by_score(at, other))
    });
    others.sort_by(|at, other| {
        comes_first(*other)
            .cmp(&comes_first(*at))
            .then(by_score(at, other))
    });
    let (mut matches, mut others) = (
        matches.into_iter().peekable(),
        others.into_iter().peekable(),
    );
    let (mut of_matches, mut of_others) = (0, 0);
    let mut order = Vec::with_capacity(candidates.len());
    while matches.peek().is_some() || others.peek().is_some() {
        let is_match = matches.peek().is_some() && of_matches <= MATCHES_TO_OTHERS * of_others;
        let next = if is_match || others.peek().is_none() {
            matches.next().inspect(|at| of_matches += ids[*at].len())
        } else {
            others.next().inspect(|at| of_others += ids[*at].len())
        };
        order.extend(next);
    }
    order
}

/// Tokens that `keep` of `tokens` allows.
fn budget(tokens: usize, keep: f64) -> usize {
    // A product such as 100 * 0.07 is just above or below a whole number.
    let exact = tokens as f64 * keep.clamp(0.0, 1.0);
    ((exact + 1e-6).floor() as usize).min(tokens)
}

/// Appends the segments of a content.
fn add_candidates(
    part: usize,
    content: ContentPart<'_>,
    settings: &SelectionSettings,
    out: &mut Vec<RankedSegment>,
) {
    let edge = settings.edge_tokens.min(content.tokens.len() / 256);
    let mut tokens = content.tokens;
    let mut before = 0;
    for bytes in segment::split(content.text, settings.limits) {
        let n = tokens.partition_point(|token| token.start < bytes.end);
        let (own, rest) = tokens.split_at(n);
        tokens = rest;
        // A segment without a token of its own belongs to the segment before it.
        if own.is_empty()
            && let Some(last) = out.last_mut().filter(|last| last.part == part)
        {
            last.bytes.end = bytes.end;
            continue;
        }
        let sum: f64 = own.iter().map(|token| f64::from(token.score)).sum();
        let mean = (sum / own.len().max(1) as f64) as f32;
        out.push(RankedSegment {
            part,
            bytes,
            ids: own.iter().map(|token| token.id).collect(),
            score: if mean.is_nan() {
                f32::NEG_INFINITY
            } else {
                mean
            },
            is_edge: before < edge || rest.len() < edge,
        });
        before += n;
    }
}
