//! Where a round's trees come from.

use contract::{DeviceError, DraftItem, Runner, SeqId, TokenId, Tree};

use std::time::Duration;

use crate::RoundTimes;
use crate::costs::{Clock, CostTable, Pace, Prospect, choose, measure};
use crate::grow::{Grown, Seed, Shape, Soil, cut, grow, tempered};
use crate::habit::{Bid, Habits, Member, Round, Stage};

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
    /// How unexpected its last tokens were to the target, in nats a token.
    pub doubt: f64,
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

    /// Called before the first job is admitted that may be drafted for, and nothing is open on the runner.
    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let _ = (runner, clock);
        Ok(())
    }

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
    /// How long the costs may be measured before the first job that may be drafted for, where there is no table and
    /// the scheduler has a clock: a draft that is loaded at its first use is measured then.
    pub measures: Option<Duration>,
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
            measures: None,
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
    /// What was drafted for the last trees, if anything was.
    open: Option<Open>,
    /// Nodes of the last trees together, and for how many sequences they were drafted.
    last: (usize, usize),
    /// The costs as rounds go now.
    pace: Option<Pace>,
}

/// A drafted round that has not been verified.
struct Open {
    /// Its times are those that were planned.
    round: Round,
    /// Seconds planned in all, and those of plain decoding among them.
    planned: f64,
    plainly: f64,
}

impl Open {
    /// The round as it turned out, if a clock says so. What held it up was hardly the draft, so a round counts
    /// at most half as much again as planned.
    fn ended(mut self, took: f64) -> Round {
        const OFF: f64 = 1.5;
        if took > 0.0 {
            let took = took.clamp(self.planned / OFF, self.planned * OFF);
            self.round.extra = (took - self.plainly).max(0.0);
        }
        self.round
    }
}

/// A sequence that is to be drafted for.
struct Wanting {
    /// Which root.
    at: usize,
    /// What it may draft; `None` where costs are unknown.
    bid: Option<Bid>,
}

impl Drafted {
    pub(crate) fn new(mut config: Speculation) -> Drafted {
        Drafted {
            pace: config.costs.take().map(Pace::new),
            config,
            habits: Habits::default(),
            open: None,
            last: (0, 0),
        }
    }

    /// Who is drafted for in this round, with up to `budget` nodes: everyone with room in the tree, or those for
    /// whom it pays.
    fn wanting(
        &mut self,
        roots: &[Root<'_>],
        certain: usize,
        (drafts, budget): (usize, usize),
    ) -> Vec<Wanting> {
        let costs = self.pace.as_ref().map(Pace::now);
        let stage = costs.map(|costs| Stage {
            costs,
            sequences: roots.len(),
            certain,
        });
        let hopeless = stage.is_some_and(|s| s.costs.promise(drafts.min(budget)) < WORTH_TRYING);
        let mut all = Vec::with_capacity(roots.len());
        for (at, root) in roots.iter().enumerate() {
            let room = root.max_depth.min(drafts) > root.forced.len();
            if !room || !root.speculate || hopeless {
                continue;
            }
            let Some(stage) = stage else {
                all.push(Wanting { at, bid: None });
                continue;
            };
            let deepest = root.max_depth.min(drafts) - root.forced.len();
            let of = (root.seq, root.doubt);
            let bid = self.habits.bid(of, (budget, deepest), stage);
            all.extend(bid.map(|bid| Wanting { at, bid: Some(bid) }));
        }
        all
    }

    /// Sizes of all trees: the whole budget, or what the costs say.
    fn sizes(
        &mut self,
        wanting: &[Wanting],
        roots: &[Root<'_>],
        (grown, certain): (&[Grown], usize),
    ) -> Vec<usize> {
        let Some(costs) = self.pace.as_ref().map(Pace::now) else {
            return grown.iter().map(|grown| grown.tree.len()).collect();
        };
        let mut prospects = Vec::with_capacity(wanting.len());
        for (wanting, grown) in wanting.iter().zip(grown) {
            let root = &roots[wanting.at];
            let certain = 1 + root.forced.len().min(grown.tree.len() - 1);
            let most = wanting.bid.map_or(usize::MAX, |bid| bid.nodes);
            let trust = self.habits.trust(root.seq);
            let drafted = grown.weights[certain..].iter().take(most);
            prospects.push(Prospect {
                certain,
                chances: drafted.map(|w| w.exp() * trust).collect(),
            });
        }
        // What others verify costs the same whoever drafts.
        let others = certain
            - prospects
                .iter()
                .map(|p| p.certain)
                .sum::<usize>()
                .min(certain);
        let plan = choose(costs, &prospects, others);
        let stage = Stage {
            costs,
            sequences: roots.len(),
            certain,
        };
        let drafted: usize = plan.nodes.iter().sum();
        let plainly = costs.verify(certain);
        let each = costs.draft(wanting.len()) / wanting.len() as f64;
        let more = (plan.seconds - plainly - costs.draft(wanting.len())).max(0.0);
        let a_node = more / drafted.max(1) as f64;
        let mut members = Vec::with_capacity(wanting.len());
        for ((wanting, prospect), n) in wanting.iter().zip(&prospects).zip(&plan.nodes) {
            if let Some(bid) = wanting.bid {
                members.push(Member {
                    seq: roots[wanting.at].seq,
                    bid,
                    promised: prospect.chances[..*n].iter().sum(),
                    certain: prospect.certain,
                    share: each + a_node * *n as f64,
                });
            }
        }
        let extra = members.iter().map(|member| member.share).sum::<f64>();
        members.iter_mut().for_each(|member| member.share /= extra);
        self.open = Some(Open {
            round: Round {
                token: stage.token(),
                extra,
                members,
            },
            planned: plan.seconds,
            plainly,
        });
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
        let certain = trees.iter().map(Tree::len).sum();
        self.open = None;
        self.last = (certain, 0);
        self.habits.keep(roots.iter().map(|root| root.seq));
        let drafts = runner.info().draft_depth.unwrap_or(0);
        let budget = self.config.budget.min(limit.saturating_sub(1));
        if budget == 0 || drafts == 0 {
            return Ok(trees);
        }
        let wanting = self.wanting(roots, certain, (drafts, budget));
        if wanting.is_empty() {
            return Ok(trees);
        }
        let deepest = wanting.iter().map(|w| roots[w.at].max_depth).max();
        let depth = drafts.min(deepest.unwrap_or(0));
        let items: Vec<DraftItem> = wanting
            .iter()
            .map(|w| DraftItem {
                seq: roots[w.at].seq,
                root: roots[w.at].token(),
            })
            .collect();
        let drafted = runner.draft(&items, depth, self.config.candidates.max(1))?;
        let mut grown = Vec::with_capacity(wanting.len());
        for (wanting, candidates) in wanting.iter().zip(&drafted) {
            let root = &roots[wanting.at];
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
            let shape = Shape {
                budget,
                max_depth: root.max_depth,
                seed: self.config.seed,
            };
            grown.push(grow(soil, shape));
        }
        let sizes = self.sizes(&wanting, roots, (&grown, certain));
        for ((wanting, grown), size) in wanting.iter().zip(&grown).zip(sizes) {
            trees[wanting.at] = cut(grown, size.min(limit));
        }
        self.last = (trees.iter().map(Tree::len).sum(), wanting.len());
        Ok(trees)
    }

    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let Some(limit) = self.config.measures.take() else {
            return Ok(());
        };
        if self.pace.is_none() {
            let measured = measure(runner, clock, limit)?;
            tracing::info!(costs = ?measured, "measured what passes cost");
            self.pace = measured.map(Pace::new);
        }
        Ok(())
    }

    fn learn(&mut self, results: &[TreeResult], times: RoundTimes) {
        if let Some(pace) = &mut self.pace {
            pace.learn(self.last, times);
        }
        let took = times.draft + times.verify + times.commit;
        let round = self.open.take().map(|open| open.ended(took.as_secs_f64()));
        self.habits.learn(round.as_ref(), results);
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
