//! Where a round's trees come from.

use contract::{DeviceError, DraftItem, Runner, SeqId, TokenId, Tree};

use std::time::Duration;

use crate::StepTimes;
use crate::costs::{Clock, CostTable, NodeChances, OnlineCostModel, choose_sizes, measure};
use crate::grow::{
    DraftTree, TreeBudget, TreeInit, TreeInputs, build_tree, truncate, with_temperature,
};
use crate::habit::{Allowance, DraftedStep, Participant, SpeculationController, StepCosts};

/// One sequence that wants a tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeRequest<'a> {
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
    pub surprisal: f64,
}

impl TreeRequest<'_> {
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
    /// One tree per root, in order, each rooted at [`TreeRequest::token`].
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<Tree>, DeviceError>;

    /// Called before the first job is admitted that may be drafted for, and nothing is open on the runner.
    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let _ = (runner, clock);
        Ok(())
    }

    /// Tells what the trees of the last call brought and took, so that the next ones can be better.
    fn learn(&mut self, results: &[TreeResult], times: StepTimes) {
        let _ = (results, times);
    }
}

/// Plain decoding: roots, what is forced, and nothing else.
pub(crate) struct NoDraft;

impl TreeSource for NoDraft {
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let nodes = runner.info().limits.tree_nodes;
        Ok(roots.iter().map(|root| root.certain(nodes)).collect())
    }
}

/// How trees are drafted.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculation {
    /// DraftModelSource nodes of one sequence's tree, 0 to 63; the runner's own limit applies too. 0 turns drafting off.
    pub budget: usize,
    /// How a tree begins; [`TreeInit::ChainOnly`] makes it a chain.
    pub init: TreeInit,
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
            init: TreeInit::None,
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
pub const MIN_SPEEDUP: f64 = 1.5;

/// Trees from the runner's own draft.
pub(crate) struct DraftModelSource {
    config: Speculation,
    controller: SpeculationController,
    /// What was drafted for the last trees, if anything was.
    planned_step: Option<PlannedStep>,
    /// Nodes of the last trees together, and for how many sequences they were drafted.
    last: (usize, usize),
    /// The costs as rounds go now.
    cost_model: Option<OnlineCostModel>,
}

/// A drafted round that has not been verified.
struct PlannedStep {
    /// Its times are those that were planned.
    step: DraftedStep,
    /// Seconds planned in all, and those of plain decoding among them.
    planned_seconds: f64,
    plain_seconds: f64,
}

impl PlannedStep {
    /// The round as it turned out, if a clock says so. What held it up was hardly the draft, so a round counts
    /// at most half as much again as planned.
    fn measured(mut self, took: f64) -> DraftedStep {
        const OFF: f64 = 1.5;
        if took > 0.0 {
            let took = took.clamp(self.planned_seconds / OFF, self.planned_seconds * OFF);
            self.step.extra = (took - self.plain_seconds).max(0.0);
        }
        self.step
    }
}

/// A sequence that is to be drafted for.
struct Selected {
    /// Which root.
    at: usize,
    /// What it may draft; `None` where costs are unknown.
    allowance: Option<Allowance>,
}

impl DraftModelSource {
    pub(crate) fn new(mut config: Speculation) -> DraftModelSource {
        DraftModelSource {
            cost_model: config.costs.take().map(OnlineCostModel::new),
            config,
            controller: SpeculationController::default(),
            planned_step: None,
            last: (0, 0),
        }
    }

    /// Who is drafted for in this round, with up to `budget` nodes: everyone with room in the tree, or those for
    /// whom it pays.
    fn selected(
        &mut self,
        roots: &[TreeRequest<'_>],
        certain: usize,
        (drafts, budget): (usize, usize),
    ) -> Vec<Selected> {
        let costs = self.cost_model.as_ref().map(OnlineCostModel::now);
        let costs_now = costs.map(|costs| StepCosts {
            costs,
            sequences: roots.len(),
            certain,
        });
        let cannot_pay =
            costs_now.is_some_and(|s| s.costs.max_speedup(drafts.min(budget)) < MIN_SPEEDUP);
        let mut all = Vec::with_capacity(roots.len());
        for (at, root) in roots.iter().enumerate() {
            let room = root.max_depth.min(drafts) > root.forced.len();
            if !room || !root.speculate || cannot_pay {
                continue;
            }
            let Some(costs_now) = costs_now else {
                all.push(Selected {
                    at,
                    allowance: None,
                });
                continue;
            };
            let deepest = root.max_depth.min(drafts) - root.forced.len();
            let of = (root.seq, root.surprisal);
            let allowance = self.controller.allow(of, (budget, deepest), costs_now);
            all.extend(allowance.map(|allowance| Selected {
                at,
                allowance: Some(allowance),
            }));
        }
        all
    }

    /// Sizes of all trees: the whole budget, or what the costs say.
    fn sizes(
        &mut self,
        selected: &[Selected],
        roots: &[TreeRequest<'_>],
        (draft_trees, certain): (&[DraftTree], usize),
    ) -> Vec<usize> {
        let Some(costs) = self.cost_model.as_ref().map(OnlineCostModel::now) else {
            return draft_trees.iter().map(|draft| draft.tree.len()).collect();
        };
        let mut chances_by_sequence = Vec::with_capacity(selected.len());
        for (selected, draft_tree) in selected.iter().zip(draft_trees) {
            let root = &roots[selected.at];
            let certain = 1 + root.forced.len().min(draft_tree.tree.len() - 1);
            let most = selected
                .allowance
                .map_or(usize::MAX, |allowance| allowance.nodes);
            let calibration = self.controller.calibration(root.seq);
            let drafted = draft_tree.weights[certain..].iter().take(most);
            chances_by_sequence.push(NodeChances {
                certain,
                chances: drafted.map(|w| w.exp() * calibration).collect(),
            });
        }
        // What others verify costs the same whoever drafts.
        let others = certain
            - chances_by_sequence
                .iter()
                .map(|p| p.certain)
                .sum::<usize>()
                .min(certain);
        let sizes = choose_sizes(costs, &chances_by_sequence, others);
        let costs_now = StepCosts {
            costs,
            sequences: roots.len(),
            certain,
        };
        let drafted: usize = sizes.nodes.iter().sum();
        let plain_seconds = costs.verify(certain);
        let per_sequence = costs.draft(selected.len()) / selected.len() as f64;
        let more = (sizes.seconds - plain_seconds - costs.draft(selected.len())).max(0.0);
        let per_node = more / drafted.max(1) as f64;
        let mut participants = Vec::with_capacity(selected.len());
        for ((selected, node_chances), n) in
            selected.iter().zip(&chances_by_sequence).zip(&sizes.nodes)
        {
            if let Some(allowance) = selected.allowance {
                participants.push(Participant {
                    seq: roots[selected.at].seq,
                    allowance,
                    predicted: node_chances.chances[..*n].iter().sum(),
                    certain: node_chances.certain,
                    share: per_sequence + per_node * *n as f64,
                });
            }
        }
        let extra = participants
            .iter()
            .map(|participant| participant.share)
            .sum::<f64>();
        participants
            .iter_mut()
            .for_each(|participant| participant.share /= extra);
        self.planned_step = Some(PlannedStep {
            step: DraftedStep {
                token: costs_now.token(),
                extra,
                participants,
            },
            planned_seconds: sizes.seconds,
            plain_seconds,
        });
        let sizes = chances_by_sequence.iter().zip(&sizes.nodes);
        sizes.map(|(p, n)| p.certain + n).collect()
    }
}

impl TreeSource for DraftModelSource {
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let limit = runner.info().limits.tree_nodes;
        let mut trees = NoDraft.trees(runner, roots)?;
        let certain = trees.iter().map(Tree::len).sum();
        self.planned_step = None;
        self.last = (certain, 0);
        self.controller
            .sync_sequences(roots.iter().map(|root| root.seq));
        let drafts = runner.info().draft_depth.unwrap_or(0);
        let budget = self.config.budget.min(limit.saturating_sub(1));
        if budget == 0 || drafts == 0 {
            return Ok(trees);
        }
        let selected = self.selected(roots, certain, (drafts, budget));
        if selected.is_empty() {
            return Ok(trees);
        }
        let deepest = selected.iter().map(|w| roots[w.at].max_depth).max();
        let depth = drafts.min(deepest.unwrap_or(0));
        let items: Vec<DraftItem> = selected
            .iter()
            .map(|w| DraftItem {
                seq: roots[w.at].seq,
                root: roots[w.at].token(),
            })
            .collect();
        let drafted = runner.draft(&items, depth, self.config.candidates.max(1))?;
        let mut draft_trees = Vec::with_capacity(selected.len());
        for (selected, candidates) in selected.iter().zip(&drafted) {
            let root = &roots[selected.at];
            let candidates = &with_temperature(candidates, self.config.temperature);
            let hints = match root.forced {
                [] => prompt_lookup(root.history, self.config.lookup, drafts),
                _ => &[],
            };
            let inputs = TreeInputs {
                root: root.token(),
                forced: root.forced,
                hints,
                candidates,
            };
            let tree_budget = TreeBudget {
                max_nodes: budget,
                max_depth: root.max_depth,
                init: self.config.init,
            };
            draft_trees.push(build_tree(inputs, tree_budget));
        }
        let sizes = self.sizes(&selected, roots, (&draft_trees, certain));
        for ((selected, draft_tree), size) in selected.iter().zip(&draft_trees).zip(sizes) {
            trees[selected.at] = truncate(draft_tree, size.min(limit));
        }
        self.last = (trees.iter().map(Tree::len).sum(), selected.len());
        Ok(trees)
    }

    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let Some(limit) = self.config.measures.take() else {
            return Ok(());
        };
        if self.cost_model.is_none() {
            let measured = measure(runner, clock, limit)?;
            tracing::info!(costs = ?measured, "measured what passes cost");
            self.cost_model = measured.map(OnlineCostModel::new);
        }
        Ok(())
    }

    fn learn(&mut self, results: &[TreeResult], times: StepTimes) {
        if let Some(cost_model) = &mut self.cost_model {
            cost_model.learn(self.last, times);
        }
        let took = times.draft + times.verify + times.commit;
        let step = self
            .planned_step
            .take()
            .map(|planned| planned.measured(took.as_secs_f64()));
        self.controller.learn(step.as_ref(), results);
    }
}

/// What followed the last earlier place of the text that reads as its end does, over `same` tokens; at most
/// `most` tokens, none where there is no such place.
fn prompt_lookup(history: &[TokenId], same: usize, most: usize) -> &[TokenId] {
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
    fn prompt_lookup_finds_what_followed_the_same_tokens() {
        let history: Vec<TokenId> = [1, 2, 3, 4, 9, 2, 3, 5, 6, 2, 3].map(TokenId).to_vec();
        let ids = |tokens: &[TokenId]| tokens.iter().map(|t| t.0).collect::<Vec<_>>();
        assert_eq!(ids(prompt_lookup(&history, 2, 3)), [5, 6, 2]);
        assert_eq!(ids(prompt_lookup(&history, 3, 3)), [0; 0]);
        assert_eq!(ids(prompt_lookup(&history, 0, 3)), [0; 0]);
        assert_eq!(ids(prompt_lookup(&history[..1], 2, 3)), [0; 0]);
    }
}
