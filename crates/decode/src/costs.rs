//! What passes cost, and how large a tree is worth its pass.
//!
//! With `E` the tokens expected of a round and `C` its cost, nodes are worth adding as long as `E / C` grows.
//! The costs are measured on the very device and model; without a table, the budget alone decides.

use std::time::Duration;

use crate::RoundTimes;
use contract::{
    Ask, CommitItem, DeviceError, DraftItem, NodeIdx, Runner, TokenId, Tree, VerifyItem,
};

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
    pub fn promise(&self, depth: usize) -> f64 {
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

/// How long rounds take beside the table, which was measured after few tokens: contexts grow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pace {
    draft: f64,
    verify: f64,
}

impl Pace {
    /// As measured.
    pub(crate) const MEASURED: Pace = Pace {
        draft: 1.0,
        verify: 1.0,
    };

    /// The table as rounds go now.
    pub(crate) fn of(self, costs: &CostTable) -> CostTable {
        let scaled =
            |points: &[(usize, f64)], by: f64| points.iter().map(|p| (p.0, p.1 * by)).collect();
        CostTable {
            verify: scaled(&costs.verify, self.verify),
            draft: scaled(&costs.draft, self.draft),
        }
    }

    /// Takes in a round of `rows` nodes and of drafts for `drafted` sequences. Times of a clock that stands still
    /// say nothing.
    pub(crate) fn learn(
        &mut self,
        costs: &CostTable,
        (rows, drafted): (usize, usize),
        times: RoundTimes,
    ) {
        /// What one round counts; most are alike, and some are disturbed.
        const SHARE: f64 = 0.2;
        let take = |pace: &mut f64, took: Duration, expected: f64| {
            let now = took.as_secs_f64() / expected;
            if now > 0.0 {
                *pace += SHARE * (now.clamp(*pace / 2.0, *pace * 2.0) - *pace);
            }
        };
        take(
            &mut self.verify,
            times.verify + times.commit,
            costs.verify(rows),
        );
        if drafted > 0 {
            take(&mut self.draft, times.draft, costs.draft(drafted));
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
pub(crate) struct Prospect {
    /// Nodes that are in any case: the root and what is forced.
    pub(crate) certain: usize,
    /// `[drafted nodes]`.
    pub(crate) chances: Vec<f64>,
}

/// How many drafted nodes of each sequence a round should carry, and what it may hope for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) nodes: Vec<usize>,
    /// Tokens expected over all sequences.
    pub(crate) tokens: f64,
    /// Seconds expected, draft included.
    pub(crate) seconds: f64,
}

/// The sizes at which tokens per second are most. Nodes are taken by falling chance over all sequences, and
/// every number of them is tried, so that steps in the table are seen for what they are.
pub(crate) fn choose(costs: &CostTable, prospects: &[Prospect]) -> Plan {
    let certain: usize = prospects.iter().map(|p| p.certain).sum();
    let draft = costs.draft(prospects.len());
    let mut nodes = vec![0; prospects.len()];
    let (mut rows, mut tokens) = (certain, certain as f64);
    let mut best = Plan {
        nodes: nodes.clone(),
        tokens,
        seconds: draft + costs.verify(rows),
    };
    loop {
        let next = prospects.iter().zip(&nodes).enumerate();
        let next = next.filter_map(|(i, (p, n))| Some((i, *p.chances.get(*n)?)));
        let Some((i, chance)) = next.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))) else {
            return best;
        };
        nodes[i] += 1;
        rows += 1;
        tokens += chance;
        let seconds = draft + costs.verify(rows);
        if tokens / seconds > best.tokens / best.seconds {
            best = Plan {
                nodes: nodes.clone(),
                tokens,
                seconds,
            };
        }
    }
}

/// Verify sizes that are measured, and the widest that there can be; the start waits for it, and between them lie
/// nearly straight lines.
const SIZES: [usize; 8] = [1, 2, 4, 8, 16, 24, 32, 48];
/// Times that each is measured; the fastest counts, since others may have been disturbed.
const REPEATS: usize = 2;
/// Tokens read before anything is measured.
const CONTEXT: usize = 64;

/// Measures a runner that has nothing open, within about `limit`; `None` where it has no draft or the clock
/// stands still. What was measured when the time is over is the table.
///
/// # Errors
/// What the runner's calls give.
pub fn measure(
    runner: &mut dyn Runner,
    clock: Clock,
    limit: Duration,
) -> Result<Option<CostTable>, DeviceError> {
    let info = runner.info();
    let Some(depth) = info.draft_depth else {
        return Ok(None);
    };
    let limits = info.limits;
    let context = CONTEXT
        .min(limits.prefill_chunk)
        .min(limits.context / 2)
        .max(1);
    let max_len = limits
        .context
        .min(context + (SIZES.len() + 1) * (REPEATS + 1) + Tree::MAX_NODES);
    let seq = runner.open(max_len)?;
    let measured = (|| {
        let tokens = vec![TokenId(0); context];
        runner.prefill(seq, &tokens, &[])?;
        let begin = clock();
        let mut draft = f64::INFINITY;
        let items = [DraftItem {
            seq,
            root: TokenId(0),
        }];
        // Once for what happens once, and then measured.
        runner.draft(&items, depth, 8)?;
        for _ in 0..REPEATS {
            let start = clock();
            runner.draft(&items, depth, 8)?;
            draft = draft.min((clock() - start).as_secs_f64());
        }
        let mut verify = Vec::new();
        let widest = limits.tree_nodes.min(Tree::MAX_NODES);
        let sizes = SIZES.into_iter().filter(|rows| *rows < widest);
        for rows in sizes.chain([widest]) {
            let tokens: Vec<TokenId> = (0..rows as u32).map(|i| TokenId(i % 2)).collect();
            let Ok(tree) = Tree::chain(&tokens) else {
                break;
            };
            let asks = vec![Ask::top(1); rows];
            let mut best = f64::INFINITY;
            for round in 0..=REPEATS {
                let start = clock();
                let item = VerifyItem {
                    seq,
                    tree: &tree,
                    asks: &asks,
                };
                runner.verify(&[item])?;
                // A device may leave part of a commit to the next pass, so each measured one follows one.
                let path = tree.path_to(NodeIdx::ROOT);
                runner.commit(&[CommitItem { seq, path: &path }])?;
                if round > 0 {
                    best = best.min((clock() - start).as_secs_f64());
                }
            }
            let least = verify.last().map_or(0.0, |(_, seconds)| *seconds);
            verify.push((rows, best.max(least)));
            let full = max_len - context <= verify.len() * (REPEATS + 1) + REPEATS;
            if full || clock() - begin > limit {
                break;
            }
        }
        Ok(CostTable::new(verify, vec![(1, draft), (2, 2.0 * draft)]))
    })();
    runner.close(seq);
    measured
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
    fn tables_are_straight_between_points_and_beyond_them() {
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
    fn a_pace_follows_rounds_that_take_longer_and_no_standing_clock() {
        let ms = Duration::from_millis;
        let mut pace = Pace::MEASURED;
        pace.learn(&table(), (8, 1), RoundTimes::default());
        assert_eq!(pace, Pace::MEASURED);
        let times = RoundTimes {
            draft: ms(1000),
            verify: ms(2000),
            commit: ms(550),
        };
        for _ in 0..40 {
            pace.learn(&table(), (8, 1), times);
        }
        let now = pace.of(&table());
        assert!((now.draft(1) - 1.0).abs() < 0.01 && (now.verify(8) - 2.55).abs() < 0.01);
        assert!((now.verify(1) - 1.5).abs() < 0.01);
        // One round that was held up moves little.
        let held_up = RoundTimes {
            verify: ms(90_000),
            ..times
        };
        pace.learn(&table(), (8, 1), held_up);
        assert!(pace.of(&table()).verify(8) < 3.2);
    }

    #[test]
    fn a_promise_is_what_full_acceptance_would_bring() {
        // Eight rows of 1.7 and a draft of 0.5 for eight tokens that plainly take 8.
        assert!((table().promise(7) - 8.0 / 2.2).abs() < 1e-9);
        assert!((table().promise(1) - 2.0 / 1.6).abs() < 1e-9);
    }

    #[test]
    fn a_sure_draft_gets_many_nodes_and_a_poor_one_few() {
        let sure = Prospect {
            certain: 1,
            chances: vec![0.95; 15],
        };
        let poor = Prospect {
            certain: 1,
            chances: vec![0.05; 15],
        };
        assert_eq!(choose(&table(), &[poor]).nodes, [0]);
        assert_eq!(choose(&table(), &[sure]).nodes, [7]);
    }

    #[test]
    fn sequences_share_a_round_by_what_their_nodes_promise() {
        let of = |chance: f64| Prospect {
            certain: 1,
            chances: vec![chance; 15],
        };
        let plan = choose(&table(), &[of(0.01), of(0.5)]);
        assert_eq!(plan.nodes, [0, 6]);
        assert!((plan.tokens - 5.0).abs() < 1e-9 && (plan.seconds - 2.7).abs() < 1e-9);
    }
}
