//! The cost table: measured seconds of verify and draft passes by size.

use std::time::Duration;

use crate::speculation::sources::{DraftSource, SourceSet};
use crate::speculation::waiting::Waiting;

/// A monotonic clock. This crate has none of its own.
pub type Clock = fn() -> Duration;

/// Measured seconds of verify and draft passes.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// `(rows, seconds)` of a verify, rows ascending.
    pub(super) verify: Vec<(usize, f64)>,
    /// `(sequences, seconds)` of a draft by source, sequences ascending; empty if it costs nothing.
    pub(super) drafts: [Vec<(usize, f64)>; DraftSource::ALL.len()],
    /// Seconds by source for each committed token that waits for its draft.
    waiting: [f64; DraftSource::ALL.len()],
}

/// The drafts of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DraftUse {
    /// Sequences that the draft model drafts for; in a narrow draft, those whose rows would fill as
    /// much of a whole one.
    pub(crate) block: usize,
    /// Sequences that the multi-token-prediction head drafts for.
    pub(crate) mtp: usize,
    /// Depths of the head's draft.
    pub(crate) mtp_depths: usize,
    /// Committed tokens that waited for the drafts, by source, of all sequences together.
    pub(crate) waiting: Waiting,
}

impl DraftUse {
    /// Adds the tokens of a sequence that wait for a source's draft.
    pub(crate) fn add_waiting(&mut self, source: DraftSource, tokens: Waiting) {
        self.waiting[source.index()] += tokens[source.index()];
    }
}

impl CostTable {
    /// A table of `(rows, seconds)` of verify passes. Returns `None` if it is empty, not ascending,
    /// or has a time that is not positive and finite.
    pub fn new(verify: Vec<(usize, f64)>) -> Option<CostTable> {
        is_good(&verify).then_some(CostTable {
            verify,
            drafts: Default::default(),
            waiting: Default::default(),
        })
    }

    /// The table with `(sequences, seconds)` of a source's drafts: of a block, or of one depth of
    /// the head. Returns `None` under the conditions of [`new`](CostTable::new).
    #[must_use]
    pub fn with_draft(
        mut self,
        source: DraftSource,
        draft: Vec<(usize, f64)>,
    ) -> Option<CostTable> {
        if !is_good(&draft) {
            return None;
        }
        self.drafts[source.index()] = draft;
        Some(self)
    }

    /// The table with the seconds that a source's draft takes more for each committed token whose
    /// keys and values it has to store. Other than positive and finite ones count as none.
    #[must_use]
    pub fn with_waiting(mut self, source: DraftSource, seconds: f64) -> CostTable {
        let counts = seconds.is_finite() && seconds > 0.0;
        self.waiting[source.index()] = if counts { seconds } else { 0.0 };
        self
    }

    /// Seconds of `tokens` committed tokens that wait for a source's draft.
    pub fn waiting(&self, source: DraftSource, tokens: usize) -> f64 {
        self.waiting[source.index()] * tokens as f64
    }

    /// The same for the drafts of some sources.
    pub(crate) fn all_waiting(&self, sources: SourceSet, tokens: Waiting) -> f64 {
        let seconds = sources
            .iter()
            .map(|of| self.waiting(of, tokens[of.index()]));
        seconds.sum()
    }

    /// Seconds of a verify of `rows` nodes in all.
    pub fn verify(&self, rows: usize) -> f64 {
        interpolate(&self.verify, rows)
    }

    /// Seconds of a source's draft for `sequences`: of a block, or of one depth of the head.
    pub fn draft(&self, source: DraftSource, sequences: usize) -> f64 {
        let points = &self.drafts[source.index()];
        if points.is_empty() || sequences == 0 {
            return 0.0;
        }
        interpolate(points, sequences)
    }

    /// Seconds of the drafts of a step.
    pub(crate) fn drafts(&self, of: DraftUse) -> f64 {
        self.draft(DraftSource::Block, of.block)
            + of.mtp_depths as f64 * self.draft(DraftSource::Mtp, of.mtp)
            + self.all_waiting(SourceSet::ALL, of.waiting)
    }

    /// Seconds of the drafts of some sources for `sequences`, with the head as deep as it usually
    /// drafts, or `depth` if that is less.
    pub(crate) fn usual_drafts(&self, sources: SourceSet, sequences: usize, depth: usize) -> f64 {
        let n = |source| {
            if sources.contains(source) {
                sequences
            } else {
                0
            }
        };
        self.drafts(DraftUse {
            block: n(DraftSource::Block),
            mtp: n(DraftSource::Mtp),
            mtp_depths: super::MTP_USUAL_DEPTH.min(depth),
            ..DraftUse::default()
        })
    }

    /// Speed-up over plain decoding if every token of the best-sized chain of up to `depth` that
    /// `sources` draft were accepted.
    pub fn max_speedup(&self, sources: SourceSet, depth: usize) -> f64 {
        let at = |drafted: usize| {
            let rows = drafted + 1;
            let mut draft = self.usual_drafts(sources, 1, drafted);
            if sources.without(DraftSource::Suffix) == SourceSet::NONE.with(DraftSource::Mtp) {
                // Only the head drafts, one depth per token.
                draft = drafted as f64 * self.draft(DraftSource::Mtp, 1);
            }
            rows as f64 * self.verify(1) / (draft + self.verify(rows))
        };
        (1..=depth).map(at).fold(0.0, f64::max)
    }

    /// The measured `(rows, seconds)` of a verify.
    pub fn verify_points(&self) -> &[(usize, f64)] {
        &self.verify
    }

    /// The measured `(sequences, seconds)` of a source's drafts; empty if it was not measured.
    pub fn draft_points(&self, source: DraftSource) -> &[(usize, f64)] {
        &self.drafts[source.index()]
    }
}

/// Whether points are ascending with positive times.
fn is_good(points: &[(usize, f64)]) -> bool {
    let times = points
        .iter()
        .all(|p| p.0 > 0 && p.1.is_finite() && p.1 > 0.0);
    !points.is_empty() && times && points.is_sorted_by(|a, b| a.0 < b.0)
}

/// Linear between points; beyond the last one, along the line through it and the first.
fn interpolate(points: &[(usize, f64)], at: usize) -> f64 {
    let above = points.partition_point(|p| p.0 < at);
    match (above.checked_sub(1).map(|i| points[i]), points.get(above)) {
        (_, Some(&(x, y))) if x == at => y,
        (None, Some(&(_, y))) => y,
        (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (at - x0) as f64 / (x1 - x0) as f64,
        (Some((x1, y1)), None) => {
            let (x0, y0) = points[0];
            if x1 > x0 {
                y1 + (y1 - y0).max(0.0) * (at - x1) as f64 / (x1 - x0) as f64
            } else {
                y1 * at as f64 / x1 as f64
            }
        }
        (None, None) => 1.0,
    }
}
