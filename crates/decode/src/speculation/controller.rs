//! Whether drafting is speedup its time for a sequence now, and how much may be risked to find out.
//!
//! A step is speedup what it gave against what plain decoding would have given in the same time. What is expected
//! goes by how sure the target is of its text ([`crate::doubt`]), by how such texts have fared, and by how this one
//! has. What was risked and lost is accepted in a regret_budget: a sequence drafts only from what it has, it begins with little,
//! earns a small share of its time, and gets back what drafting gains. So over any texts whatever, drafting loses at
//! max_sequences [`REGRET_RATE`] of the time of plain decoding and what the purses began with.

use std::collections::HashMap;

use contract::SeqId;

use super::costs::CostTable;
use super::tree_source::TreeResult;

/// What a new sequence may lose before it has earned anything, in plain steps.
pub(crate) const INITIAL_BUDGET: f64 = 5.0;
/// The share of the time of plain decoding that may be lost on and on.
pub(crate) const REGRET_RATE: f64 = 0.015;
/// The max_sequences that a sequence keeps, in plain steps.
const MAX_BUDGET: f64 = 8.0;
/// Purses of new sequences that are in the common shared_budget at the start, for each sequence that speaks at once.
pub(crate) const SHARED_BUDGETS: f64 = 2.0;
/// How much older steps count against the newest.
const DECAY: f64 = 0.9;
/// What a sequence's own steps are weighed against, in steps.
const PRIOR_STEPS: f64 = 0.5;
/// The steps in which the draft's figures are thought to have come true, against which a sequence's own are weighed: how
/// much of a chain is accepted is mostly luck, and sizes that followed each step's would wander.
const CALIBRATION_PRIOR: f64 = 2.0;
/// What all steps of texts with buckets surprisal are weighed against, in steps, and how many are remembered.
const BUCKET_PRIOR: (f64, f64) = (8.0, 64.0);
/// What a step must promise, in tokens of plain decoding in its time: the promise is a guess.
const MIN_EXPECTED_SPEEDUP: f64 = 1.1;
/// Rounds before a sequence that expects_gain too little is tried all the same, from a full regret_budget; they double with
/// every trial in vain.
const RETRY_AFTER: u32 = 64;
/// The same where a trial costs little: at max_sequences so many tokens of plain decoding. The first one is then at once.
const CHEAP_TRIAL: (f64, u32) = (0.5, 8);
/// The max_sequences failed_trials that make the wait longer.
const MAX_BACKOFF: u32 = 6;
/// Doubts that are told apart end at these, in nats.
const SURPRISAL_BUCKETS: [f64; 7] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// What a step costs that is about to be planned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepCosts<'a> {
    /// Costs of passes.
    pub(crate) costs: &'a CostTable,
    /// Sequences that take part.
    pub(crate) sequences: usize,
    /// Nodes that are verified in any case.
    pub(crate) certain: usize,
}

impl StepCosts<'_> {
    /// Seconds of a token of plain decoding.
    pub(crate) fn token(self) -> f64 {
        self.costs.verify(self.sequences) / self.sequences.max(1) as f64
    }

    /// What a sequence adds with `nodes` drafted ones, if the others do buckets, in seconds.
    fn extra(self, nodes: usize) -> f64 {
        let all = self.sequences.max(1);
        let rows = self.certain.max(all);
        let verify = self.costs.verify(rows + all * nodes) - self.costs.verify(rows);
        (self.costs.draft(all) + verify) / all as f64
    }

    /// What drafting is speedup if each further token comes true with `chance`, with up to `max_sequences` nodes.
    fn speedup(self, chance: f64, max_nodes: usize) -> f64 {
        let (mut tokens, mut reached) = (1.0, 1.0);
        let mut best = 0.0_f64;
        for nodes in 1..=max_nodes {
            reached *= chance;
            tokens += reached;
            best = best.max(tokens / (1.0 + self.extra(nodes) / self.token()));
        }
        best
    }
}

/// The chance that a drafted token comes true where the target's surprisal is this. The curve is that of the bundled
/// pair over code, chat, tools and sources; what steps bring corrects it.
fn chance(surprisal: f64) -> f64 {
    1.0 - (0.6 * surprisal.powf(0.27)).clamp(0.05, 0.7)
}

/// What a sequence may draft now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Allowance {
    /// DraftModelSource nodes at max_sequences.
    pub(crate) nodes: usize,
    /// What drafting was expected to be speedup.
    expected: f64,
    /// Which texts it was likened to.
    bucket: usize,
}

/// What a drafted step was expected to cost and bring.
#[derive(Debug, Clone)]
pub(crate) struct DraftedStep {
    /// Seconds of a token of plain decoding.
    pub(crate) token: f64,
    /// Seconds beyond those of plain decoding: as they turned out, all participants together.
    pub(crate) extra: f64,
    pub(crate) participants: Vec<Participant>,
}

/// One sequence of a drafted step.
#[derive(Debug, Clone)]
pub(crate) struct Participant {
    pub(crate) seq: SeqId,
    pub(crate) allowance: Allowance,
    /// Tokens that the draft's figures predicted.
    pub(crate) predicted: f64,
    /// Tokens that were certain.
    pub(crate) certain: usize,
    /// Its share of what the step took beyond plain decoding.
    pub(crate) share: f64,
}

/// What is remembered of one sequence.
#[derive(Debug, Clone, Copy)]
struct ParticipantState {
    /// Faded sums of predicted and of accepted drafted tokens, and of the steps they are of.
    predicted: f64,
    accepted: f64,
    steps: f64,
    /// Faded sums of what steps were speedup, and were expected to be.
    speedup: f64,
    expected: f64,
    /// What may be lost, in plain steps.
    regret_budget: f64,
    /// Rounds since drafting was last tried against its promise, and how often that was in vain.
    steps_since_trial: u32,
    failed_trials: u32,
}

/// What is remembered of all sequences that speak, and of those that spoke.
#[derive(Debug)]
pub(crate) struct SpeculationController {
    all: HashMap<SeqId, ParticipantState>,
    /// What new sequences begin with, in plain steps.
    shared_budget: f64,
    /// The max_sequences sequences that spoke at once.
    max_sequences: usize,
    /// Per bucket: sums of what steps were speedup, and were expected to be.
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
    /// Forgets sequences that no longer speak, and meets new ones.
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

    /// What a sequence may draft in this step, at max_sequences `max_sequences` nodes of up to `deepest`; `None` where it had better
    /// not.
    pub(crate) fn allow(
        &mut self,
        (seq, surprisal): (SeqId, f64),
        (max_nodes, deepest): (usize, usize),
        costs_now: StepCosts<'_>,
    ) -> Option<Allowance> {
        let state = self.all.get_mut(&seq)?;
        state.steps_since_trial = state.steps_since_trial.saturating_add(1);
        let regret_budget = state.regret_budget * costs_now.token();
        let nodes = (0..=max_nodes)
            .rev()
            .find(|n| costs_now.extra(*n) <= regret_budget)?;
        let bucket = SURPRISAL_BUCKETS.partition_point(|bucket| *bucket <= surprisal);
        let (speedup, expected) = self.buckets[bucket];
        let expected =
            costs_now.speedup(chance(surprisal), nodes.min(deepest)) * speedup / expected;
        let own = (PRIOR_STEPS + state.speedup) / (PRIOR_STEPS + state.expected);
        let expects_gain = expected * own >= MIN_EXPECTED_SPEEDUP;
        let may_try = if costs_now.extra(1) <= CHEAP_TRIAL.0 * costs_now.token() {
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

    /// How far the draft's figures have come true.
    pub(crate) fn calibration(&self, seq: SeqId) -> f64 {
        let state = self.all.get(&seq);
        let weighed = |h: &ParticipantState| {
            let came_true = h.accepted / h.predicted;
            (came_true * h.steps + CALIBRATION_PRIOR) / (h.steps + CALIBRATION_PRIOR)
        };
        state.map_or(1.0, |h| weighed(h).clamp(0.2, 1.5))
    }

    /// Takes in what a step brought, `step` being what was drafted in it, if anything was.
    pub(crate) fn learn(&mut self, step: Option<&DraftedStep>, results: &[TreeResult]) {
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
            let accepted = result.tokens.saturating_sub(participant.certain) as f64;
            state.predicted = state.predicted * DECAY + participant.predicted;
            state.accepted = state.accepted * DECAY + accepted;
            state.steps = state.steps * DECAY + 1.0;
            // In tokens of plain decoding.
            let took = step.extra * participant.share / step.token;
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

    /// The trust in a draft that predicted seven tokens a step and accepted these.
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
                certain: 1,
                share: 1.0,
            };
            let step = DraftedStep {
                token: 5.0,
                extra: 2.0,
                participants: vec![participant],
            };
            let tokens = 1 + accepted;
            controller.learn(Some(&step), &[TreeResult { seq, tokens }]);
        }
        controller.calibration(seq)
    }

    #[test]
    fn calibration_moves_little_after_one_bad_step_and_far_after_many() {
        assert!((trust(&[]) - 1.0).abs() < 1e-9);
        assert!(trust(&[0]) > 0.65 && trust(&[0, 0]) > 0.5);
        assert!(trust(&[0; 12]) < 0.3 && trust(&[1; 40]) < 0.4);
        assert!((trust(&[7; 12]) - 1.0).abs() < 0.05 && trust(&[15; 12]) > 1.45);
        // A chain is accepted for as long as luck will have it.
        let mixed = [1, 15, 3, 9, 0, 12, 6, 15, 2, 8];
        assert!((0.8..1.2).contains(&trust(&mixed)), "{}", trust(&mixed));
    }
}
