//! A runner that times its calls, is shared by consecutive schedulers, and can simulate acceptance.
//!
//! With random weights, the target accepts no drafted token. The simulation lets the device do all
//! its work and changes only the results. The draft's log-probabilities become those of a draft
//! with a given acceptance. The rows of a verify contain tokens drawn from the same probabilities.
//! Sampling, acceptance and commit run unchanged.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use contract::{
    Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, LogitsRow, MtpDraftItem,
    NodeIdx, Runner, RunnerInfo, SeqId, TokenId, Tree, VerifyItem,
};
use decode::TreeInit;
use decode::speculation::{TreeBudget, TreeInputs, build_tree};

/// Time and counts of the runner's calls.
#[derive(Debug, Clone, Default)]
pub(super) struct Calls {
    pub(super) draft: Duration,
    pub(super) verify: Duration,
    pub(super) commit: Duration,
    /// Expected accepted tokens of the trees, if acceptance is simulated.
    pub(super) mean_tokens: f64,
    /// Drafted sequences.
    pub(super) drafted: usize,
    /// Nodes of each verified tree, root included.
    pub(super) nodes: Vec<usize>,
}

impl Calls {
    /// The time of all calls.
    pub(super) fn total(&self) -> Duration {
        self.draft + self.verify + self.commit
    }
}

/// Simulated acceptance: at every depth, one of the candidates can be the target's token, with a
/// probability by rank.
#[derive(Debug)]
struct SimulatedAcceptance {
    /// Probability of the best candidate.
    top1: f64,
    /// Blocks drafted since the last reset.
    drafted: u64,
    /// Drafted and not yet verified positions of each sequence.
    pending: HashMap<SeqId, Vec<Position>>,
}

/// A drafted position.
#[derive(Debug, Clone)]
struct Position {
    /// The candidates, best first.
    ids: Vec<TokenId>,
    /// The candidate that the target generates; `None` if it generates another token.
    hit: Option<TokenId>,
}

struct Shared {
    runner: Box<dyn Runner>,
    calls: Calls,
    simulated: Option<SimulatedAcceptance>,
    /// The trees of verify calls that have begun, the earliest first.
    begun: VecDeque<Vec<(SeqId, Tree)>>,
}

/// A handle to the runner, which is dropped with its last handle.
#[derive(Clone)]
pub(super) struct TimedRunner {
    info: Rc<RunnerInfo>,
    shared: Rc<RefCell<Shared>>,
}

impl TimedRunner {
    /// Wraps an opened runner.
    pub(super) fn new(runner: Box<dyn Runner>) -> TimedRunner {
        TimedRunner {
            info: Rc::new(runner.info().clone()),
            shared: Rc::new(RefCell::new(Shared {
                runner,
                calls: Calls::default(),
                simulated: None,
                begun: VecDeque::new(),
            })),
        }
    }

    /// Simulates acceptance from now on: a tree of `budget` nodes has `accept` accepted tokens on
    /// average, the target's own token included.
    ///
    /// Returns that average, which is lower than `accept` if no draft can reach it.
    pub(super) fn simulate_acceptance(&self, accept: f64, budget: usize) -> f64 {
        let depth = self.info.draft_depth.unwrap_or(0);
        let simulated = SimulatedAcceptance::of(accept, budget, depth);
        let tokens = simulated.tokens(budget, depth);
        self.shared.borrow_mut().simulated = Some(simulated);
        tokens
    }

    /// Restarts the sequence of random draws, so that compared runs have the same draws.
    pub(super) fn reset_simulation(&self) {
        if let Some(simulated) = &mut self.shared.borrow_mut().simulated {
            simulated.drafted = 0;
        }
    }

    /// The calls since the last time this was called.
    pub(super) fn take_calls(&self) -> Calls {
        std::mem::take(&mut self.shared.borrow_mut().calls)
    }
}

/// Candidates per simulated position.
const SIMULATED_CANDIDATES: usize = 8;

impl SimulatedAcceptance {
    /// The simulation in which the best tree of `budget` nodes and up to `depth` levels has
    /// `accept` tokens.
    fn of(accept: f64, budget: usize, depth: usize) -> SimulatedAcceptance {
        let with = |top1: f64| SimulatedAcceptance {
            top1,
            drafted: 0,
            pending: HashMap::new(),
        };
        let (mut low, mut high) = (0.0, 1.0 - 1e-9);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if with(middle).tokens(budget, depth) < accept {
                low = middle;
            } else {
                high = middle;
            }
        }
        with(high)
    }

    /// Expected tokens of the best tree of `budget` nodes.
    fn tokens(&self, budget: usize, depth: usize) -> f64 {
        let mut candidates = DraftCandidates {
            ids: (0..(depth * SIMULATED_CANDIDATES) as u32)
                .map(TokenId)
                .collect(),
            log_probs: vec![0.0; depth * SIMULATED_CANDIDATES],
            lse: vec![0.0; depth],
            k: SIMULATED_CANDIDATES,
            ..DraftCandidates::default()
        };
        self.set_log_probs(&mut candidates);
        let inputs = TreeInputs {
            root: TokenId(u32::MAX),
            forced: &[],
            hints: &[],
            candidates: &candidates,
        };
        let budget = TreeBudget {
            max_nodes: budget,
            max_depth: depth,
            init: TreeInit::None,
        };
        build_tree(inputs, budget)
            .weights
            .iter()
            .map(|w| w.exp())
            .sum()
    }

    /// Probability of the candidate of a rank: rank `r > 0` has `min(p, 1 - p) / 2^r`, where `p` is
    /// that of rank 0.
    fn probability(&self, rank: usize) -> f64 {
        if rank == 0 {
            return self.top1;
        }
        self.top1.min(1.0 - self.top1) * 0.5_f64.powi(rank as i32)
    }

    /// Sets the log-probabilities of drafted positions.
    fn set_log_probs(&self, candidates: &mut DraftCandidates) {
        for row in candidates.log_probs.chunks_mut(candidates.k.max(1)) {
            for (rank, log_prob) in row.iter_mut().enumerate() {
                *log_prob = self.probability(rank).max(1e-30).ln() as f32;
            }
        }
    }

    fn draft(&mut self, seq: SeqId, candidates: &mut DraftCandidates) {
        self.set_log_probs(candidates);
        let mut draw = self.draw();
        let mut pending = Vec::with_capacity(candidates.lse.len());
        for ids in candidates.ids.chunks(candidates.k.max(1)) {
            // The remainder of a draw within a candidate's share is uniform again.
            let mut hit = None;
            let mut below = 0.0;
            for (rank, token) in ids.iter().enumerate() {
                let probability = self.probability(rank);
                if draw < below + probability {
                    draw = (draw - below) / probability;
                    hit = Some(*token);
                    break;
                }
                below += probability;
            }
            if hit.is_none() {
                draw = (draw - below) / (1.0 - below).max(1e-9);
            }
            let ids = ids.to_vec();
            pending.push(Position { ids, hit });
        }
        self.pending.insert(seq, pending);
    }

    /// A draw from 0 to 1: multiples of the golden ratio, which are so even that a few dozen steps
    /// are close to the average.
    fn draw(&mut self) -> f64 {
        const GOLDEN: f64 = 0.618_033_988_749_894_9;
        self.drafted += 1;
        (self.drafted as f64 * GOLDEN).fract()
    }

    /// Puts the target's tokens into the rows; returns the expected tokens of the tree.
    fn verify(&mut self, seq: SeqId, tree: &Tree, rows: &mut [LogitsRow]) -> f64 {
        let pending = self.pending.remove(&seq).unwrap_or_default();
        let mean = self.mean_tokens(tree, &pending);
        let mut at = NodeIdx::ROOT;
        for position in pending {
            let child = position.hit.and_then(|token| tree.child_with(at, token));
            let Some(child) = child else {
                break;
            };
            set_argmax(&mut rows[at.index()], tree.token(child));
            at = child;
        }
        let row = &mut rows[at.index()];
        let mut token = row.ids.first().copied().unwrap_or_default();
        while tree.child_with(at, token).is_some() {
            token = TokenId(token.0 ^ 1);
            if tree.child_with(at, token).is_some() {
                token = TokenId((token.0 | 1) + 1);
            }
        }
        set_argmax(row, token);
        mean
    }

    /// Expected tokens of a tree of these candidates: the sum of the probabilities of its nodes.
    fn mean_tokens(&self, tree: &Tree, pending: &[Position]) -> f64 {
        let mut probabilities: Vec<f64> = Vec::with_capacity(tree.len());
        for node in tree.nodes() {
            let probability = tree.parent(node).map_or(1.0, |parent| {
                let position = pending.get(tree.depth(node) - 1);
                let ids = position.map_or(&[][..], |position| &position.ids);
                let rank = ids.iter().position(|id| *id == tree.token(node));
                probabilities[parent.index()] * rank.map_or(0.0, |rank| self.probability(rank))
            });
            probabilities.push(probability);
        }
        probabilities.iter().sum()
    }
}

/// Makes a token the first of a row's candidates.
fn set_argmax(row: &mut LogitsRow, token: TokenId) {
    let index = row.ids.iter().position(|id| *id == token);
    if let Some(best) = row.ids.first().copied() {
        if let Some(index) = index {
            row.ids[index] = best;
        }
        row.ids[0] = token;
    }
}

impl Runner for TimedRunner {
    contract::forward_runner!(self => self.shared.borrow_mut().runner; open, close, prefill,
        discard, snapshot, restore, free_snapshot, export, import);

    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn capacity(&self) -> Capacity {
        self.shared.borrow().runner.capacity()
    }

    fn draft(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let Shared {
            runner,
            calls,
            simulated,
            ..
        } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        let mut drafted = runner.draft(items, depth, k)?;
        calls.draft += start.elapsed();
        calls.drafted += items.len();
        if let Some(simulated) = simulated {
            let pairs = items.iter().zip(&mut drafted);
            pairs.for_each(|(item, candidates)| simulated.draft(item.seq, candidates));
        }
        Ok(drafted)
    }

    fn draft_mtp(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let Shared { runner, calls, .. } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        let drafted = runner.draft_mtp(items, k)?;
        calls.draft += start.elapsed();
        calls.drafted += items.len();
        Ok(drafted)
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let Shared {
            runner,
            calls,
            simulated,
            ..
        } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        let mut rows = runner.verify(items)?;
        calls.verify += start.elapsed();
        calls.nodes.extend(items.iter().map(|item| item.tree.len()));
        if let Some(simulated) = simulated {
            for (item, rows) in items.iter().zip(&mut rows) {
                calls.mean_tokens += simulated.verify(item.seq, item.tree, rows);
            }
        }
        Ok(rows)
    }

    fn begin_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        let shared = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        shared.runner.begin_verify(items)?;
        shared.calls.verify += start.elapsed();
        let trees = items.iter().map(|item| (item.seq, item.tree.clone()));
        shared.begun.push_back(trees.collect());
        Ok(())
    }

    fn finish_verify(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let Shared {
            runner,
            calls,
            simulated,
            begun,
        } = &mut *self.shared.borrow_mut();
        let trees = begun.pop_front().unwrap_or_default();
        let start = Instant::now();
        let mut rows = runner.finish_verify()?;
        calls.verify += start.elapsed();
        calls.nodes.extend(trees.iter().map(|(_, tree)| tree.len()));
        if let Some(simulated) = simulated {
            for ((seq, tree), rows) in trees.iter().zip(&mut rows) {
                calls.mean_tokens += simulated.verify(*seq, tree, rows);
            }
        }
        Ok(rows)
    }

    fn commit(&mut self, items: &[CommitItem<'_>]) -> Result<(), DeviceError> {
        let Shared { runner, calls, .. } = &mut *self.shared.borrow_mut();
        let start = Instant::now();
        runner.commit(items)?;
        calls.commit += start.elapsed();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: u32) -> LogitsRow {
        LogitsRow {
            ids: vec![TokenId(id)],
            logits: vec![1.0],
            raw: vec![1.0],
            lse: 1.5,
            raw_lse: 1.5,
            mass: 0.0,
        }
    }

    /// Accepted tokens per step of trees of `budget` nodes, and their expected number.
    fn mean(simulated: &mut SimulatedAcceptance, budget: usize, steps: usize) -> (f64, f64) {
        let (mut sum, mut expected) = (0, 0.0);
        for _ in 0..steps {
            let mut candidates = DraftCandidates {
                ids: (100..100 + 15 * SIMULATED_CANDIDATES as u32)
                    .map(TokenId)
                    .collect(),
                log_probs: vec![0.0; 15 * SIMULATED_CANDIDATES],
                lse: vec![0.0; 15],
                k: SIMULATED_CANDIDATES,
                ..DraftCandidates::default()
            };
            simulated.draft(SeqId(1), &mut candidates);
            let inputs = TreeInputs {
                root: TokenId(1),
                forced: &[],
                hints: &[],
                candidates: &candidates,
            };
            let budget = TreeBudget {
                max_nodes: budget,
                max_depth: 15,
                init: TreeInit::None,
            };
            let tree = build_tree(inputs, budget).tree;
            let mut rows: Vec<LogitsRow> = (0..tree.len()).map(|_| row(0)).collect();
            expected += simulated.verify(SeqId(1), &tree, &mut rows);
            let mut at = NodeIdx::ROOT;
            sum += 1;
            while let Some(child) = tree.child_with(at, rows[at.index()].ids[0]) {
                (at, sum) = (child, sum + 1);
            }
        }
        (f64::from(sum) / steps as f64, expected / steps as f64)
    }

    #[test]
    fn simulated_acceptance_has_the_wanted_mean_and_smaller_trees_less() {
        for accept in [2.0, 8.31] {
            let mut simulated = SimulatedAcceptance::of(accept, 22, 15);
            let (found, exact) = mean(&mut simulated, 22, 4000);
            assert!((found - accept).abs() < 0.02, "{accept}: {found}");
            assert!((exact - accept).abs() < 1e-6, "{accept}: {exact}");
            let (less, _) = mean(&mut simulated, 8, 4000);
            let expected = simulated.tokens(8, 15);
            assert!(
                (less - expected).abs() < 0.02 && less < found - 0.1,
                "{less} of {expected}"
            );
        }
        // Every drafted token is accepted, and the target adds one.
        assert!((SimulatedAcceptance::of(30.0, 22, 15).tokens(22, 15) - 16.0).abs() < 0.01);
    }

    #[test]
    fn thirty_steps_are_near_the_mean_and_repeat_after_a_reset() {
        let mut simulated = SimulatedAcceptance::of(8.31, 22, 15);
        let (first, expected) = mean(&mut simulated, 22, 30);
        assert!((first - expected).abs() < 0.35, "{first} of {expected}");
        let (other, _) = mean(&mut simulated, 22, 30);
        simulated.drafted = 0;
        assert_eq!(mean(&mut simulated, 22, 30).0, first);
        assert!((other - expected).abs() < 0.35, "{other} of {expected}");
    }

    #[test]
    fn simulated_probabilities_fall_with_rank() {
        let mut simulated = SimulatedAcceptance::of(8.3, 22, 15);
        let mut candidates = DraftCandidates {
            ids: (0..8).map(TokenId).collect(),
            log_probs: vec![0.0; 8],
            lse: vec![0.0; 2],
            k: 4,
            ..DraftCandidates::default()
        };
        simulated.draft(SeqId(1), &mut candidates);
        for row in candidates.log_probs.chunks(4) {
            assert!(row.is_sorted_by(|a, b| a > b), "{row:?}");
            let mass: f32 = row.iter().map(|p| p.exp()).sum();
            assert!(row[0].exp() > 0.85 && mass < 1.0, "{row:?}");
        }
    }
}
