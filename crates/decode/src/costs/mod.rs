//! What passes cost, and how large a tree is worth its pass.
//!
//! With `E` the tokens expected of a round and `C` its cost, nodes are worth adding as long as `E / C` grows.
//! The costs are measured on the very device and model; without a table, the budget alone decides.

mod measure;

use std::time::Duration;

pub use measure::measure;

use crate::StepTimes;

/// A clock that only moves forward. The crate has none of its own.
pub type Clock = fn() -> Duration;

/// Measured times of the calls of a round, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// `(rows, seconds)` of a verify, rows rising.
    verify: Vec<(usize, f64)>,
    /// `(sequences, seconds)` of a draft, sequences rising.
    draft: Vec<(usize, f64)>,
}

impl CostTable {
    /// A table of `(rows, seconds)` of a verify and `(sequences, seconds)` of a draft; `None` where one is
    /// empty, does not rise in its first column, or holds a time that is no positive number.
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

    /// The most that drafting could bring: tokens a second against plain decoding, were every drafted token of
    /// the best-sized chain of up to `depth` kept.
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

/// The table as rounds go now: it was measured after few tokens, contexts grow, and machines have other work.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OnlineCostModel {
    measured: CostTable,
    now: CostTable,
}

impl OnlineCostModel {
    /// As measured.
    pub(crate) fn new(measured: CostTable) -> OnlineCostModel {
        OnlineCostModel {
            now: measured.clone(),
            measured,
        }
    }

    /// The table as rounds go now.
    pub(crate) fn now(&self) -> &CostTable {
        &self.now
    }

    /// Takes in a round of `rows` nodes and of drafts for `drafted` sequences. Times of a clock that stands still
    /// say nothing.
    pub(crate) fn learn(&mut self, (rows, drafted): (usize, usize), times: StepTimes) {
        /// What one round counts; most are alike, and some are disturbed.
        const EMA_WEIGHT: f64 = 0.2;
        /// With which power a number of rows that is less than half or more than twice its own goes along. A power, and
        /// not a share of each step: what noise adds and takes away again must leave nothing behind.
        const FAR_EXPONENT: f64 = 0.25;
        /// How much of what is thought of other passes each round forgets, in favour of what was measured at first
        /// and the speed of now. What a busy hour has taught would else never be found out to be over.
        const FORGET_RATE: f64 = 1.0 / 256.0;
        let deviation = |took: Duration, expected: f64| {
            let deviation = took.as_secs_f64() / expected;
            (deviation > 0.0).then(|| deviation.clamp(0.5, 2.0) - 1.0)
        };
        let Some(verified) = deviation(times.verify + times.commit, self.now.verify(rows)) else {
            return;
        };
        let factor = 1.0 + EMA_WEIGHT * verified;
        let is_near = |size: usize| size <= 2 * rows && rows <= 2 * size;
        for (size, seconds) in &mut self.now.verify {
            *seconds *= factor.powf(if is_near(*size) { 1.0 } else { FAR_EXPONENT });
        }
        let speed = self.now.verify(rows) / self.measured.verify(rows);
        let fade = |(now, first): (&mut (usize, f64), &(usize, f64))| {
            now.1 *= (first.1 * speed / now.1).powf(FORGET_RATE);
        };
        let sizes = self.now.verify.iter_mut().zip(&self.measured.verify);
        sizes.filter(|(now, _)| !is_near(now.0)).for_each(fade);
        match deviation(times.draft, self.now.draft(drafted)).filter(|_| drafted > 0) {
            Some(deviation) => {
                for (_, seconds) in &mut self.now.draft {
                    *seconds *= 1.0 + EMA_WEIGHT * deviation;
                }
            }
            None => {
                let drafts = self.now.draft.iter_mut();
                drafts.zip(&self.measured.draft).for_each(fade);
            }
        }
    }
}

/// Between two points a straight line; beyond the last one, in proportion to it and the first.
fn interpolate(points: &[(usize, f64)], at: usize) -> f64 {
    let above = points.partition_point(|p| p.0 < at);
    match (above.checked_sub(1).map(|i| points[i]), points.get(above)) {
        (_, Some(&(x, y))) if x == at => y,
        (None, Some(&(_, y))) => y,
        (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (at - x0) as f64 / (x1 - x0) as f64,
        (Some((x1, y1)), None) => {
            let (x0, y0) = points[0];
            match x1 > x0 {
                true => y1 + (y1 - y0).max(0.0) * (at - x1) as f64 / (x1 - x0) as f64,
                false => y1 * at as f64 / x1 as f64,
            }
        }
        (None, None) => 1.0,
    }
}

/// One sequence's nodes in the order they would be added: the probability that each is kept.
pub(crate) struct NodeChances {
    /// Nodes that are in any case: the root and what is forced.
    pub(crate) certain: usize,
    /// `[drafted nodes]`.
    pub(crate) chances: Vec<f64>,
}

/// How many drafted nodes of each sequence a round should carry, and what it may hope for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TreeSizes {
    pub(crate) nodes: Vec<usize>,
    /// Tokens expected over all sequences.
    pub(crate) tokens: f64,
    /// Seconds expected, draft included.
    pub(crate) seconds: f64,
}

/// The sizes at which tokens per second are most, beside `others` nodes of sequences that do not draft. Nodes are
/// taken by falling chance over all sequences, and every number of them is tried, so that steps in the table are
/// seen for what they are.
pub(crate) fn choose_sizes(
    costs: &CostTable,
    chances_by_sequence: &[NodeChances],
    others: usize,
) -> TreeSizes {
    let certain = others + chances_by_sequence.iter().map(|p| p.certain).sum::<usize>();
    let draft = costs.draft(chances_by_sequence.len());
    let mut nodes = vec![0; chances_by_sequence.len()];
    let (mut rows, mut tokens) = (certain, certain as f64);
    let mut best = TreeSizes {
        nodes: nodes.clone(),
        tokens,
        seconds: draft + costs.verify(rows),
    };
    loop {
        let next = chances_by_sequence.iter().zip(&nodes).enumerate();
        let next = next.filter_map(|(i, (p, n))| Some((i, *p.chances.get(*n)?)));
        let Some((i, chance)) = next.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))) else {
            return best;
        };
        nodes[i] += 1;
        rows += 1;
        tokens += chance;
        let seconds = draft + costs.verify(rows);
        if tokens / seconds > best.tokens / best.seconds {
            best = TreeSizes {
                nodes: nodes.clone(),
                tokens,
                seconds,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> CostTable {
        CostTable::new(
            vec![(1, 1.0), (8, 1.7), (16, 4.0)],
            vec![(1, 0.5), (2, 1.0)],
        )
        .unwrap()
    }

    #[test]
    fn costs_are_interpolated_and_extrapolated_linearly() {
        let costs = table();
        for (rows, seconds) in [(1, 1.0), (8, 1.7), (12, 2.85), (16, 4.0), (31, 7.0)] {
            assert!((costs.verify(rows) - seconds).abs() < 1e-9, "{rows}");
        }
        assert!((costs.draft(4) - 2.0).abs() < 1e-9);
        assert_eq!(CostTable::new(vec![], vec![(1, 1.0)]), None);
        assert_eq!(
            CostTable::new(vec![(2, 1.0), (1, 1.0)], vec![(1, 1.0)]),
            None
        );
        assert_eq!(CostTable::new(vec![(1, f64::NAN)], vec![(1, 1.0)]), None);
    }

    #[test]
    fn cost_model_follows_slower_steps_and_ignores_a_stopped_clock() {
        let ms = Duration::from_millis;
        let mut cost_model = OnlineCostModel::new(table());
        cost_model.learn((8, 1), StepTimes::default());
        assert_eq!(cost_model.now(), &table());
        let times = StepTimes {
            draft: ms(1000),
            verify: ms(2000),
            commit: ms(550),
        };
        for _ in 0..40 {
            cost_model.learn((8, 1), times);
        }
        let now = cost_model.now();
        assert!((now.draft(1) - 1.0).abs() < 0.01 && (now.verify(8) - 2.55).abs() < 0.01);
        // What is far from it follows more slowly.
        assert!(now.verify(16) > 5.5 && now.verify(1) > 1.05 && now.verify(1) < 1.3);
        let before = now.verify(8);
        // One round that was held up moves little.
        let held_up = StepTimes {
            verify: ms(90_000),
            ..times
        };
        cost_model.learn((8, 1), held_up);
        assert!(cost_model.now().verify(8) < 1.21 * before);
    }

    /// Rounds without drafts whose times are 0.7 to 3 times `seconds`, most of them near it.
    fn plain_rounds(cost_model: &mut OnlineCostModel, n: usize, seconds: f64) {
        let mut rng = 5_u64;
        for _ in 0..n {
            // Knuth's MMIX generator; its high bits are good enough for rng.
            rng = rng
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let draw = (rng >> 40) as f64 / f64::from(1 << 24);
            let times = StepTimes {
                verify: Duration::from_secs_f64(seconds * (0.7 + 2.3 * draw.powi(6))),
                ..StepTimes::default()
            };
            cost_model.learn((1, 0), times);
        }
    }

    #[test]
    fn noise_of_small_passes_leaves_large_costs_unchanged() {
        let mut cost_model = OnlineCostModel::new(table());
        let before = table().verify(16) / table().verify(1);
        for _ in 0..20 {
            plain_rounds(&mut cost_model, 500, 1.0);
            let now = cost_model.now();
            let deviation = now.verify(16) / now.verify(1) / before;
            assert!((0.7..1.4).contains(&deviation), "{deviation}");
            assert!((0.3..0.8).contains(&now.draft(1)), "{now:?}");
        }
    }

    #[test]
    fn cost_model_recovers_after_a_slow_period() {
        let mut cost_model = OnlineCostModel::new(table());
        let times = |ms: u64| StepTimes {
            draft: Duration::from_millis(ms),
            verify: Duration::from_millis(8 * ms),
            ..StepTimes::default()
        };
        // Drafts and large passes take three times as long as measured, and then nothing is drafted any more.
        for _ in 0..60 {
            cost_model.learn((16, 1), times(1500));
        }
        assert!(cost_model.now().draft(1) > 1.4 && cost_model.now().verify(16) > 11.0);
        plain_rounds(&mut cost_model, 1500, 1.0);
        let now = cost_model.now();
        assert!(now.draft(1) < 0.7 && now.verify(16) < 5.5, "{now:?}");
    }

    #[test]
    fn max_speedup_assumes_full_acceptance() {
        // Eight rows of 1.7 and a draft of 0.5 for eight tokens that plainly take 8.
        assert!((table().max_speedup(7) - 8.0 / 2.2).abs() < 1e-9);
        assert!((table().max_speedup(1) - 2.0 / 1.6).abs() < 1e-9);
    }

    #[test]
    fn confident_draft_gets_more_nodes_than_a_poor_one() {
        let sure = NodeChances {
            certain: 1,
            chances: vec![0.95; 15],
        };
        let poor = NodeChances {
            certain: 1,
            chances: vec![0.05; 15],
        };
        assert_eq!(choose_sizes(&table(), &[poor], 0).nodes, [0]);
        assert_eq!(choose_sizes(&table(), &[sure], 0).nodes, [7]);
    }

    #[test]
    fn step_nodes_are_shared_by_expected_tokens() {
        let of = |chance: f64| NodeChances {
            certain: 1,
            chances: vec![chance; 15],
        };
        let sizes = choose_sizes(&table(), &[of(0.01), of(0.5)], 0);
        assert_eq!(sizes.nodes, [0, 6]);
        assert!((sizes.tokens - 5.0).abs() < 1e-9 && (sizes.seconds - 2.7).abs() < 1e-9);
    }
}
