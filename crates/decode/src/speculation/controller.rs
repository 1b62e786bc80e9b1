//! The speculation controller: which sources draft for a sequence now, and how much may be risked
//! to find out.
//!
//! A plan is a set of sources whose drafts cost a pass. Suffix matches cost none, join every plan,
//! and form the plan without sources: their chances are known before a step, so their speed-up is
//! too. For the other plans it is expected from the target's surprisal ([`crate::speculation`]),
//! corrected by the steps of texts in the same bucket and of this sequence. The best plan drafts.
//!
//! Losses against plain decoding are bounded by one [`TrialBudget`] for all sequences: a sequence
//! drafts only within what it has gained, what is put aside for its plan and bucket, and that
//! budget. So over any texts, drafting loses at most [`TRIAL_SHARE`] of the time of plain decoding
//! plus the initial budget, however short the replies are. Suffix matches alone have a second
//! budget of the same kind, so that failed trials of the other sources do not stop them.
//!
//! Where a plan is not expected to pay, it is tried at growing intervals, counted over all
//! sequences of its bucket: a new sequence does not repeat the trials of earlier ones.
//!
//! Losses against the best plan are bounded likewise. Another plan is tried where the trial budget
//! covers what the trial is expected to lose; it earns [`TRIAL_RATE`] of the time.

use std::collections::HashMap;

use contract::SeqId;

use super::costs::CostTable;
use super::sources::SourceSet;
use super::trial_budget::{SequenceAccount, TrialBudget};

/// The initial trial budget of drafts that cost a pass, per concurrent sequence, in plain steps.
pub(crate) const INITIAL_BUDGET: f64 = 24.0;
/// Share of plain decoding time that these drafts may lose in the long run.
pub(crate) const TRIAL_SHARE: f64 = 0.008;
/// The same two of suffix matches alone.
pub(crate) const SUFFIX_TRIALS: (f64, f64) = (3.0, 0.006);
/// Decay of older steps, per step.
const DECAY: f64 = 0.9;
/// Weight of the prior against a sequence's own steps, in steps.
const PRIOR_STEPS: f64 = 1.0;
/// Decay and prior for the choice between plans. A step's tokens are mostly luck, and a choice that
/// followed each step would fluctuate.
const CHOICE_DECAY: f64 = 0.98;
/// Weight of a step's planned tokens beside its accepted ones in the choice between plans: planned
/// ones vary less, accepted ones are never biased.
const PLANNED_WEIGHT: f64 = 0.5;
const CHOICE_PRIOR: f64 = 6.0;
/// What the choice of a plan takes off for each further source: with equal promises, fewer draft.
const FURTHER_SOURCE: f64 = 0.95;
/// Weight of a bucket's prior, and the sum of speed-ups that it remembers.
const BUCKET_PRIOR: (f64, f64) = (8.0, 192.0);
/// Minimum expected speed-up to draft, since the expectation is a guess.
const MIN_EXPECTED_SPEEDUP: f64 = 1.1;
/// The same for suffix matches, whose chances are known.
const MIN_SUFFIX_SPEEDUP: f64 = 1.02;
/// Steps until a plan with too little expected speed-up is tried anyway, if the budget is ample.
/// Doubles with every failed trial.
const RETRY_AFTER: u32 = 128;
/// The same for cheap trials, of at most so many plain tokens.
const CHEAP_TRIAL: (f64, u32) = (0.5, 8);
/// Depth of a tree that, accepted as a whole, is followed by another trial at once.
const RETRY_DEPTH: usize = 3;
/// Maximum number of failed trials that lengthen the wait.
const MAX_BACKOFF: u32 = 6;
/// Share of the time that trials of worse plans may lose, and the largest budget of steps.
const TRIAL_RATE: f64 = 0.008;
const MAX_TRIAL_BUDGET: f64 = 3.0;
/// Steps between two trials of a plan where there is a better one. Doubles with every failed trial.
const TRIAL_AFTER: u32 = 12;
/// Upper bounds of the surprisal buckets, in nats.
const SURPRISAL_BUCKETS: [f64; 7] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];
/// Surprisal buckets, without and with a suffix match.
const BUCKETS: usize = 2 * (SURPRISAL_BUCKETS.len() + 1);

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
    fn verify_overhead(self, nodes: usize) -> f64 {
        let all = self.sequences.max(1);
        let rows = self.base_nodes.max(all);
        let verify = self.costs.verify(rows + all * nodes) - self.costs.verify(rows);
        verify / all as f64
    }

    /// The same with the drafts of a plan and the tokens that wait for them.
    fn overhead(self, plan: Plan, nodes: usize) -> f64 {
        let all = self.sequences.max(1);
        let draft = self.costs.usual_drafts(plan.sources, all, plan.deepest);
        draft / all as f64 + plan.waiting + self.verify_overhead(nodes)
    }

    /// Expected speed-up with up to `max_nodes` nodes of a plan, if each further token is accepted
    /// with `probability`. Tokens that wait are stored once, so they do not count.
    fn speedup(self, plan: Plan, probability: f64, max_nodes: usize) -> f64 {
        let plan = Plan {
            waiting: 0.0,
            ..plan
        };
        let (mut tokens, mut reached) = (1.0, 1.0);
        let mut best = 0.0_f64;
        for nodes in 1..=max_nodes {
            reached *= probability;
            tokens += reached;
            let overhead = self.overhead(plan, nodes) / self.seconds_per_token();
            best = best.max(tokens / (1.0 + overhead));
        }
        best
    }

    /// Speed-up with the best number of nodes that are accepted with these chances, without drafts.
    pub(crate) fn speedup_of(self, reached: impl Iterator<Item = f64>) -> f64 {
        let (mut tokens, mut best) = (1.0, 1.0_f64);
        for (i, chance) in reached.enumerate() {
            tokens += chance;
            let overhead = self.verify_overhead(i + 1) / self.seconds_per_token();
            best = best.max(tokens / (1.0 + overhead));
        }
        best
    }
}

/// Probability that a drafted token is accepted at this surprisal. The curve was fitted on the
/// bundled pair over code, chat, tools and sources. Observed steps correct it.
fn acceptance_probability(surprisal: f64) -> f64 {
    1.0 - (0.6 * surprisal.powf(0.27)).clamp(0.05, 0.7)
}

/// A set of sources that may draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Plan {
    pub(crate) sources: SourceSet,
    /// Maximum number of drafted tokens of a path.
    pub(crate) deepest: usize,
    /// Seconds to store the committed tokens that wait for its drafts.
    pub(crate) waiting: f64,
}

impl Plan {
    /// The factor of its expected speed-up in the choice between plans.
    fn margin(self) -> f64 {
        let further = self.sources.iter().count().saturating_sub(1);
        FURTHER_SOURCE.powi(further as i32)
    }
}

/// A sequence before a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Situation {
    pub(crate) seq: SeqId,
    /// Surprisal of its last tokens, in nats.
    pub(crate) surprisal: f64,
    /// Speed-up of suffix matches alone; 1.0 without any.
    pub(crate) suffix_speedup: f64,
    /// Maximum number of drafted nodes.
    pub(crate) max_nodes: usize,
}

/// What a sequence may draft now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Allowance {
    /// The sources that draft, besides suffix matches.
    pub(crate) sources: SourceSet,
    /// Maximum number of drafted nodes.
    pub(crate) nodes: usize,
    /// The speed-up by surprisal alone.
    prior: f64,
    /// The expected speed-up, before the sequence's own correction.
    expected: f64,
    /// The expected speed-up of the best other plan, which a trial has to reach.
    rival: f64,
    /// The bucket.
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
    /// The root and forced tokens, which need no acceptance.
    pub(crate) base_nodes: usize,
    /// Depth of its tree below the certain tokens.
    pub(crate) deepest: usize,
    /// Its share of the time beyond plain decoding.
    pub(crate) share: f64,
    /// Planned seconds of tokens that waited for its drafts. They are paid, but say nothing about
    /// the next step.
    pub(crate) waiting: f64,
    /// Tokens that its tree was expected to have accepted, by the calibrated chances.
    pub(crate) planned_tokens: f64,
}

/// Decayed sums of measured and of expected speed-ups.
#[derive(Debug, Clone, Copy, Default)]
struct Speedups {
    measured: f64,
    expected: f64,
}

impl Speedups {
    /// The correction of an expected speed-up, with a prior of some steps.
    fn ratio(self, prior: f64) -> f64 {
        (prior + self.measured) / (prior + self.expected)
    }

    fn observe(&mut self, decay: f64, measured: f64, expected: f64) {
        self.measured = self.measured * decay + measured;
        self.expected = self.expected * decay + expected;
    }
}

/// The trials of a plan against expectation.
#[derive(Debug, Clone, Copy, Default)]
struct TrialRecord {
    /// Steps since the last one, and the number of failed ones; 0 before the first.
    steps_since: u32,
    failed: u32,
}

impl TrialRecord {
    /// Whether `wait` steps have passed, doubled by each failure. The first trial is immediate.
    fn is_due(self, wait: u32) -> bool {
        self.failed == 0 || self.steps_since >= wait << self.failed
    }

    /// Begins a trial, which counts as failed until it succeeds.
    fn begin(&mut self) {
        self.steps_since = 0;
        self.failed = (self.failed + 1).min(MAX_BACKOFF);
    }
}

/// The record of a plan on one sequence.
#[derive(Debug, Clone, Copy, Default)]
struct PlanRecord {
    /// Recent steps, which decide whether to draft.
    recent: Speedups,
    /// More steps, which decide between plans.
    choice: Speedups,
    trials: TrialRecord,
    /// Whether its last tree was accepted to its full depth, so that a larger one may be better.
    was_whole: bool,
}

/// The record of one sequence.
#[derive(Debug, Clone, Copy)]
struct ParticipantState {
    plans: [PlanRecord; SourceSet::COUNT],
    /// Of drafts, and of suffix matches alone.
    accounts: [SequenceAccount; 2],
}

/// The record of a plan in a bucket, over all sequences.
#[derive(Debug, Clone, Copy)]
struct BucketRecord {
    /// Sums of measured and of expected speed-ups.
    speedups: (f64, f64),
    trials: TrialRecord,
    /// Gains put aside for losses, in plain steps.
    aside: f64,
}

/// Index of the budget of a plan.
fn budget_of(sources: SourceSet) -> usize {
    usize::from(sources.is_empty())
}

/// The records of all decoding sequences, and of surprisal buckets.
#[derive(Debug)]
pub(crate) struct SpeculationController {
    all: HashMap<SeqId, ParticipantState>,
    /// Of drafts, and of suffix matches alone.
    budgets: [TrialBudget; 2],
    /// Maximum number of concurrent sequences so far.
    max_sequences: usize,
    /// Per plan and bucket.
    buckets: [[BucketRecord; BUCKETS]; SourceSet::COUNT],
    /// Budget for trials of worse plans, in steps.
    trial_budget: f64,
    /// A fixed choice, whatever it gains or loses.
    #[cfg(test)]
    pub(super) forced: Option<SourceSet>,
}

impl Default for SpeculationController {
    fn default() -> SpeculationController {
        let none = BucketRecord {
            speedups: (BUCKET_PRIOR.0, BUCKET_PRIOR.0),
            trials: TrialRecord::default(),
            aside: 0.0,
        };
        SpeculationController {
            all: HashMap::new(),
            budgets: [
                TrialBudget::new(INITIAL_BUDGET, TRIAL_SHARE),
                TrialBudget::new(SUFFIX_TRIALS.0, SUFFIX_TRIALS.1),
            ],
            max_sequences: 0,
            buckets: [[none; BUCKETS]; SourceSet::COUNT],
            trial_budget: MAX_TRIAL_BUDGET,
            #[cfg(test)]
            forced: None,
        }
    }
}

/// A plan with what is expected of it.
#[derive(Debug, Clone, Copy)]
struct Forecast {
    allowance: Allowance,
    /// The expected speed-up with the sequence's own correction by recent steps.
    value: f64,
    /// The same by more steps, for the choice between plans.
    choice: f64,
    /// What a step takes beyond plain decoding, in plain steps.
    overhead: f64,
}

impl Forecast {
    /// Whether one source drafts. Where none is known to pay, more are not tried together.
    fn is_single(&self) -> bool {
        self.allowance.sources.iter().count() == 1
    }
}

impl SpeculationController {
    /// Drops sequences that ended and adds new ones.
    pub(crate) fn sync_sequences(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        let n = seqs.clone().count();
        let new = n.saturating_sub(self.max_sequences);
        self.max_sequences += new;
        self.budgets.iter_mut().for_each(|budget| budget.grow(new));
        self.all
            .retain(|seq, _| seqs.clone().any(|other| other == *seq));
        for seq in seqs {
            self.all.entry(seq).or_insert_with(|| ParticipantState {
                plans: [PlanRecord::default(); SourceSet::COUNT],
                accounts: [SequenceAccount::default(); 2],
            });
        }
    }

    /// The allowance of a sequence for this step with one of `plans` or suffix matches alone;
    /// `None` if it should not draft.
    pub(crate) fn allow(
        &mut self,
        now: Situation,
        plans: &[Plan],
        costs_now: StepCosts<'_>,
    ) -> Option<Allowance> {
        let state = self.all.get_mut(&now.seq)?;
        let has_match = usize::from(now.suffix_speedup >= MIN_SUFFIX_SPEEDUP);
        let surprisal = SURPRISAL_BUCKETS.partition_point(|bucket| *bucket <= now.surprisal);
        let bucket = 2 * surprisal + has_match;
        let (accounts, budgets, buckets) = (state.accounts, self.budgets, &self.buckets);
        let affordable = |plan: Plan| {
            let of = budget_of(plan.sources);
            let aside = buckets[plan.sources.index()][bucket].aside;
            let steps = accounts[of].may_lose(&budgets[of], aside, costs_now.sequences);
            let seconds = steps * costs_now.seconds_per_token();
            let mut nodes = (0..=now.max_nodes).rev();
            nodes.find(|n| costs_now.overhead(plan, *n) <= seconds)
        };
        let none = Plan {
            sources: SourceSet::NONE,
            deepest: 0,
            waiting: 0.0,
        };
        let suffix = affordable(none)
            .filter(|nodes| *nodes > 0 && has_match > 0)
            .map(|nodes| Allowance {
                sources: SourceSet::NONE,
                nodes,
                prior: now.suffix_speedup,
                expected: now.suffix_speedup,
                rival: 1.0,
                bucket,
            });
        let base = if suffix.is_some() {
            now.suffix_speedup
        } else {
            1.0
        };
        let mut best: Option<Forecast> = None;
        let mut forecasts = Vec::with_capacity(plans.len());
        for plan in plans {
            let record = &mut state.plans[plan.sources.index()];
            record.trials.steps_since = record.trials.steps_since.saturating_add(1);
            let Some(nodes) = affordable(*plan) else {
                continue;
            };
            let (speedup, expected) = buckets[plan.sources.index()][bucket].speedups;
            let probability = acceptance_probability(now.surprisal);
            let prior = costs_now.speedup(*plan, probability, nodes.min(plan.deepest));
            let expected = prior * speedup / expected;
            let forecast = Forecast {
                allowance: Allowance {
                    sources: plan.sources,
                    nodes,
                    prior,
                    expected,
                    rival: 1.0,
                    bucket,
                },
                value: expected * record.recent.ratio(PRIOR_STEPS),
                choice: expected * record.choice.ratio(CHOICE_PRIOR) * plan.margin(),
                overhead: costs_now.overhead(*plan, 1) / costs_now.seconds_per_token(),
            };
            forecasts.push(forecast);
            if best.is_none_or(|best| forecast.choice > best.choice) {
                best = Some(forecast);
            }
        }
        for plan in plans {
            let trials = &mut self.buckets[plan.sources.index()][bucket].trials;
            trials.steps_since = trials.steps_since.saturating_add(1);
        }
        let best = best.filter(|best| best.value >= MIN_EXPECTED_SPEEDUP && best.choice > base);
        let chosen = best.map(|best| best.allowance).or(suffix);
        let trial = match best {
            None if base < MIN_EXPECTED_SPEEDUP => {
                let may_try = |forecast: &&Forecast| {
                    let sources = forecast.allowance.sources.index();
                    let (of, shared) = (&state.plans[sources], &self.buckets[sources][bucket]);
                    forecast.is_single()
                        && (of.was_whole
                            || is_due(forecast, (of.trials, shared.trials), self.budgets[0]))
                };
                let all = forecasts.iter().filter(may_try);
                all.max_by(|a, b| a.value.total_cmp(&b.value)).copied()
            }
            None => None,
            Some(best) => {
                let loss = |forecast: &Forecast| {
                    (1.0 - forecast.choice / best.choice).max(0.1) * (1.0 + forecast.overhead)
                };
                let next = forecasts.iter().filter(|forecast| {
                    let sources = forecast.allowance.sources.index();
                    let (own, shared) = (
                        state.plans[sources].trials,
                        self.buckets[sources][bucket].trials,
                    );
                    // On a new sequence, earlier ones of the bucket count.
                    let by = if own.failed == 0 && shared.steps_since > own.steps_since {
                        shared
                    } else {
                        own
                    };
                    forecast.allowance.sources != best.allowance.sources
                        && by.steps_since >= TRIAL_AFTER << by.failed
                });
                let next = next.max_by(|a, b| a.choice.total_cmp(&b.choice)).copied();
                let next = next.filter(|next| loss(next) <= self.trial_budget);
                if let Some(next) = &next {
                    self.trial_budget -= loss(next);
                }
                next
            }
        };
        #[cfg(test)]
        if let Some(forced) = self.forced {
            let plan = plans.iter().find(|plan| plan.sources == forced);
            return plan.map(|plan| Allowance {
                sources: plan.sources,
                nodes: now.max_nodes,
                prior: 1.0,
                expected: 1.0,
                rival: 1.0,
                bucket,
            });
        }
        let Some(trial) = trial else {
            return chosen;
        };
        let sources = trial.allowance.sources.index();
        state.plans[sources].trials.begin();
        self.buckets[sources][bucket].trials.begin();
        Some(Allowance {
            rival: best.map_or(1.0, |best| best.choice),
            ..trial.allowance
        })
    }

    /// Records a step's results; `step` is what was drafted, if anything was. A result is a
    /// sequence and its number of tokens.
    pub(crate) fn observe(&mut self, step: Option<&DraftedStep>, results: &[(SeqId, usize)]) {
        for (seq, tokens) in results {
            if let Some(state) = self.all.get(seq) {
                let accounts = state.accounts.iter().zip(&mut self.budgets);
                for (_, budget) in accounts.filter(|(account, _)| !account.is_ahead()) {
                    budget.earn(*tokens);
                }
            }
            self.trial_budget = (self.trial_budget + TRIAL_RATE).min(MAX_TRIAL_BUDGET);
        }
        let participants = step.iter().flat_map(|step| &step.participants);
        for (step, participant) in step.iter().cycle().zip(participants) {
            let result = results.iter().find(|result| result.0 == participant.seq);
            let (Some(result), Some(state)) = (result, self.all.get_mut(&participant.seq)) else {
                continue;
            };
            let accepted = result.1.saturating_sub(participant.base_nodes) as f64;
            // In tokens of plain decoding.
            let seconds = step.overhead_seconds * participant.share;
            let took = seconds / step.seconds_per_token;
            let usual = (seconds - participant.waiting).max(0.0) / step.seconds_per_token;
            let speedup = (1.0 + accepted) / (1.0 + usual);
            let likely = accepted + PLANNED_WEIGHT * (participant.planned_tokens - accepted);
            let likely_speedup = (1.0 + likely) / (1.0 + usual);
            let Allowance {
                sources,
                prior,
                expected,
                bucket,
                ..
            } = participant.allowance;
            let of = budget_of(sources);
            let shared = &mut self.buckets[sources.index()][bucket];
            let budget = &mut self.budgets[of];
            state.accounts[of].settle(accepted - took, budget, &mut shared.aside);
            let record = &mut state.plans[sources.index()];
            record.recent.observe(DECAY, speedup, expected);
            record
                .choice
                .observe(CHOICE_DECAY, likely_speedup, expected);
            let is_whole = participant.deepest > 0 && accepted >= participant.deepest as f64;
            if speedup >= participant.allowance.rival || is_whole {
                record.trials.failed = 0;
                shared.trials.failed = 0;
            }
            record.was_whole = is_whole && participant.deepest >= RETRY_DEPTH;
            let sums = &mut shared.speedups;
            *sums = (sums.0 + likely_speedup, sums.1 + prior);
            if sums.1 > BUCKET_PRIOR.1 {
                *sums = (sums.0 / 2.0, sums.1 / 2.0);
            }
        }
    }
}

/// Whether a trial against expectation, in place of plain decoding, is due for a plan by its record
/// on the sequence and by that of its bucket.
fn is_due(
    forecast: &Forecast,
    (own, shared): (TrialRecord, TrialRecord),
    budget: TrialBudget,
) -> bool {
    if forecast.overhead <= CHEAP_TRIAL.0 {
        own.is_due(CHEAP_TRIAL.1) && shared.is_due(CHEAP_TRIAL.1)
    } else {
        budget.is_ample() && own.is_due(RETRY_AFTER) && shared.is_due(RETRY_AFTER)
    }
}
