//! Trees from all sources together.
//!
//! # A step
//!
//! 1. Each sequence's automaton grows by its new tokens. Its suffix matches form a first tree,
//!    which costs nothing to draft.
//! 2. The controller chooses a plan per sequence: plain decoding, suffix matches alone, or the
//!    draft model, the head or both beside them.
//! 3. The draft model drafts its blocks, then the head extends the trees depth by depth
//!    (`head_growth`).
//! 4. Calibrated chances order the nodes of all sources (`explore`), and the costs of rows decide
//!    how many of them each sequence verifies.
//! 5. Behind the step, every candidate beside a sampled token is a hit or a miss: calibration
//!    learns from it, whether or not the tree held it, and also in steps that draft nothing.

use std::collections::{HashMap, VecDeque};

use contract::{DeviceError, DraftItem, Runner, SeqId};

use super::build_tree::{TreeBudget, with_temperature};
use super::calibration::{Calibration, Trust};
use super::candidates::Drafts;
use super::config::{MIN_SPEEDUP, SpeculationConfig};
use super::controller::{
    DraftedStep, Participant, Plan, Situation, SpeculationController, StepCosts,
};
use super::costs::{Clock, DraftUse, NodeAcceptance, OnlineCostModel, choose_sizes, measure};
use super::explore::Exploration;
use super::head_growth::{HeadLimits, grow};
use super::narrow_draft::DraftWidth;
use super::sequence_draft::SequenceDraft;
use super::sources::{DraftSource, SourceSet};
use super::suffix::SuffixIndex;
use super::tree_proposer::{NoDraft, ProposedTree, TreeProposer, TreeRequest, TreeResult};
use super::waiting::WaitingTokens;
use crate::stats::StepTimes;

/// Trees from the runner's draft model, its multi-token-prediction head and suffix matches.
pub(crate) struct MixedProposer {
    config: SpeculationConfig,
    /// The sources that may draft.
    sources: SourceSet,
    controller: SpeculationController,
    calibration: Calibration,
    /// Corrections of the calibration by sequence.
    trust: HashMap<SeqId, Trust>,
    suffix: SuffixIndex,
    /// Current costs of passes.
    cost_model: Option<OnlineCostModel>,
    width: DraftWidth,
    /// Tokens that wait for drafts.
    waiting: WaitingTokens,
    /// Sequences that decode besides those of the next step.
    others: Vec<SeqId>,
    /// Steps that are not observed yet, the earliest first.
    steps: VecDeque<ProposedStep>,
}

/// What was proposed and is not verified yet.
#[derive(Default)]
struct ProposedStep {
    /// Nodes of all trees together.
    rows: usize,
    drafted: DraftUse,
    /// The costs, if anything was drafted and costs are known.
    planned: Option<PlannedStep>,
    /// The candidates of each sequence.
    explored: Vec<(SeqId, Exploration)>,
}

/// A drafted step that is not verified yet.
struct PlannedStep {
    /// With planned times.
    step: DraftedStep,
    /// Planned tokens of all sequences, roots included.
    planned_tokens: f64,
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

impl MixedProposer {
    /// A proposer with the sources that the runner has.
    pub(crate) fn new(mut config: SpeculationConfig, sources: SourceSet) -> MixedProposer {
        MixedProposer {
            sources,
            cost_model: config.costs.take().map(OnlineCostModel::new),
            config,
            controller: SpeculationController::default(),
            calibration: Calibration::default(),
            trust: HashMap::new(),
            suffix: SuffixIndex::default(),
            width: DraftWidth::default(),
            waiting: WaitingTokens::default(),
            others: Vec::new(),
            steps: VecDeque::new(),
        }
    }

    /// A proposer that always drafts with `plan`.
    #[cfg(test)]
    pub(super) fn fixed(config: SpeculationConfig, plan: SourceSet) -> MixedProposer {
        let mut proposer = MixedProposer::new(config, plan);
        proposer.controller.forced = Some(plan.without(DraftSource::Suffix));
        proposer
    }

    /// The sequences with room for drafted nodes, each with its suffix matches. Those that may not
    /// speculate have none.
    fn sequences<'a>(
        &'a self,
        roots: &'a [TreeRequest<'a>],
        max_nodes: usize,
    ) -> Vec<SequenceDraft<'a>> {
        let requests = roots.iter().enumerate();
        let requests =
            requests.filter(|(_, root)| root.speculate && root.max_depth > root.forced.len());
        let draft = |(at, root): (usize, &'a TreeRequest<'a>)| {
            let automaton = self.suffix.automaton(root.seq, root.history);
            let drafts = Drafts {
                suffix: automaton.map(|automaton| (automaton, self.config.min_match)),
                ..Drafts::default()
            };
            let trust = self.trust.get(&root.seq).copied().unwrap_or_default();
            let budget = TreeBudget {
                max_nodes,
                max_depth: root.max_depth,
                init: self.config.init,
            };
            let waiting = self.waiting.of(root.seq);
            SequenceDraft {
                waiting,
                ..SequenceDraft::new((at, root), drafts, (&self.calibration, trust), budget)
            }
        };
        requests.map(draft).collect()
    }

    /// Grows the automata of sequences that speculate, and drops those of others.
    fn extend_automata(&mut self, roots: &[TreeRequest<'_>], others: &[SeqId]) {
        if !self.sources.contains(DraftSource::Suffix) {
            return;
        }
        let speculating = roots.iter().filter(|root| root.speculate);
        let seqs = speculating.clone().map(|root| root.seq);
        self.suffix.retain(seqs.chain(others.iter().copied()));
        let n = speculating.clone().count() + others.len();
        for root in speculating {
            self.suffix.extend(root.seq, root.history, n);
        }
    }
}

/// Chooses the plan of each sequence.
fn choose_plans(
    controller: &mut SpeculationController,
    sequences: &mut [SequenceDraft<'_>],
    (sources, depth_of): (SourceSet, &dyn Fn(DraftSource) -> usize),
    (costs_now, budget): (Option<StepCosts<'_>>, usize),
) {
    let Some(costs_now) = costs_now else {
        for sequence in sequences {
            sequence.drafts_nodes = true;
            sequence.sources = sources.without(DraftSource::Suffix);
        }
        return;
    };
    for sequence in sequences {
        let room = sequence.root.max_depth - sequence.root.forced.len();
        let plans = sources.plans().map(|sources| {
            let depths = sources.iter().map(depth_of);
            let deepest = depths.max().unwrap_or(0).min(sequence.root.max_depth);
            Plan {
                sources,
                deepest: deepest.saturating_sub(sequence.root.forced.len()).min(room),
                waiting: costs_now.costs.all_waiting(sources, sequence.waiting),
            }
        });
        let plans: Vec<Plan> = plans
            .filter(|plan| {
                let promise = costs_now
                    .costs
                    .max_speedup(plan.sources, plan.deepest.min(budget));
                plan.deepest > 0 && promise >= MIN_SPEEDUP
            })
            .collect();
        let now = Situation {
            seq: sequence.root.seq,
            surprisal: sequence.root.surprisal,
            suffix_speedup: costs_now.speedup_of(sequence.exploration.reached()),
            max_nodes: budget,
        };
        sequence.allowance = controller.allow(now, &plans, costs_now);
        if let Some(allowance) = sequence.allowance {
            sequence.drafts_nodes = true;
            sequence.sources = allowance.sources;
        }
    }
}

/// Sizes of all trees: the whole budget, or the best by cost.
fn choose_all_sizes(
    sequences: &[SequenceDraft<'_>],
    costs_now: Option<StepCosts<'_>>,
    drafted: DraftUse,
) -> (Vec<usize>, Option<PlannedStep>) {
    let Some(costs_now) = costs_now else {
        let all = sequences.iter().map(|s| s.exploration.reached().len());
        return (all.collect(), None);
    };
    let StepCosts {
        costs, base_nodes, ..
    } = costs_now;
    let acceptance: Vec<NodeAcceptance> = sequences
        .iter()
        .map(|sequence| sequence.acceptance_within(usize::MAX))
        .collect();
    // Other sequences' nodes cost the same with any draft.
    let own: usize = acceptance.iter().map(|one| one.base_nodes).sum();
    let draft_seconds = costs.drafts(drafted);
    let others = base_nodes.saturating_sub(own);
    let sizes = choose_sizes(costs, &acceptance, (draft_seconds, others));
    let plain_seconds = costs.verify(base_nodes);
    let nodes: usize = sizes.nodes.iter().sum();
    let more = (sizes.seconds - plain_seconds - draft_seconds).max(0.0);
    let per_node = more / nodes.max(1) as f64;
    let share = |of: DraftUse, n: usize| costs.drafts(of) / n.max(1) as f64;
    let blocks = sequences
        .iter()
        .filter(|sequence| sequence.sources.contains(DraftSource::Block));
    let block = share(
        DraftUse {
            block: drafted.block,
            ..DraftUse::default()
        },
        blocks.count(),
    );
    let mtp = share(
        DraftUse {
            mtp: drafted.mtp,
            mtp_depths: drafted.mtp_depths,
            ..DraftUse::default()
        },
        drafted.mtp,
    );
    let mut participants = Vec::with_capacity(sequences.len());
    for ((sequence, acceptance), n) in sequences.iter().zip(&acceptance).zip(&sizes.nodes) {
        let Some(allowance) = sequence.allowance else {
            continue;
        };
        let waiting = costs.all_waiting(sequence.sources, sequence.waiting);
        let mut seconds = per_node * *n as f64 + waiting;
        for (source, draft) in [(DraftSource::Block, block), (DraftSource::Mtp, mtp)] {
            if sequence.sources.contains(source) {
                seconds += draft;
            }
        }
        participants.push(Participant {
            seq: sequence.root.seq,
            allowance,
            base_nodes: acceptance.base_nodes,
            deepest: sequence.exploration.deepest(*n),
            share: seconds,
            waiting,
            planned_tokens: acceptance.probabilities.iter().take(*n).sum(),
        });
    }
    let overhead_seconds: f64 = participants.iter().map(|one| one.share).sum();
    for participant in &mut participants {
        participant.share /= overhead_seconds.max(f64::MIN_POSITIVE);
    }
    let planned = PlannedStep {
        step: DraftedStep {
            seconds_per_token: costs_now.seconds_per_token(),
            overhead_seconds,
            participants,
        },
        planned_tokens: sizes.tokens,
        planned_seconds: sizes.seconds,
        plain_seconds,
    };
    (sizes.nodes, Some(planned))
}

impl TreeProposer for MixedProposer {
    fn propose(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<ProposedTree>, DeviceError> {
        let limit = runner.info().limits.tree_nodes;
        let mut trees = NoDraft.propose(runner, roots)?;
        let base_nodes = trees.iter().map(|proposed| proposed.tree.len()).sum();
        let others = std::mem::take(&mut self.others);
        let seqs = roots.iter().map(|root| root.seq);
        let seqs = seqs.chain(others.iter().copied());
        self.controller.sync_sequences(seqs.clone());
        self.trust.retain(|seq, _| seqs.clone().any(|s| s == *seq));
        self.waiting.retain(seqs.clone());
        self.extend_automata(roots, &others);
        self.steps.push_back(ProposedStep {
            rows: base_nodes,
            ..ProposedStep::default()
        });
        let budget = self.config.budget.min(limit.saturating_sub(1));
        if budget == 0 {
            return Ok(trees);
        }
        let costs = self.cost_model.as_ref().map(OnlineCostModel::now);
        let costs_now = costs.map(|costs| StepCosts {
            costs,
            sequences: roots.len(),
            base_nodes,
        });
        let mut controller = std::mem::take(&mut self.controller);
        let mut width = std::mem::take(&mut self.width);
        let mut sequences = self.sequences(roots, budget);
        let depths = DraftSource::ALL.map(|source| source.depth(runner.info()));
        let depth_of = |source: DraftSource| depths[source.index()];
        let of = (self.sources, &depth_of as &dyn Fn(DraftSource) -> usize);
        choose_plans(&mut controller, &mut sequences, of, (costs_now, budget));
        let drafted = self.draft(runner, &mut sequences, (costs_now, &mut width));
        let drafted = drafted.map(|drafted| {
            if let (Some(narrow), Some(costs_now)) = (runner.info().narrow_draft, costs_now) {
                width.observe(&sequences, narrow, (drafted, costs_now));
            }
            let (sizes, planned) = choose_all_sizes(&sequences, costs_now, drafted);
            for (sequence, size) in sequences.iter().zip(&sizes) {
                let n = (*size).min(sequence.max_nodes());
                trees[sequence.at] = sequence.exploration.tree(n, limit);
            }
            let stored: Vec<(SeqId, SourceSet)> = sequences
                .iter()
                .map(|sequence| (sequence.root.seq, sequence.sources))
                .collect();
            let explored = sequences.into_iter();
            let step = ProposedStep {
                rows: trees.iter().map(|proposed| proposed.tree.len()).sum(),
                drafted,
                planned,
                explored: explored.map(|s| (s.root.seq, s.exploration)).collect(),
            };
            (step, stored)
        });
        self.controller = controller;
        self.width = width;
        let (drafted, stored) = drafted?;
        for (seq, sources) in stored {
            self.waiting.store(seq, sources);
        }
        if let Some(last) = self.steps.back_mut() {
            *last = drafted;
        }
        Ok(trees)
    }

    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let Some(limit) = self.config.measure_time_limit.take() else {
            return Ok(());
        };
        if self.cost_model.is_none() {
            let measured = measure(runner, self.sources, (clock, limit))?;
            tracing::info!(costs = ?measured, "measured pass costs");
            self.cost_model = measured.map(OnlineCostModel::new);
        }
        Ok(())
    }

    fn keep(&mut self, others: &[SeqId]) {
        self.others = others.to_vec();
    }

    fn expected_tokens(&self) -> Option<f64> {
        let last = self.steps.back()?;
        last.planned.as_ref().map(|planned| planned.planned_tokens)
    }

    fn observe(&mut self, results: &[TreeResult<'_>], times: StepTimes) {
        let Some(last) = self.steps.pop_front() else {
            return;
        };
        if let Some(cost_model) = &mut self.cost_model {
            cost_model.observe((last.rows, last.drafted), times);
        }
        for (seq, exploration) in &last.explored {
            let Some(result) = results.iter().find(|result| result.seq == *seq) else {
                continue;
            };
            let trust = self.trust.entry(*seq).or_default();
            trust.decay();
            exploration.compare(result.tokens, |candidate, hit| {
                self.calibration
                    .observe(candidate.by, candidate.figure, hit);
                trust.observe(candidate.by.sources, candidate.calibrated, hit);
            });
        }
        let took = times.draft + times.verify + times.commit;
        let step = last
            .planned
            .map(|planned| planned.measured(took.as_secs_f64()));
        let counts: Vec<(SeqId, usize)> = results
            .iter()
            .map(|result| (result.seq, result.tokens.len()))
            .collect();
        for (seq, tokens) in &counts {
            self.waiting.commit(*seq, *tokens);
        }
        self.controller.observe(step.as_ref(), &counts);
    }
}

impl MixedProposer {
    /// Drafts with the sources of each sequence's plan, and explores its tree.
    fn draft(
        &self,
        runner: &mut dyn Runner,
        sequences: &mut [SequenceDraft<'_>],
        (costs_now, width): (Option<StepCosts<'_>>, &mut DraftWidth),
    ) -> Result<DraftUse, DeviceError> {
        let mut drafted = DraftUse::default();
        let mut block: Vec<_> = sequences
            .iter_mut()
            .filter(|sequence| sequence.sources.contains(DraftSource::Block))
            .collect();
        if !block.is_empty() {
            let deepest = block.iter().map(|s| s.root.max_depth).max();
            let info = runner.info();
            let narrow = width.begin(info.narrow_draft, block.len());
            let depth = narrow.map_or(DraftSource::Block.depth(info), |narrow| narrow.depth);
            let depth = depth.min(deepest.unwrap_or(0));
            let items: Vec<DraftItem> = block
                .iter()
                .map(|sequence| DraftItem {
                    seq: sequence.root.seq,
                    root: sequence.root.token(),
                })
                .collect();
            let candidates = runner.draft(&items, depth, self.config.candidates.max(1))?;
            for (sequence, candidates) in block.iter_mut().zip(&candidates) {
                let tempered = with_temperature(candidates, self.config.temperature);
                sequence.drafts.block = Some(tempered);
                sequence.exploration = sequence.explore(&self.calibration);
            }
            for sequence in &block {
                drafted.add_waiting(DraftSource::Block, sequence.waiting);
            }
            drafted.block = narrow.map_or(block.len(), |narrow| narrow.blocks(block.len()));
        }
        let mut mtp: Vec<_> = sequences
            .iter_mut()
            .filter(|sequence| sequence.sources.contains(DraftSource::Mtp))
            .collect();
        if !mtp.is_empty() {
            drafted.mtp = mtp.len();
            for sequence in &mtp {
                drafted.add_waiting(DraftSource::Mtp, sequence.waiting);
            }
            let info = runner.info();
            let limits = HeadLimits {
                max_depth: DraftSource::Mtp.depth(info),
                max_rows: info.mtp.map_or(0, |mtp| mtp.max_rows),
                candidates: self.config.candidates.clamp(1, info.vocab),
                temperature: self.config.temperature,
            };
            let least_gain = |sequence: &SequenceDraft<'_>| {
                costs_now.map_or(0.0, |now| {
                    // At the tree's own speed-up, a second is worth so many more tokens.
                    let seconds = now.costs.draft(DraftSource::Mtp, drafted.mtp);
                    let seconds = seconds / drafted.mtp as f64;
                    let rate = now.speedup_of(sequence.exploration.reached());
                    rate * seconds / now.seconds_per_token()
                })
            };
            let explore = |sequence: &SequenceDraft<'_>| sequence.explore(&self.calibration);
            drafted.mtp_depths = grow(runner, &mut mtp, limits, &explore, &least_gain)?;
        }
        Ok(drafted)
    }
}

#[cfg(test)]
mod tests {
    use conformance::fake::{FakeDraft, FakeRunner, FakeSpec};
    use contract::{Limits, NarrowDraft, TokenId};

    use super::*;
    use crate::speculation::costs::CostTable;

    /// The costs of drafts of `n` sequences, in whole blocks, and the depths of their trees.
    fn drafts_of(n: usize, narrow: NarrowDraft) -> Vec<(usize, usize)> {
        let spec = FakeSpec {
            draft: Some(FakeDraft {
                depth: 15,
                acceptance_rate: 1.0,
            }),
            limits: Limits {
                sequences: n,
                ..FakeSpec::default().limits
            },
            ..FakeSpec::default()
        };
        let mut runner = FakeRunner::new(spec).with_narrow_draft(narrow);
        // Rows beyond some dozens are dear, and so are whole drafts of many sequences.
        let verify = vec![
            (1, 6e-3),
            (8, 6.1e-3),
            (24, 6.5e-3),
            (40, 8e-3),
            (64, 16e-3),
        ];
        let draft = vec![(1, 1e-3), (2, 1.1e-3), (4, 2e-3), (8, 4e-3)];
        let costs = CostTable::new(verify);
        let costs = costs.and_then(|costs| costs.with_draft(DraftSource::Block, draft));
        let config = SpeculationConfig {
            costs,
            ..SpeculationConfig::default()
        };
        let mut proposer = MixedProposer::new(config, SourceSet::of(&[DraftSource::Block]));
        let history = [3, 1, 4].map(TokenId);
        let seqs: Vec<SeqId> = (0..n).map(|_| runner.open(64).unwrap()).collect();
        for seq in &seqs {
            runner.prefill(*seq, &history[..2], &[]).unwrap();
        }
        let request = |seq: &SeqId| TreeRequest {
            seq: *seq,
            history: &history,
            max_depth: 40,
            forced: &[],
            speculate: true,
            surprisal: 0.1,
        };
        let requests: Vec<TreeRequest<'_>> = seqs.iter().map(request).collect();
        let mut step = || {
            let trees = proposer.propose(&mut runner, &requests).unwrap();
            let blocks = proposer.steps.back().map_or(0, |step| step.drafted.block);
            // Every drafted token is the next one.
            let tokens = trees.iter().map(|proposed| proposed.tree.tokens().to_vec());
            let tokens: Vec<Vec<TokenId>> = tokens.collect();
            let results = seqs.iter().zip(&tokens);
            let results = results.map(|(seq, tokens)| TreeResult {
                seq: *seq,
                tokens: &tokens[1..],
            });
            proposer.observe(&results.collect::<Vec<_>>(), StepTimes::default());
            let depths = trees.iter().flat_map(|proposed| proposed.tree.depths());
            (blocks, usize::from(depths.max().copied().unwrap_or(0)))
        };
        (0..40).map(|_| step()).filter(|step| step.0 > 0).collect()
    }

    #[test]
    fn many_sequences_draft_in_narrow_passes_and_look_further_at_times() {
        let narrow = NarrowDraft {
            depth: 7,
            per_block: 2,
        };
        let eight = drafts_of(8, narrow);
        let (whole, halved) = (8, 4);
        let is_narrow = |step: &&(usize, usize)| step.0 == halved && step.1 <= narrow.depth;
        let n_narrow = eight.iter().filter(is_narrow).count();
        let n_whole = eight.iter().filter(|step| step.0 == whole).count();
        assert!(n_narrow > 8 * n_whole && n_whole > 1, "{eight:?}");
        assert_eq!(n_narrow + n_whole, eight.len(), "{eight:?}");
        let one = drafts_of(1, narrow);
        assert!(one.iter().all(|step| step.0 == 1) && one.iter().any(|step| step.1 > 7));
    }
}
