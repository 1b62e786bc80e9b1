//! Whether drafting has been worth its time, sequence by sequence, and when to try again.
//!
//! A round is worth what it gave against what plain decoding would have given in the same time. Where that
//! stays below one, drafting rests for a number of rounds that doubles with every failed trial.

use std::collections::HashMap;

use contract::SeqId;

use crate::tree_build::TreeResult;

/// What a drafted round was expected to cost and bring.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// Seconds, draft included.
    pub(crate) seconds: f64,
    /// Seconds of a plain round of the same sequences.
    pub(crate) plain: f64,
    /// Each sequence with the drafted tokens promised to it and the tokens that were certain.
    pub(crate) members: Vec<(SeqId, f64, usize)>,
}

/// How much older rounds count against the newest.
const FADE: f64 = 0.75;
/// Rounds of the first rest.
const REST: u32 = 8;
/// Rounds that give less than this share of their time in plain tokens are followed by a long rest.
const POOR: f64 = 0.6;
/// The most failed trials that make a rest longer: 256 rounds.
const MOST_FAILURES: u32 = 6;
/// Failed trials in a row, over all sequences, after which a new one begins with a rest.
const WARY: u32 = 3;

/// What is remembered of one sequence.
#[derive(Debug, Clone, Copy)]
struct Habit {
    /// Faded sums of promised and of kept drafted tokens.
    promised: f64,
    kept: f64,
    /// Faded sums of what rounds gave in plain rounds' time, and of the rounds.
    worth: f64,
    rounds: f64,
    failures: u32,
    rest: u32,
}

/// What is remembered of all sequences that speak.
#[derive(Debug, Default)]
pub(crate) struct Habits {
    all: HashMap<SeqId, Habit>,
    /// Failed trials since one succeeded, whosever.
    failures: u32,
}

impl Habits {
    /// Forgets sequences that no longer speak, and meets new ones.
    pub(crate) fn keep(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        self.all.retain(|seq, _| seqs.clone().any(|s| s == *seq));
        let wary = self.failures >= WARY;
        for seq in seqs {
            self.all.entry(seq).or_insert(Habit {
                promised: 1.0,
                kept: 1.0,
                worth: 0.0,
                rounds: 0.0,
                failures: if wary { self.failures.min(4) } else { 0 },
                rest: if wary { 2 * REST } else { 0 },
            });
        }
    }

    /// Whether a sequence sits this round out.
    pub(crate) fn rests(&mut self, seq: SeqId) -> bool {
        match self.all.get_mut(&seq) {
            Some(habit) if habit.rest > 0 => {
                habit.rest -= 1;
                true
            }
            _ => false,
        }
    }

    /// How far the draft's figures have come true.
    pub(crate) fn trust(&self, seq: SeqId) -> f64 {
        let habit = self.all.get(&seq);
        habit.map_or(1.0, |h| (h.kept / h.promised).clamp(0.2, 1.5))
    }

    /// Takes in what a round brought.
    pub(crate) fn learn(&mut self, round: &Round, results: &[TreeResult]) {
        for (seq, promised, certain) in &round.members {
            let result = results.iter().find(|result| result.seq == *seq);
            let (Some(result), Some(habit)) = (result, self.all.get_mut(seq)) else {
                continue;
            };
            let kept = result.tokens.saturating_sub(*certain) as f64;
            habit.promised = habit.promised * FADE + promised;
            habit.kept = habit.kept * FADE + kept;
            let plain = result.tokens as f64 * round.plain / round.seconds;
            habit.worth = habit.worth * FADE + plain;
            habit.rounds = habit.rounds * FADE + 1.0;
            if habit.worth >= habit.rounds {
                habit.failures = 0;
                self.failures = 0;
                continue;
            }
            // One poor round among good ones is no reason; a poor mean is.
            habit.failures = (habit.failures + 1).min(MOST_FAILURES);
            self.failures = self.failures.saturating_add(1);
            // What was far from its time is not worth looking at again soon.
            let poor = habit.worth < POOR * habit.rounds;
            let first = if poor { 8 * REST } else { REST };
            habit.rest = (first << (habit.failures - 1)).min(REST << (MOST_FAILURES - 1));
            // The next trial stands for itself.
            (habit.worth, habit.rounds) = (0.0, 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQ: SeqId = SeqId(1);

    /// Rounds that were drafted of `n`, when a drafted round costs `cost` plain ones and gives `tokens`.
    fn drafted(n: usize, cost: f64, tokens: usize) -> usize {
        let mut habits = Habits::default();
        let mut count = 0;
        for _ in 0..n {
            habits.keep([SEQ].into_iter());
            if habits.rests(SEQ) {
                continue;
            }
            count += 1;
            let round = Round {
                seconds: cost,
                plain: 1.0,
                members: vec![(SEQ, 2.0, 1)],
            };
            habits.learn(&round, &[TreeResult { seq: SEQ, tokens }]);
        }
        count
    }

    #[test]
    fn what_pays_is_never_interrupted_and_what_does_not_is_tried_ever_less() {
        assert_eq!(drafted(500, 2.0, 4), 500);
        assert_eq!(drafted(500, 2.0, 1), 4);
        assert_eq!(drafted(500, 1.5, 1), 6);
    }

    #[test]
    fn a_new_text_after_many_failures_begins_plainly() {
        let mut habits = Habits {
            failures: WARY,
            ..Habits::default()
        };
        habits.keep([SEQ].into_iter());
        assert!(habits.rests(SEQ));
        habits.keep([].into_iter());
        assert!(habits.all.is_empty());
    }

    #[test]
    fn figures_that_do_not_come_true_are_trusted_less() {
        let mut habits = Habits::default();
        habits.keep([SEQ].into_iter());
        for _ in 0..20 {
            let round = Round {
                seconds: 1.0,
                plain: 1.0,
                members: vec![(SEQ, 4.0, 1)],
            };
            habits.learn(
                &round,
                &[TreeResult {
                    seq: SEQ,
                    tokens: 3,
                }],
            );
        }
        assert!(
            (habits.trust(SEQ) - 0.5).abs() < 0.1,
            "{}",
            habits.trust(SEQ)
        );
    }
}
