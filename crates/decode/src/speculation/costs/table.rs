//! The cost table: measured seconds of verify and draft passes by size.

use std::time::Duration;

/// A monotonic clock. This crate has none of its own.
pub type Clock = fn() -> Duration;

/// Measured seconds of verify and draft passes.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// `(rows, seconds)` of a verify, rows ascending.
    pub(super) verify: Vec<(usize, f64)>,
    /// `(sequences, seconds)` of a draft, sequences ascending.
    pub(super) draft: Vec<(usize, f64)>,
}

impl CostTable {
    /// A table of `(rows, seconds)` of verify and `(sequences, seconds)` of draft passes. Returns
    /// `None` if one is empty, not ascending, or has a time that is not positive and finite.
    pub fn new(verify: Vec<(usize, f64)>, draft: Vec<(usize, f64)>) -> Option<CostTable> {
        let good = |points: &[(usize, f64)]| {
            let times = points
                .iter()
                .all(|p| p.0 > 0 && p.1.is_finite() && p.1 > 0.0);
            !points.is_empty() && times && points.is_sorted_by(|a, b| a.0 < b.0)
        };
        (good(&verify) && good(&draft)).then_some(CostTable { verify, draft })
    }

    /// Seconds of a verify of `rows` nodes in all.
    pub fn verify(&self, rows: usize) -> f64 {
        interpolate(&self.verify, rows)
    }

    /// Seconds of a draft for `sequences`.
    pub fn draft(&self, sequences: usize) -> f64 {
        interpolate(&self.draft, sequences)
    }

    /// Speed-up over plain decoding if every token of the best-sized chain of up to `depth` were
    /// accepted.
    pub fn max_speedup(&self, depth: usize) -> f64 {
        let draft = self.draft(1);
        let at = |drafted: usize| {
            let rows = drafted + 1;
            rows as f64 * self.verify(1) / (draft + self.verify(rows))
        };
        (1..=depth).map(at).fold(0.0, f64::max)
    }

    /// The measured `(rows, seconds)` of a verify.
    pub fn verify_points(&self) -> &[(usize, f64)] {
        &self.verify
    }

    /// The measured `(sequences, seconds)` of a draft.
    pub fn draft_points(&self) -> &[(usize, f64)] {
        &self.draft
    }
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
