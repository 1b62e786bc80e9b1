//! The speculation controller: whether drafting pays for a sequence now, and how much may be risked
//! to find out.
//!
//! A step's speed-up is its tokens against those of plain decoding in the same time. Its
//! expectation comes from the target's surprisal ([`crate::speculation`]), corrected by the steps
//! of texts in the same bucket and of this sequence.
//!
//! Losses are bounded by a regret budget. A sequence drafts only within its budget, starts with
//! little, earns a small share of its time, and regains what drafting gains. So over any texts,
//! drafting loses at most [`REGRET_RATE`] of the time of plain decoding plus the initial budgets.

use std::collections::HashMap;

use contract::SeqId;

use super::costs::CostTable;
use super::tree_proposer::TreeResult;

/// Regret budget of a new sequence, in plain steps.
pub(crate) const INITIAL_BUDGET: f64 = 5.0;
/// Share of plain decoding time that may be lost in the long run.
pub(crate) const REGRET_RATE: f64 = 0.015;
/// Largest regret budget, in plain steps.
const MAX_BUDGET: f64 = 8.0;
/// Initial budgets in the shared budget, per concurrently decoding sequence.
pub(crate) const SHARED_BUDGETS: f64 = 2.0;
/// Decay of older steps, per step.
const DECAY: f64 = 0.9;
/// Weight of the prior against a sequence's own steps, in steps.
const PRIOR_STEPS: f64 = 0.5;
/// Weight of the prior that the draft's probabilities are right, in steps. How much of a chain is
/// accepted is mostly luck, and sizes that followed each step would fluctuate.
const CALIBRATION_PRIOR: f64 = 2.0;
/// Weight of a surprisal bucket's prior, in steps, and the number of steps it remembers.
const BUCKET_PRIOR: (f64, f64) = (8.0, 64.0);
/// Minimum expected speed-up to draft, since the expectation is a guess.
const MIN_EXPECTED_SPEEDUP: f64 = 1.1;
/// Steps until a sequence with too little expected speed-up is tried anyway, with a full budget.
/// Doubles with every failed trial.
const RETRY_AFTER: u32 = 64;
/// The same for cheap trials, of at most so many plain tokens. The first is immediate.
const CHEAP_TRIAL: (f64, u32) = (0.5, 8);
/// Maximum number of failed trials that lengthen the wait.
const MAX_BACKOFF: u32 = 6;
/// Upper bounds of the surprisal buckets, in nats.
const SURPRISAL_BUCKETS: [f64; 7] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// The costs of the step being planned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepCosts<'a> {
    /// Costs of passes.
    pub(crate) costs: &'a CostTable,
    /// Sequences in the step.
    pub(crate) sequences: usize,
    /// Roots and forced tokens, which are verified in any case.
    pub(crate) base_nodes: usize,
}

impl StepCosts<'_> {
    /// Seconds per token of plain decoding.
    pub(crate) fn seconds_per_token(self) -> f64 {
        self.costs.verify(self.sequences) / self.sequences.max(1) as f64
    }

    /// Seconds that a sequence adds with `nodes` drafted nodes, if the others do the same.
    fn overhead(self, nodes: usize) -> f64 {
        let all = self.sequences.max(1);
        let rows = self.base_nodes.max(all);
        let verify = self.costs.verify(rows + all * nodes) - self.costs.verify(rows);
        (self.costs.draft(all) + verify) / all as f64
    }

    /// Expected speed-up with up to `max_nodes` nodes, if each further token is accepted with
    /// `probability`.
    fn speedup(self, probability: f64, max_nodes: usize) -> f64 {
        let (mut tokens, mut reached) = (1.0, 1.0);
        let mut best = 0.0_f64;
        for nodes in 1..=max_nodes {
            reached *= probability;
            tokens += reached;
            best = best.max(tokens / (1.0 + self.overhead(nodes) / self.seconds_per_token()));
        }
        best
    }
}

/// Probability that a drafted token is accepted at this surprisal. The curve was fitted on the
/// bundled pair over code, chat, tools and sources. Observed steps correct it.
fn acceptance_probability(surprisal: f64) -> f64 {
    1.0 - (0.6 * surprisal.powf(0.27)).clamp(0.05, 0.7)
}

/// What a sequence may draft now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Allowance {
    /// Maximum number of drafted nodes.
    pub(crate) nodes: usize,
    /// The expected speed-up.
    expected: f64,
    /// The surprisal bucket.
    bucket: usize,
}

/// A drafted step, with its expected cost and gain.
#[derive(Debug, Clone)]
pub(crate) struct DraftedStep {
    /// Seconds per token of plain decoding.
    pub(crate) seconds_per_token: f64,
    /// Seconds beyond plain decoding, as measured, over all participants.
    pub(crate) overhead_seconds: f64,
    pub(crate) participants: Vec<Participant>,
}

/// One sequence of a drafted step.
#[derive(Debug, Clone)]
pub(crate) struct Participant {
    pub(crate) seq: SeqId,
    pub(crate) allowance: Allowance,
    /// Accepted tokens predicted by the draft's probabilities.
    pub(crate) predicted: f64,
    /// The root and forced tokens, which need no acceptance.
    pub(crate) base_nodes: usize,
    /// Its share of the time beyond plain decoding.
    pub(crate) share: f64,
}

/// The record of one sequence.
#[derive(Debug, Clone, Copy)]
struct ParticipantState {
    /// Decayed sums: predicted and accepted tokens, and their steps.
    predicted: f64,
    accepted: f64,
    steps: f64,
    /// Decayed sums: measured and expected speed-ups.
    speedup: f64,
    expected: f64,
    /// Regret budget, in plain steps.
    regret_budget: f64,
    /// Steps since the last trial against expectation, and the number of failed trials.
    steps_since_trial: u32,
    failed_trials: u32,
}

/// The records of all decoding sequences, and of surprisal buckets.
#[derive(Debug)]
pub(crate) struct SpeculationController {
    all: HashMap<SeqId, ParticipantState>,
    /// Budget for new sequences, in plain steps.
    shared_budget: f64,
    /// Maximum number of concurrent sequences so far.
    max_sequences: usize,
    /// Per bucket: sums of measured and expected speed-ups.
    buckets: [(f64, f64); SURPRISAL_BUCKETS.len() + 1],
}

impl Default for SpeculationController {
    fn default() -> SpeculationController {
        SpeculationController {
            all: HashMap::new(),
            shared_budget: 0.0,
            max_sequences: 0,
            buckets: [(BUCKET_PRIOR.0, BUCKET_PRIOR.0); SURPRISAL_BUCKETS.len() + 1],
        }
    }
}

impl SpeculationController {
    /// Drops sequences that ended and adds new ones.
    pub(crate) fn sync_sequences(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        let SpeculationController {
            all,
            shared_budget,
            max_sequences,
            ..
        } = self;
        let n = seqs.clone().count();
        if n > *max_sequences {
            *shared_budget += SHARED_BUDGETS * INITIAL_BUDGET * (n - *max_sequences) as f64;
            *max_sequences = n;
        }
        all.retain(|seq, state| {
            let stays = seqs.clone().any(|s| s == *seq);
            if !stays {
                *shared_budget += state.regret_budget.min(INITIAL_BUDGET);
            }
            stays
        });
        *shared_budget = shared_budget.min(SHARED_BUDGETS * INITIAL_BUDGET * *max_sequences as f64);
        for seq in seqs {
            all.entry(seq).or_insert_with(|| {
                let regret_budget = shared_budget.clamp(0.0, INITIAL_BUDGET);
                *shared_budget -= regret_budget;
                ParticipantState {
                    predicted: 1.0,
                    accepted: 1.0,
                    steps: 0.0,
                    speedup: 0.0,
                    expected: 0.0,
                    regret_budget,
                    steps_since_trial: 0,
                    failed_trials: 0,
                }
            });
        }
    }

    /// The allowance of a sequence for this step, with at most `max_nodes` nodes down to `deepest`;
    /// `None` if it should not draft.
    pub(crate) fn allow(
        &mut self,
        (seq, surprisal): (SeqId, f64),
        (max_nodes, deepest): (usize, usize),
        costs_now: StepCosts<'_>,
    ) -> Option<Allowance> {
        let state = self.all.get_mut(&seq)?;
        state.steps_since_trial = state.steps_since_trial.saturating_add(1);
        let regret_budget = state.regret_budget * costs_now.seconds_per_token();
        let nodes = (0..=max_nodes)
            .rev()
            .find(|n| costs_now.overhead(*n) <= regret_budget)?;
        let bucket = SURPRISAL_BUCKETS.partition_point(|bucket| *bucket <= surprisal);
        let (speedup, expected) = self.buckets[bucket];
        let expected = costs_now.speedup(acceptance_probability(surprisal), nodes.min(deepest))
            * speedup
            / expected;
        let own = (PRIOR_STEPS + state.speedup) / (PRIOR_STEPS + state.expected);
        let expects_gain = expected * own >= MIN_EXPECTED_SPEEDUP;
        let may_try = if costs_now.overhead(1) <= CHEAP_TRIAL.0 * costs_now.seconds_per_token() {
            state.failed_trials == 0
                || state.steps_since_trial >= CHEAP_TRIAL.1 << state.failed_trials
        } else {
            state.regret_budget >= MAX_BUDGET
                && state.steps_since_trial >= RETRY_AFTER << state.failed_trials
        };
        if !expects_gain && !may_try {
            return None;
        }
        if !expects_gain {
            state.steps_since_trial = 0;
            state.failed_trials = (state.failed_trials + 1).min(MAX_BACKOFF);
        }
        Some(Allowance {
            nodes,
            expected,
            bucket,
        })
    }

    /// Ratio of accepted to predicted tokens.
    pub(crate) fn calibration(&self, seq: SeqId) -> f64 {
        let state = self.all.get(&seq);
        let weighted = |state: &ParticipantState| {
            let ratio = state.accepted / state.predicted;
            (ratio * state.steps + CALIBRATION_PRIOR) / (state.steps + CALIBRATION_PRIOR)
        };
        state.map_or(1.0, |state| weighted(state).clamp(0.2, 1.5))
    }

    /// Records a step's results; `step` is what was drafted, if anything was.
    pub(crate) fn observe(&mut self, step: Option<&DraftedStep>, results: &[TreeResult]) {
        for result in results {
            if let Some(state) = self.all.get_mut(&result.seq) {
                state.regret_budget =
                    (state.regret_budget + REGRET_RATE * result.tokens as f64).min(MAX_BUDGET);
            }
        }
        let participants = step.iter().flat_map(|step| &step.participants);
        for (step, participant) in step.iter().cycle().zip(participants) {
            let result = results.iter().find(|result| result.seq == participant.seq);
            let (Some(result), Some(state)) = (result, self.all.get_mut(&participant.seq)) else {
                continue;
            };
            let accepted = result.tokens.saturating_sub(participant.base_nodes) as f64;
            state.predicted = state.predicted * DECAY + participant.predicted;
            state.accepted = state.accepted * DECAY + accepted;
            state.steps = state.steps * DECAY + 1.0;
            // In tokens of plain decoding.
            let took = step.overhead_seconds * participant.share / step.seconds_per_token;
            state.regret_budget = (state.regret_budget + accepted - took).min(MAX_BUDGET);
            let speedup = (1.0 + accepted) / (1.0 + took);
            state.speedup = state.speedup * DECAY + speedup;
            state.expected = state.expected * DECAY + participant.allowance.expected;
            if speedup >= 1.0 {
                state.failed_trials = 0;
            }
            let buckets = &mut self.buckets[participant.allowance.bucket];
            *buckets = (
                buckets.0 + speedup,
                buckets.1 + participant.allowance.expected,
            );
            if buckets.1 > BUCKET_PRIOR.1 {
                *buckets = (buckets.0 / 2.0, buckets.1 / 2.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calibration after steps that predicted seven tokens and accepted these.
    fn trust(accepted: &[usize]) -> f64 {
        let seq = SeqId(3);
        let mut controller = SpeculationController::default();
        controller.sync_sequences([seq].into_iter());
        for accepted in accepted {
            let allowance = Allowance {
                nodes: 15,
                expected: 4.0,
                bucket: 0,
            };
            let participant = Participant {
                seq,
                allowance,
                predicted: 7.0,
                base_nodes: 1,
                share: 1.0,
            };
            let step = DraftedStep {
                seconds_per_token: 5.0,
                overhead_seconds: 2.0,
                participants: vec![participant],
            };
            let tokens = 1 + accepted;
            controller.observe(Some(&step), &[TreeResult { seq, tokens }]);
        }
        controller.calibration(seq)
    }

    #[test]
    fn calibration_moves_little_after_one_bad_step_and_far_after_many() {
        assert!((trust(&[]) - 1.0).abs() < 1e-9);
        assert!(trust(&[0]) > 0.65 && trust(&[0, 0]) > 0.5);
        assert!(trust(&[0; 12]) < 0.3 && trust(&[1; 40]) < 0.4);
        assert!((trust(&[7; 12]) - 1.0).abs() < 0.05 && trust(&[15; 12]) > 1.45);
        // The accepted length of a chain is mostly luck.
        let mixed = [1, 15, 3, 9, 0, 12, 6, 15, 2, 8];
        assert!((0.8..1.2).contains(&trust(&mixed)), "{}", trust(&mixed));
    }
}
