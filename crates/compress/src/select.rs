//! Selects the segments that stay.
//!
//! Segments are taken in this order, each if it still fits the budget:
//! 1. anchors ([`crate::anchor`]),
//! 2. head and tail of each content, and the neighbours of anchors,
//! 3. all others;
//!
//! within a class the best score per token first, then the earlier place. So the kept tokens never
//! exceed the budget, no dropped segment would still fit, and a larger budget never keeps fewer
//! tokens.

use std::ops::Range;

use crate::anchor::{self, AnchorSettings};
use crate::segment::{self, SegmentLimits};

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

/// What to keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelectionSettings {
    /// Share of the tokens of all contents to keep, between 0 and 1.
    pub keep: f64,
    /// The longest segments.
    pub limits: SegmentLimits,
    /// The head and the tail of a content have this many tokens each, and at most one in 128.
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

/// Class of a segment; a lower one is taken first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SelectionClass {
    Anchor,
    Edge,
    Other,
}

/// Selects segments of `parts` for a query with the tokens `query`.
///
/// With `keep` of 1 every byte stays.
pub fn select(parts: &[ContentPart<'_>], query: &[u32], settings: &SelectionSettings) -> Selection {
    let mut candidates = Vec::new();
    for (part, content) in parts.iter().enumerate() {
        add_candidates(part, *content, settings, &mut candidates);
    }
    let tokens_before = candidates.iter().map(|found| found.ids.len()).sum();
    let ids: Vec<Vec<u32>> = candidates.iter().map(|found| found.ids.clone()).collect();
    let anchors = anchor::find(&ids, query, settings.anchors);
    let class = |at: usize| {
        let has_part = |other: usize| {
            let neighbour = candidates.get(other);
            neighbour.is_some_and(|found| found.part == candidates[at].part)
        };
        let beside = |other: usize| has_part(other) && anchors[other];
        if anchors[at] {
            SelectionClass::Anchor
        } else if candidates[at].is_edge || beside(at + 1) || at > 0 && beside(at - 1) {
            SelectionClass::Edge
        } else {
            SelectionClass::Other
        }
    };
    let mut order: Vec<(SelectionClass, usize)> =
        (0..candidates.len()).map(|at| (class(at), at)).collect();
    order.sort_by(|(class, at), (other_class, other)| {
        let by_score = candidates[*other].score.total_cmp(&candidates[*at].score);
        class.cmp(other_class).then(by_score).then(at.cmp(other))
    });
    let mut left = budget(tokens_before, settings.keep);
    let mut is_kept = vec![false; candidates.len()];
    for (_, at) in order {
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
    let edge = settings.edge_tokens.min(content.tokens.len() / 128);
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
