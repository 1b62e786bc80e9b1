//! Trees from the runner's draft model or its multi-token-prediction head.

use contract::{DeviceError, DraftItem, Runner, TokenId, Tree};

use super::build_tree::{
    DraftTree, TreeBudget, TreeInputs, build_tree, truncate, with_temperature,
};
use super::config::{DraftSource, MIN_SPEEDUP, SpeculationConfig};
use super::controller::{Allowance, DraftedStep, Participant, SpeculationController, StepCosts};
use super::costs::{
    Clock, MTP_MEASURED_DEPTH, NodeAcceptance, OnlineCostModel, choose_sizes, measure,
};
use super::mtp_tree::{MtpReach, MtpTreeRequest, grow_trees};
use super::prompt_lookup::prompt_lookup;
use super::tree_proposer::{NoDraft, TreeProposer, TreeRequest, TreeResult};
use crate::stats::StepTimes;

/// Trees from one of the runner's drafts.
pub(crate) struct DraftModelProposer {
    source: DraftSource,
    config: SpeculationConfig,
    controller: SpeculationController,
    /// The step of the last trees, if anything was drafted.
    planned_step: Option<PlannedStep>,
    /// Nodes of the last trees together, and the number of sequences drafted for.
    last: (usize, usize),
    /// Current costs of passes.
    cost_model: Option<OnlineCostModel>,
}

/// A drafted step that is not verified yet.
struct PlannedStep {
    /// With planned times.
    step: DraftedStep,
    /// Planned seconds in all, and those of plain decoding among them.
    planned_seconds: f64,
    plain_seconds: f64,
}

impl PlannedStep {
    /// The step with its measured time, if the clock gave one. Outliers are hardly the draft's
    /// doing, so the time counts within 1.5 times of the plan.
    fn measured(mut self, took: f64) -> DraftedStep {
        const OFF: f64 = 1.5;
        if took > 0.0 {
            let took = took.clamp(self.planned_seconds / OFF, self.planned_seconds * OFF);
            self.step.overhead_seconds = (took - self.plain_seconds).max(0.0);
        }
        self.step
    }
}

/// A sequence to draft for.
struct Selected {
    /// Index of its request.
    at: usize,
    /// Its allowance; `None` if costs are unknown.
    allowance: Option<Allowance>,
}

impl DraftModelProposer {
    pub(crate) fn new(mut config: SpeculationConfig, source: DraftSource) -> DraftModelProposer {
        DraftModelProposer {
            source,
            cost_model: config.costs.take().map(OnlineCostModel::new),
            config,
            controller: SpeculationController::default(),
            planned_step: None,
            last: (0, 0),
        }
    }

    /// The sequences to draft for, with up to `budget` nodes: all that have depth left, or those
    /// for which it pays.
    fn selected(
        &mut self,
        roots: &[TreeRequest<'_>],
        base_nodes: usize,
        (drafts, budget): (usize, usize),
    ) -> Vec<Selected> {
        let costs = self.cost_model.as_ref().map(OnlineCostModel::now);
        let costs_now = costs.map(|costs| StepCosts {
            costs,
            sequences: roots.len(),
            base_nodes,
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

    /// Trees of up to `budget` nodes from the draft model.
    fn block_trees(
        &self,
        runner: &mut dyn Runner,
        (selected, roots): (&[Selected], &[TreeRequest<'_>]),
        (drafts, budget): (usize, usize),
    ) -> Result<Vec<DraftTree>, DeviceError> {
        let deepest = selected
            .iter()
            .map(|selected| roots[selected.at].max_depth)
            .max();
        let depth = drafts.min(deepest.unwrap_or(0));
        let items: Vec<DraftItem> = selected
            .iter()
            .map(|selected| DraftItem {
                seq: roots[selected.at].seq,
                root: roots[selected.at].token(),
            })
            .collect();
        let drafted = runner.draft(&items, depth, self.config.candidates.max(1))?;
        let mut draft_trees = Vec::with_capacity(selected.len());
        for (selected, candidates) in selected.iter().zip(&drafted) {
            let root = &roots[selected.at];
            let candidates = &with_temperature(candidates, self.config.temperature);
            let inputs = TreeInputs {
                root: root.token(),
                forced: root.forced,
                hints: self.hints(root, drafts),
                candidates,
            };
            draft_trees.push(build_tree(inputs, self.tree_budget(root, budget)));
        }
        Ok(draft_trees)
    }

    /// Trees of up to `budget` nodes from the multi-token-prediction head.
    fn mtp_trees(
        &self,
        runner: &mut dyn Runner,
        (selected, roots): (&[Selected], &[TreeRequest<'_>]),
        (drafts, budget): (usize, usize),
    ) -> Result<Vec<DraftTree>, DeviceError> {
        let (vocab, limits) = (runner.info().vocab, runner.info().mtp);
        // What a depth costs a sequence, in tokens of plain decoding.
        let costs = self.cost_model.as_ref().map(OnlineCostModel::now);
        let least_gain = costs.map_or(0.0, |costs| {
            let plain = costs.verify(roots.len()) / roots.len() as f64;
            let draft = costs.draft(selected.len()) / selected.len() as f64;
            draft / MTP_MEASURED_DEPTH as f64 / plain
        });
        let reach = MtpReach {
            max_depth: drafts,
            max_rows: limits.map_or(0, |limits| limits.max_rows),
            candidates: self.config.candidates.clamp(1, vocab),
            temperature: self.config.temperature,
            least_gain,
        };
        let request = |selected: &Selected| {
            let root = &roots[selected.at];
            MtpTreeRequest {
                root,
                hints: self.hints(root, drafts),
                budget: self.tree_budget(root, budget),
                calibration: self.controller.calibration(root.seq),
            }
        };
        grow_trees(runner, selected.iter().map(request).collect(), reach)
    }

    /// Tokens of prompt lookup.
    fn hints<'a>(&self, root: &TreeRequest<'a>, drafts: usize) -> &'a [TokenId] {
        match root.forced {
            [] => prompt_lookup(root.history, self.config.lookup_ngram, drafts),
            _ => &[],
        }
    }

    fn tree_budget(&self, root: &TreeRequest<'_>, budget: usize) -> TreeBudget {
        TreeBudget {
            max_nodes: budget,
            max_depth: root.max_depth,
            init: self.config.init,
        }
    }

    /// Sizes of all trees: the whole budget, or the best by cost.
    fn sizes(
        &mut self,
        selected: &[Selected],
        roots: &[TreeRequest<'_>],
        (draft_trees, base_nodes): (&[DraftTree], usize),
    ) -> Vec<usize> {
        let Some(costs) = self.cost_model.as_ref().map(OnlineCostModel::now) else {
            return draft_trees.iter().map(|draft| draft.tree.len()).collect();
        };
        let mut acceptance_by_sequence = Vec::with_capacity(selected.len());
        for (selected, draft_tree) in selected.iter().zip(draft_trees) {
            let root = &roots[selected.at];
            let base_nodes = 1 + root.forced.len().min(draft_tree.tree.len() - 1);
            let most = selected
                .allowance
                .map_or(usize::MAX, |allowance| allowance.nodes);
            let calibration = self.controller.calibration(root.seq);
            let drafted = draft_tree.weights[base_nodes..].iter().take(most);
            acceptance_by_sequence.push(NodeAcceptance {
                base_nodes,
                probabilities: drafted.map(|w| w.exp() * calibration).collect(),
            });
        }
        // Other sequences' nodes cost the same with either draft.
        let others = base_nodes
            - acceptance_by_sequence
                .iter()
                .map(|node| node.base_nodes)
                .sum::<usize>()
                .min(base_nodes);
        let sizes = choose_sizes(costs, &acceptance_by_sequence, others);
        let costs_now = StepCosts {
            costs,
            sequences: roots.len(),
            base_nodes,
        };
        let drafted: usize = sizes.nodes.iter().sum();
        let plain_seconds = costs.verify(base_nodes);
        let per_sequence = costs.draft(selected.len()) / selected.len() as f64;
        let more = (sizes.seconds - plain_seconds - costs.draft(selected.len())).max(0.0);
        let per_node = more / drafted.max(1) as f64;
        let mut participants = Vec::with_capacity(selected.len());
        for ((selected, node_acceptance), n) in selected
            .iter()
            .zip(&acceptance_by_sequence)
            .zip(&sizes.nodes)
        {
            if let Some(allowance) = selected.allowance {
                participants.push(Participant {
                    seq: roots[selected.at].seq,
                    allowance,
                    predicted: node_acceptance.probabilities[..*n].iter().sum(),
                    base_nodes: node_acceptance.base_nodes,
                    share: per_sequence + per_node * *n as f64,
                });
            }
        }
        let overhead_seconds = participants
            .iter()
            .map(|participant| participant.share)
            .sum::<f64>();
        participants
            .iter_mut()
            .for_each(|participant| participant.share /= overhead_seconds);
        self.planned_step = Some(PlannedStep {
            step: DraftedStep {
                seconds_per_token: costs_now.seconds_per_token(),
                overhead_seconds,
                participants,
            },
            planned_seconds: sizes.seconds,
            plain_seconds,
        });
        let sizes = acceptance_by_sequence.iter().zip(&sizes.nodes);
        sizes.map(|(node, n)| node.base_nodes + n).collect()
    }
}

impl TreeProposer for DraftModelProposer {
    fn propose(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let limit = runner.info().limits.tree_nodes;
        let mut trees = NoDraft.propose(runner, roots)?;
        let base_nodes = trees.iter().map(Tree::len).sum();
        self.planned_step = None;
        self.last = (base_nodes, 0);
        self.controller
            .sync_sequences(roots.iter().map(|root| root.seq));
        let drafts = self.source.depth(runner.info());
        let budget = self.config.budget.min(limit.saturating_sub(1));
        if budget == 0 || drafts == 0 {
            return Ok(trees);
        }
        let selected = self.selected(roots, base_nodes, (drafts, budget));
        if selected.is_empty() {
            return Ok(trees);
        }
        let (of, reach) = ((&selected[..], roots), (drafts, budget));
        let draft_trees = match self.source {
            DraftSource::Block => self.block_trees(runner, of, reach)?,
            DraftSource::Mtp => self.mtp_trees(runner, of, reach)?,
        };
        let sizes = self.sizes(&selected, roots, (&draft_trees, base_nodes));
        for ((selected, draft_tree), size) in selected.iter().zip(&draft_trees).zip(sizes) {
            trees[selected.at] = truncate(draft_tree, size.min(limit));
        }
        self.last = (trees.iter().map(Tree::len).sum(), selected.len());
        Ok(trees)
    }

    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let Some(limit) = self.config.measure_time_limit.take() else {
            return Ok(());
        };
        if self.cost_model.is_none() {
            let measured = measure(runner, self.source, (clock, limit))?;
            tracing::info!(costs = ?measured, "measured pass costs");
            self.cost_model = measured.map(OnlineCostModel::new);
        }
        Ok(())
    }

    fn observe(&mut self, results: &[TreeResult], times: StepTimes) {
        if let Some(cost_model) = &mut self.cost_model {
            cost_model.observe(self.last, times);
        }
        let took = times.draft + times.verify + times.commit;
        let step = self
            .planned_step
            .take()
            .map(|planned| planned.measured(took.as_secs_f64()));
        self.controller.observe(step.as_ref(), results);
    }
}
