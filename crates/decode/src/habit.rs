//! Whether drafting is worth its time for a sequence now, and how much may be risked to find out.
//!
//! A round is worth what it gave against what plain decoding would have given in the same time. What is expected
//! goes by how sure the target is of its text ([`crate::doubt`]), by how such texts have fared, and by how this one
//! has. What was risked and lost is kept in a purse: a sequence drafts only from what it has, it begins with little,
//! earns a small share of its time, and gets back what drafting gains. So over any texts whatever, drafting loses at
//! most [`EARNED`] of the time of plain decoding and what the purses began with.

use std::collections::HashMap;

use contract::SeqId;

use crate::costs::CostTable;
use crate::tree_build::TreeResult;

/// What a new sequence may lose before it has earned anything, in plain rounds.
pub(crate) const FIRST: f64 = 5.0;
/// The share of the time of plain decoding that may be lost on and on.
pub(crate) const EARNED: f64 = 0.015;
/// The most that a sequence keeps, in plain rounds.
const FULL: f64 = 8.0;
/// Purses of new sequences that are in the common chest at the start, for each sequence that speaks at once.
pub(crate) const PURSES: f64 = 2.0;
/// How much older rounds count against the newest.
const FADE: f64 = 0.9;
/// What a sequence's own rounds are weighed against, in rounds.
const OWN: f64 = 0.5;
/// The rounds in which the draft's figures are thought to have come true, against which a sequence's own are weighed: how
/// much of a chain is kept is mostly luck, and sizes that followed each round's would wander.
const BELIEVED: f64 = 2.0;
/// What all rounds of texts with alike doubt are weighed against, in rounds, and how many are remembered.
const ALIKE: (f64, f64) = (8.0, 64.0);
/// What a round must promise, in tokens of plain decoding in its time: the promise is a guess.
const WORTH: f64 = 1.1;
/// Rounds before a sequence that promises too little is tried all the same, from a full purse; they double with
/// every trial in vain.
const WAIT: u32 = 64;
/// The same where a trial costs little: at most so many tokens of plain decoding. The first one is then at once.
const CHEAP: (f64, u32) = (0.5, 8);
/// The most trials that make the wait longer.
const MOST_TRIALS: u32 = 6;
/// Doubts that are told apart end at these, in nats.
const MARKS: [f64; 7] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// What a round costs that is about to be planned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stage<'a> {
    /// Costs of passes.
    pub(crate) costs: &'a CostTable,
    /// Sequences that take part.
    pub(crate) sequences: usize,
    /// Nodes that are verified in any case.
    pub(crate) certain: usize,
}

impl Stage<'_> {
    /// Seconds of a token of plain decoding.
    pub(crate) fn token(self) -> f64 {
        self.costs.verify(self.sequences) / self.sequences.max(1) as f64
    }

    /// What a sequence adds with `nodes` drafted ones, if the others do alike, in seconds.
    fn extra(self, nodes: usize) -> f64 {
        let all = self.sequences.max(1);
        let rows = self.certain.max(all);
        let verify = self.costs.verify(rows + all * nodes) - self.costs.verify(rows);
        (self.costs.draft(all) + verify) / all as f64
    }

    /// What drafting is worth if each further token comes true with `chance`, with up to `most` nodes.
    fn worth(self, chance: f64, most: usize) -> f64 {
        let (mut tokens, mut reached) = (1.0, 1.0);
        let mut best = 0.0_f64;
        for nodes in 1..=most {
            reached *= chance;
            tokens += reached;
            best = best.max(tokens / (1.0 + self.extra(nodes) / self.token()));
        }
        best
    }
}

/// The chance that a drafted token comes true where the target's doubt is this. The curve is that of the bundled
/// pair over code, chat, tools and sources; what rounds bring corrects it.
fn chance(doubt: f64) -> f64 {
    1.0 - (0.6 * doubt.powf(0.27)).clamp(0.05, 0.7)
}

/// What a sequence may draft now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bid {
    /// Drafted nodes at most.
    pub(crate) nodes: usize,
    /// What drafting was expected to be worth.
    expected: f64,
    /// Which texts it was likened to.
    mark: usize,
}

/// What a drafted round was expected to cost and bring.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// Seconds of a token of plain decoding.
    pub(crate) token: f64,
    /// Seconds beyond those of plain decoding: as they turned out, all members together.
    pub(crate) extra: f64,
    pub(crate) members: Vec<Member>,
}

/// One sequence of a drafted round.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) seq: SeqId,
    pub(crate) bid: Bid,
    /// Tokens that the draft's figures promised.
    pub(crate) promised: f64,
    /// Tokens that were certain.
    pub(crate) certain: usize,
    /// Its share of what the round took beyond plain decoding.
    pub(crate) share: f64,
}

/// What is remembered of one sequence.
#[derive(Debug, Clone, Copy)]
struct Habit {
    /// Faded sums of promised and of kept drafted tokens, and of the rounds they are of.
    promised: f64,
    kept: f64,
    rounds: f64,
    /// Faded sums of what rounds were worth, and were expected to be.
    worth: f64,
    expected: f64,
    /// What may be lost, in plain rounds.
    purse: f64,
    /// Rounds since drafting was last tried against its promise, and how often that was in vain.
    waited: u32,
    trials: u32,
}

/// What is remembered of all sequences that speak, and of those that spoke.
#[derive(Debug)]
pub(crate) struct Habits {
    all: HashMap<SeqId, Habit>,
    /// What new sequences begin with, in plain rounds.
    chest: f64,
    /// The most sequences that spoke at once.
    most: usize,
    /// Per mark: sums of what rounds were worth, and were expected to be.
    alike: [(f64, f64); MARKS.len() + 1],
}

impl Default for Habits {
    fn default() -> Habits {
        Habits {
            all: HashMap::new(),
            chest: 0.0,
            most: 0,
            alike: [(ALIKE.0, ALIKE.0); MARKS.len() + 1],
        }
    }
}

impl Habits {
    /// Forgets sequences that no longer speak, and meets new ones.
    pub(crate) fn keep(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        let Habits {
            all, chest, most, ..
        } = self;
        let n = seqs.clone().count();
        if n > *most {
            *chest += PURSES * FIRST * (n - *most) as f64;
            *most = n;
        }
        all.retain(|seq, habit| {
            let stays = seqs.clone().any(|s| s == *seq);
            if !stays {
                *chest += habit.purse.min(FIRST);
            }
            stays
        });
        *chest = chest.min(PURSES * FIRST * *most as f64);
        for seq in seqs {
            all.entry(seq).or_insert_with(|| {
                let purse = chest.clamp(0.0, FIRST);
                *chest -= purse;
                Habit {
                    promised: 1.0,
                    kept: 1.0,
                    rounds: 0.0,
                    worth: 0.0,
                    expected: 0.0,
                    purse,
                    waited: 0,
                    trials: 0,
                }
            });
        }
    }

    /// What a sequence may draft in this round, at most `most` nodes of up to `deepest`; `None` where it had better
    /// not.
    pub(crate) fn bid(
        &mut self,
        (seq, doubt): (SeqId, f64),
        (most, deepest): (usize, usize),
        stage: Stage<'_>,
    ) -> Option<Bid> {
        let habit = self.all.get_mut(&seq)?;
        habit.waited = habit.waited.saturating_add(1);
        let purse = habit.purse * stage.token();
        let nodes = (0..=most).rev().find(|n| stage.extra(*n) <= purse)?;
        let mark = MARKS.partition_point(|mark| *mark <= doubt);
        let (worth, expected) = self.alike[mark];
        let expected = stage.worth(chance(doubt), nodes.min(deepest)) * worth / expected;
        let own = (OWN + habit.worth) / (OWN + habit.expected);
        let promises = expected * own >= WORTH;
        let tries = match stage.extra(1) <= CHEAP.0 * stage.token() {
            true => habit.trials == 0 || habit.waited >= CHEAP.1 << habit.trials,
            false => habit.purse >= FULL && habit.waited >= WAIT << habit.trials,
        };
        if !promises && !tries {
            return None;
        }
        if !promises {
            habit.waited = 0;
            habit.trials = (habit.trials + 1).min(MOST_TRIALS);
        }
        Some(Bid {
            nodes,
            expected,
            mark,
        })
    }

    /// How far the draft's figures have come true.
    pub(crate) fn trust(&self, seq: SeqId) -> f64 {
        let habit = self.all.get(&seq);
        let weighed = |h: &Habit| {
            let came_true = h.kept / h.promised;
            (came_true * h.rounds + BELIEVED) / (h.rounds + BELIEVED)
        };
        habit.map_or(1.0, |h| weighed(h).clamp(0.2, 1.5))
    }

    /// Takes in what a round brought, `round` being what was drafted in it, if anything was.
    pub(crate) fn learn(&mut self, round: Option<&Round>, results: &[TreeResult]) {
        for result in results {
            if let Some(habit) = self.all.get_mut(&result.seq) {
                habit.purse = (habit.purse + EARNED * result.tokens as f64).min(FULL);
            }
        }
        let members = round.iter().flat_map(|round| &round.members);
        for (round, member) in round.iter().cycle().zip(members) {
            let result = results.iter().find(|result| result.seq == member.seq);
            let (Some(result), Some(habit)) = (result, self.all.get_mut(&member.seq)) else {
                continue;
            };
            let kept = result.tokens.saturating_sub(member.certain) as f64;
            habit.promised = habit.promised * FADE + member.promised;
            habit.kept = habit.kept * FADE + kept;
            habit.rounds = habit.rounds * FADE + 1.0;
            // In tokens of plain decoding.
            let took = round.extra * member.share / round.token;
            habit.purse = (habit.purse + kept - took).min(FULL);
            let worth = (1.0 + kept) / (1.0 + took);
            habit.worth = habit.worth * FADE + worth;
            habit.expected = habit.expected * FADE + member.bid.expected;
            if worth >= 1.0 {
                habit.trials = 0;
            }
            let alike = &mut self.alike[member.bid.mark];
            *alike = (alike.0 + worth, alike.1 + member.bid.expected);
            if alike.1 > ALIKE.1 {
                *alike = (alike.0 / 2.0, alike.1 / 2.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The trust in a draft that promised seven tokens a round and kept these.
    fn trust(kept: &[usize]) -> f64 {
        let seq = SeqId(3);
        let mut habits = Habits::default();
        habits.keep([seq].into_iter());
        for kept in kept {
            let bid = Bid {
                nodes: 15,
                expected: 4.0,
                mark: 0,
            };
            let member = Member {
                seq,
                bid,
                promised: 7.0,
                certain: 1,
                share: 1.0,
            };
            let round = Round {
                token: 5.0,
                extra: 2.0,
                members: vec![member],
            };
            let tokens = 1 + kept;
            habits.learn(Some(&round), &[TreeResult { seq, tokens }]);
        }
        habits.trust(seq)
    }

    #[test]
    fn one_unlucky_round_says_little_and_many_say_much() {
        assert!((trust(&[]) - 1.0).abs() < 1e-9);
        assert!(trust(&[0]) > 0.65 && trust(&[0, 0]) > 0.5);
        assert!(trust(&[0; 12]) < 0.3 && trust(&[1; 40]) < 0.4);
        assert!((trust(&[7; 12]) - 1.0).abs() < 0.05 && trust(&[15; 12]) > 1.45);
        // A chain is kept for as long as luck will have it.
        let mixed = [1, 15, 3, 9, 0, 12, 6, 15, 2, 8];
        assert!((0.8..1.2).contains(&trust(&mixed)), "{}", trust(&mixed));
    }
}
