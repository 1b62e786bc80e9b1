//! Where a round's trees come from.

use contract::{DeviceError, DraftItem, Runner, SeqId, TokenId, Tree};

use crate::RoundTimes;
use crate::costs::{CostTable, Pace, Prospect, choose};
use crate::grow::{Grown, Seed, Shape, Soil, cut, grow, tempered};
use crate::habit::{Habits, Round};

/// One sequence that wants a tree.
#[derive(Debug, Clone, Copy)]
pub struct Root<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and output so far; the last one is the root: sampled, and not yet in the cache.
    pub history: &'a [TokenId],
    /// The deepest node that can still be of use, given what may be generated; 0 wants the root alone.
    pub max_depth: usize,
    /// Tokens that come next for certain. A tree should begin with them; what lies beside them is dropped.
    pub forced: &'a [TokenId],
    /// Whether more than the root and what is forced is wanted.
    pub speculate: bool,
}

impl Root<'_> {
    /// The token at the root.
    pub fn token(&self) -> TokenId {
        self.history.last().copied().unwrap_or_default()
    }

    /// The root and what is forced, of at most `nodes` nodes.
    pub(crate) fn certain(&self, nodes: usize) -> Tree {
        let forced = self.forced.iter().take(self.max_depth);
        let tokens: Vec<TokenId> = std::iter::once(self.token())
            .chain(forced.copied())
            .take(nodes.clamp(1, Tree::MAX_NODES))
            .collect();
        Tree::chain(&tokens).unwrap_or_else(|_| Tree::root(self.token()))
    }
}

/// What became of one sequence's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeResult {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens the round gave, at least one.
    pub tokens: usize,
}

/// Proposes trees. Whatever it proposes, the tokens that come out are those of plain decoding: a tree
/// decides how many of them one round yields, never which.
pub trait TreeSource {
    /// One tree per root, in order, each rooted at [`Root::token`].
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError>;

    /// Tells what the trees of the last call brought and took, so that the next ones can be better.
    fn learn(&mut self, results: &[TreeResult], times: RoundTimes) {
        let _ = (results, times);
    }
}

/// Plain decoding: roots, what is forced, and nothing else.
pub(crate) struct Roots;

impl TreeSource for Roots {
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let nodes = runner.info().limits.tree_nodes;
        Ok(roots.iter().map(|root| root.certain(nodes)).collect())
    }
}

/// How trees are drafted.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculation {
    /// Drafted nodes of one sequence's tree, 0 to 63; the runner's own limit applies too. 0 turns drafting off.
    pub budget: usize,
    /// How a tree begins; [`Seed::ChainOnly`] makes it a chain.
    pub seed: Seed,
    /// Candidates the draft is asked for per position.
    pub candidates: usize,
    /// Flattens the draft's figures above 1.0, sharpens them below; above 0.
    pub temperature: f32,
    /// Tokens that must repeat for what followed them earlier to be tried too; 0 never tries.
    pub lookup: usize,
    /// What passes cost. With it, trees stop growing where they no longer pay, and drafting rests where it
    /// does not pay at all; without it, every tree gets its whole budget.
    pub costs: Option<CostTable>,
}

impl Default for Speculation {
    fn default() -> Speculation {
        Speculation {
            budget: 22,
            seed: Seed::None,
            candidates: 8,
            temperature: 1.0,
            lookup: 0,
            costs: None,
        }
    }
}

/// What drafting must be able to bring at its very best, against plain decoding, to be tried at all: where the
/// gain is small even then, the trials cost more than it.
pub const WORTH_TRYING: f64 = 1.5;

/// Trees from the runner's own draft.
pub(crate) struct Drafted {
    config: Speculation,
    habits: Habits,
    /// What the last trees were expected to bring, in the order of their roots.
    open: Option<Round>,
    /// Nodes of the last trees together, and for how many sequences they were drafted.
    last: (usize, usize),
    pace: Pace,
}

impl Drafted {
    pub(crate) fn new(config: Speculation) -> Drafted {
        Drafted {
            config,
            habits: Habits::default(),
            open: None,
            last: (0, 0),
            pace: Pace::MEASURED,
        }
    }

    fn shape(&self, root: &Root<'_>, widest: usize) -> Shape {
        Shape {
            budget: self.config.budget.min(widest),
            max_depth: root.max_depth,
            seed: self.config.seed,
        }
    }

    /// Sizes of all trees: the whole budget, or what the costs say.
    fn sizes(&mut self, wanting: &[&Root<'_>], grown: &[Grown], others: usize) -> Vec<usize> {
        let Some(costs) = &self.config.costs else {
            return grown.iter().map(|grown| grown.tree.len()).collect();
        };
        let prospects: Vec<Prospect> = wanting
            .iter()
            .zip(grown)
            .map(|(root, grown)| {
                let certain = 1 + root.forced.len().min(grown.tree.len() - 1);
                let trust = self.habits.trust(root.seq);
                let drafted = grown.weights[certain..].iter();
                Prospect {
                    certain,
                    chances: drafted.map(|w| w.exp() * trust).collect(),
                }
            })
            .collect();
        let costs = &self.pace.of(costs);
        let plan = choose(costs, &prospects);
        let sequences = wanting.len() + others;
        let mut round = Round {
            seconds: plan.seconds,
            plain: costs.verify(sequences) * wanting.len() as f64 / sequences as f64,
            members: Vec::with_capacity(wanting.len()),
        };
        for ((root, prospect), n) in wanting.iter().zip(&prospects).zip(&plan.nodes) {
            let promised = prospect.chances[..*n].iter().sum();
            round.members.push((root.seq, promised, prospect.certain));
        }
        self.open = Some(round);
        let sizes = prospects.iter().zip(&plan.nodes);
        sizes.map(|(p, n)| p.certain + n).collect()
    }
}

impl TreeSource for Drafted {
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let limit = runner.info().limits.tree_nodes;
        let mut trees = Roots.trees(runner, roots)?;
        self.open = None;
        self.last = (trees.iter().map(Tree::len).sum(), 0);
        self.habits.keep(roots.iter().map(|root| root.seq));
        let drafts = runner.info().draft_depth.unwrap_or(0);
        let budget = self.config.budget.min(limit.saturating_sub(1));
        let resting = self.config.costs.is_some();
        let costs = self.config.costs.as_ref();
        let hopeless = costs.is_some_and(|costs| costs.promise(drafts.min(budget)) < WORTH_TRYING);
        let mut wanting = Vec::with_capacity(roots.len());
        for (i, root) in roots.iter().enumerate() {
            let room = root.max_depth.min(drafts) > root.forced.len();
            if room && root.speculate && !(resting && self.habits.rests(root.seq)) {
                wanting.push(i);
            }
        }
        if wanting.is_empty() || budget == 0 || drafts == 0 || hopeless {
            return Ok(trees);
        }
        let deepest = wanting.iter().map(|i| roots[*i].max_depth).max();
        let depth = drafts.min(deepest.unwrap_or(0));
        let items: Vec<DraftItem> = wanting
            .iter()
            .map(|i| DraftItem {
                seq: roots[*i].seq,
                root: roots[*i].token(),
            })
            .collect();
        let drafted = runner.draft(&items, depth, self.config.candidates.max(1))?;
        let mut grown = Vec::with_capacity(wanting.len());
        for (i, candidates) in wanting.iter().zip(&drafted) {
            let root = &roots[*i];
            let candidates = &tempered(candidates, self.config.temperature);
            let hints = match root.forced {
                [] => look_up(root.history, self.config.lookup, drafts),
                _ => &[],
            };
            let soil = Soil {
                root: root.token(),
                forced: root.forced,
                hints,
                candidates,
            };
            grown.push(grow(soil, self.shape(root, budget)));
        }
        let of: Vec<&Root<'_>> = wanting.iter().map(|i| &roots[*i]).collect();
        let sizes = self.sizes(&of, &grown, roots.len() - wanting.len());
        let drafted = wanting.len();
        for ((i, grown), size) in wanting.into_iter().zip(&grown).zip(sizes) {
            trees[i] = cut(grown, size.min(limit));
        }
        self.last = (trees.iter().map(Tree::len).sum(), drafted);
        Ok(trees)
    }

    fn learn(&mut self, results: &[TreeResult], times: RoundTimes) {
        if let Some(costs) = &self.config.costs {
            self.pace.learn(costs, self.last, times);
        }
        if let Some(mut round) = self.open.take() {
            let took = (times.draft + times.verify + times.commit).as_secs_f64();
            if took > 0.0 {
                round.seconds = took;
            }
            self.habits.learn(&round, results);
        }
    }
}

/// What followed the last earlier place of the text that reads as its end does, over `same` tokens; at most
/// `most` tokens, none where there is no such place.
fn look_up(history: &[TokenId], same: usize, most: usize) -> &[TokenId] {
    /// How far back is looked.
    const REACH: usize = 4096;
    let Some(end) = history.len().checked_sub(same).filter(|_| same > 0) else {
        return &[];
    };
    let tail = &history[end..];
    let from = end.saturating_sub(REACH);
    let place = (from..end)
        .rev()
        .find(|at| history[*at..*at + same] == *tail);
    match place {
        Some(at) => {
            let follows = at + same;
            &history[follows..history.len().min(follows + most)]
        }
        None => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_same_words_is_found_again() {
        let history: Vec<TokenId> = [1, 2, 3, 4, 9, 2, 3, 5, 6, 2, 3].map(TokenId).to_vec();
        let ids = |tokens: &[TokenId]| tokens.iter().map(|t| t.0).collect::<Vec<_>>();
        assert_eq!(ids(look_up(&history, 2, 3)), [5, 6, 2]);
        assert_eq!(ids(look_up(&history, 3, 3)), [0; 0]);
        assert_eq!(ids(look_up(&history, 0, 3)), [0; 0]);
        assert_eq!(ids(look_up(&history[..1], 2, 3)), [0; 0]);
    }
}
