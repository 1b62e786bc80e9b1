//! A runner lent to one scheduler after another, with every call timed; on demand with acceptance made up.
//!
//! Random weights draft nothing that comes true. To measure a whole step at real shapes all the same, the device
//! does all its work and only the numbers that come back are changed: the draft's log-probabilities become those
//! of a draft of a given quality, and the rows of a verify say a text that is drawn from exactly these. So a tree
//! keeps what a tree of its shape would keep, and sampling, walk and commit run as ever.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use contract::{
    Capacity, CommitItem, DeviceError, DraftCandidates, DraftItem, LogitsRow, NodeIdx, Runner,
    RunnerInfo, SeqId, TokenId, Tree, VerifyItem,
};
use decode::TreeInit;
use decode::speculation::{TreeBudget, TreeInputs, build_tree};

/// Time inside the runner's calls, and what they were about.
#[derive(Debug, Clone, Default)]
pub(super) struct Calls {
    pub(super) draft: Duration,
    pub(super) verify: Duration,
    pub(super) commit: Duration,
    /// Tokens that the trees of these calls keep in the mean, where acceptance is made up: what they did keep is
    /// that and luck.
    pub(super) mean_tokens: f64,
    /// Sequences that were drafted for.
    pub(super) drafted: usize,
    /// Nodes of each tree verified, roots included.
    pub(super) nodes: Vec<usize>,
}

impl Calls {
    /// All of it.
    pub(super) fn total(&self) -> Duration {
        self.draft + self.verify + self.commit
    }
}

/// Acceptance that is made up: at every depth one of the candidates comes true, the better ones more often,
/// whatever came before.
#[derive(Debug)]
struct SimulatedAcceptance {
    /// The chance of the best candidate.
    right: f64,
    /// Blocks drafted since luck was last turned back.
    drafted: u64,
    /// What was drafted for each sequence and not verified yet.
    coming: HashMap<SeqId, Vec<Position>>,
}

/// A drafted position.
#[derive(Debug, Clone)]
struct Position {
    /// The candidates, best first.
    ids: Vec<TokenId>,
    /// The one that comes true; `None` where none of them does.
    hit: Option<TokenId>,
}

struct Shared {
    runner: Box<dyn Runner>,
    calls: Calls,
    simulated: Option<SimulatedAcceptance>,
}

/// A handle on the runner; it is dropped with the last one.
#[derive(Clone)]
pub(super) struct TimedRunner {
    info: Rc<RunnerInfo>,
    shared: Rc<RefCell<Shared>>,
}

impl TimedRunner {
    /// Takes an opened runner.
    pub(super) fn new(runner: Box<dyn Runner>) -> TimedRunner {
        TimedRunner {
            info: Rc::new(runner.info().clone()),
            shared: Rc::new(RefCell::new(Shared {
                runner,
                calls: Calls::default(),
                simulated: None,
            })),
        }
    }

    /// From now on a tree of `budget` nodes keeps `accept` tokens in the mean, the one that the target adds
    /// included; larger and smaller trees what trees of theirs keep. Gives the most that can be had, where `accept`
    /// is more.
    pub(super) fn simulate_acceptance(&self, accept: f64, budget: usize) -> f64 {
        let depth = self.info.draft_depth.unwrap_or(0);
        let simulated = SimulatedAcceptance::of(accept, budget, depth);
        let tokens = simulated.tokens(budget, depth);
        self.shared.borrow_mut().simulated = Some(simulated);
        tokens
    }

    /// Begins the luck of made-up acceptance anew, so that whatever is compared meets the same.
    pub(super) fn reset_simulation(&self) {
        if let Some(simulated) = &mut self.shared.borrow_mut().simulated {
            simulated.drafted = 0;
        }
    }

    /// What calls have taken since this was asked last.
    pub(super) fn take_calls(&self) -> Calls {
        std::mem::take(&mut self.shared.borrow_mut().calls)
    }
}

/// Candidates of a position that are made up.
const SIMULATED_CANDIDATES: usize = 8;

impl SimulatedAcceptance {
    /// What gives `accept` tokens for the best tree of `budget` nodes of up to `depth`.
    fn of(accept: f64, budget: usize, depth: usize) -> SimulatedAcceptance {
        let with = |right: f64| SimulatedAcceptance {
            right,
            drafted: 0,
            coming: HashMap::new(),
        };
        let (mut low, mut high) = (0.0, 1.0 - 1e-9);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            match with(middle).tokens(budget, depth) < accept {
                true => low = middle,
                false => high = middle,
            }
        }
        with(high)
    }

    /// Tokens that the best tree of `budget` nodes keeps in the mean.
    fn tokens(&self, budget: usize, depth: usize) -> f64 {
        let mut candidates = DraftCandidates {
            ids: (0..(depth * SIMULATED_CANDIDATES) as u32)
                .map(TokenId)
                .collect(),
            log_probs: vec![0.0; depth * SIMULATED_CANDIDATES],
            lse: vec![0.0; depth],
            k: SIMULATED_CANDIDATES,
        };
        self.rate(&mut candidates);
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

    /// The chance of a candidate: each next one has half of what is left, or of the best one's, whichever is less.
    fn chance(&self, rank: usize) -> f64 {
        match rank {
            0 => self.right,
            _ => self.right.min(1.0 - self.right) * 0.5_f64.powi(rank as i32),
        }
    }

    /// Gives drafted positions their log-probabilities.
    fn rate(&self, candidates: &mut DraftCandidates) {
        for row in candidates.log_probs.chunks_mut(candidates.k.max(1)) {
            for (rank, log_prob) in row.iter_mut().enumerate() {
                *log_prob = self.chance(rank).max(1e-30).ln() as f32;
            }
        }
    }

    fn draft(&mut self, seq: SeqId, candidates: &mut DraftCandidates) {
        self.rate(candidates);
        let mut luck = self.draw();
        let mut coming = Vec::with_capacity(candidates.lse.len());
        for ids in candidates.ids.chunks(candidates.k.max(1)) {
            // What is left of a draw within the part of a candidate is a draw again.
            let mut hit = None;
            let mut below = 0.0;
            for (rank, token) in ids.iter().enumerate() {
                let chance = self.chance(rank);
                if luck < below + chance {
                    luck = (luck - below) / chance;
                    hit = Some(*token);
                    break;
                }
                below += chance;
            }
            if hit.is_none() {
                luck = (luck - below) / (1.0 - below).max(1e-9);
            }
            let ids = ids.to_vec();
            coming.push(Position { ids, hit });
        }
        self.coming.insert(seq, coming);
    }

    /// From 0 to 1: multiples of the golden section, which are spread so evenly that a few dozen steps keep close to
    /// what they keep in the mean.
    fn draw(&mut self) -> f64 {
        const GOLDEN: f64 = 0.618_033_988_749_894_9;
        self.drafted += 1;
        (self.drafted as f64 * GOLDEN).fract()
    }

    /// Makes the rows say what comes; tokens that the tree keeps in the mean.
    fn verify(&mut self, seq: SeqId, tree: &Tree, rows: &mut [LogitsRow]) -> f64 {
        let coming = self.coming.remove(&seq).unwrap_or_default();
        let mean = self.mean_tokens(tree, &coming);
        let mut at = NodeIdx::ROOT;
        for position in coming {
            let child = position.hit.and_then(|token| tree.child_with(at, token));
            let Some(child) = child else {
                break;
            };
            say(&mut rows[at.index()], tree.token(child));
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
        say(row, token);
        mean
    }

    /// Tokens that a tree of these candidates keeps in the mean: the chances of all its nodes together.
    fn mean_tokens(&self, tree: &Tree, coming: &[Position]) -> f64 {
        let mut chances: Vec<f64> = Vec::with_capacity(tree.len());
        for node in tree.nodes() {
            let chance = tree.parent(node).map_or(1.0, |parent| {
                let position = coming.get(tree.depth(node) - 1);
                let ids = position.map_or(&[][..], |position| &position.ids);
                let rank = ids.iter().position(|id| *id == tree.token(node));
                chances[parent.index()] * rank.map_or(0.0, |rank| self.chance(rank))
            });
            chances.push(chance);
        }
        chances.iter().sum()
    }
}

/// Puts a token in the place of a row's best.
fn say(row: &mut LogitsRow, token: TokenId) {
    let place = row.ids.iter().position(|id| *id == token);
    if let Some(best) = row.ids.first().copied() {
        if let Some(place) = place {
            row.ids[place] = best;
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

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let Shared {
            runner,
            calls,
            simulated,
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
        }
    }

    /// Tokens a step, with trees of `budget` from a draft that is made up, and what they were said to be in the mean.
    fn mean(simulated: &mut SimulatedAcceptance, budget: usize, steps: usize) -> (f64, f64) {
        let (mut sum, mut said) = (0, 0.0);
        for _ in 0..steps {
            let mut candidates = DraftCandidates {
                ids: (100..100 + 15 * SIMULATED_CANDIDATES as u32)
                    .map(TokenId)
                    .collect(),
                log_probs: vec![0.0; 15 * SIMULATED_CANDIDATES],
                lse: vec![0.0; 15],
                k: SIMULATED_CANDIDATES,
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
            said += simulated.verify(SeqId(1), &tree, &mut rows);
            let mut at = NodeIdx::ROOT;
            sum += 1;
            while let Some(child) = tree.child_with(at, rows[at.index()].ids[0]) {
                (at, sum) = (child, sum + 1);
            }
        }
        (f64::from(sum) / steps as f64, said / steps as f64)
    }

    #[test]
    fn a_made_up_draft_keeps_what_is_wanted_in_the_mean_and_a_smaller_tree_less() {
        for accept in [2.0, 8.31] {
            let mut simulated = SimulatedAcceptance::of(accept, 22, 15);
            let (found, said) = mean(&mut simulated, 22, 4000);
            assert!((found - accept).abs() < 0.02, "{accept}: {found}");
            assert!((said - accept).abs() < 1e-6, "{accept}: {said}");
            let (less, _) = mean(&mut simulated, 8, 4000);
            let expected = simulated.tokens(8, 15);
            assert!(
                (less - expected).abs() < 0.02 && less < found - 0.1,
                "{less} of {expected}"
            );
        }
        // Every drafted token comes true, and the target adds one.
        assert!((SimulatedAcceptance::of(30.0, 22, 15).tokens(22, 15) - 16.0).abs() < 0.01);
    }

    #[test]
    fn a_few_dozen_steps_are_as_lucky_as_thousands_and_equally_lucky_when_turned_back() {
        let mut simulated = SimulatedAcceptance::of(8.31, 22, 15);
        let (first, said) = mean(&mut simulated, 22, 30);
        assert!((first - said).abs() < 0.35, "{first} of {said}");
        let (other, _) = mean(&mut simulated, 22, 30);
        simulated.drafted = 0;
        assert_eq!(mean(&mut simulated, 22, 30).0, first);
        assert!((other - said).abs() < 0.35, "{other} of {said}");
    }

    #[test]
    fn made_up_candidates_fall_with_their_rank() {
        let mut simulated = SimulatedAcceptance::of(8.3, 22, 15);
        let mut candidates = DraftCandidates {
            ids: (0..8).map(TokenId).collect(),
            log_probs: vec![0.0; 8],
            lse: vec![0.0; 2],
            k: 4,
        };
        simulated.draft(SeqId(1), &mut candidates);
        for row in candidates.log_probs.chunks(4) {
            assert!(row.is_sorted_by(|a, b| a > b), "{row:?}");
            let mass: f32 = row.iter().map(|p| p.exp()).sum();
            assert!(row[0].exp() > 0.85 && mass < 1.0, "{row:?}");
        }
    }
}
