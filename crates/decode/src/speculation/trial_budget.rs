//! The budget from which drafts may lose against plain decoding.
//!
//! One budget serves all sequences and lives as long as the engine, in plain steps. It starts with
//! a few, so that a new server finds a draft that pays, and earns a small share of the time of
//! sequences that have not gained by drafting. A sequence pays a loss by its own gains first, then
//! by what earlier sequences of the same plan and bucket put aside, then from the budget. What it
//! took from the budget, it returns as soon as it gains.
//!
//! Invariant: what sequences took and did not return is at most the initial budget and its
//! earnings. So all replies together lose at most `initial + rate * plain steps` against plain
//! decoding, and gains of one plan or bucket pay for no losses of another. Only the last step may
//! exceed it, by the time that it took beyond its plan. With an empty budget, a new sequence drafts
//! only where earlier ones have gained, or decodes plainly.

/// Share of a gain that is put aside for later sequences of the same plan and bucket.
const PUT_ASIDE: f64 = 0.1;
/// The most that is put aside for a plan and bucket, in plain steps.
const MAX_PUT_ASIDE: f64 = 5.0;
/// The most gains of a sequence that pay its later losses, in plain steps.
const MAX_GAIN: f64 = 8.0;
/// Part of the budget that must be there for a trial against expectation.
const PATIENT: f64 = 0.75;

/// The engine's budget, in plain steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrialBudget {
    /// Its greatest balance per concurrent sequence, with which it also starts.
    initial: f64,
    /// What it earns per plain step.
    rate: f64,
    capacity: f64,
    balance: f64,
}

impl TrialBudget {
    pub(super) const fn new(initial: f64, rate: f64) -> TrialBudget {
        TrialBudget {
            initial,
            rate,
            capacity: 0.0,
            balance: 0.0,
        }
    }

    /// Grows by the share of `new` more concurrent sequences.
    pub(super) fn grow(&mut self, new: usize) {
        self.capacity += self.initial * new as f64;
        self.balance += self.initial * new as f64;
    }

    /// What may be lost now.
    pub(super) fn available(&self) -> f64 {
        self.balance.max(0.0)
    }

    /// Whether it can afford a trial against expectation.
    pub(super) fn is_ample(&self) -> bool {
        self.balance >= PATIENT * self.capacity
    }

    /// Earns its share of `steps` plain steps.
    pub(super) fn earn(&mut self, steps: usize) {
        self.add(self.rate * steps as f64);
    }

    fn add(&mut self, steps: f64) {
        self.balance = (self.balance + steps).min(self.capacity);
    }
}

/// What a sequence has gained and lost against plain decoding, in plain steps.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SequenceAccount {
    /// Gains that have not paid a loss yet.
    gained: f64,
    /// What it took from the budget.
    taken: f64,
}

impl SequenceAccount {
    /// Whether it has gained by drafting.
    pub(super) fn is_ahead(&self) -> bool {
        self.gained > 0.0
    }

    /// What a step of `sequences` may lose on this one.
    pub(super) fn may_lose(&self, budget: &TrialBudget, aside: f64, sequences: usize) -> f64 {
        self.gained + (aside + budget.available()) / sequences.max(1) as f64
    }

    /// Enters a step's gain, or its loss if it is negative. `aside` is what is put aside for the
    /// plan and bucket.
    pub(super) fn settle(&mut self, gain: f64, budget: &mut TrialBudget, aside: &mut f64) {
        if gain >= 0.0 {
            let returned = gain.min(self.taken);
            self.taken -= returned;
            budget.add(returned);
            let gain = gain - returned;
            *aside = (*aside + PUT_ASIDE * gain).min(MAX_PUT_ASIDE);
            self.gained = (self.gained + (1.0 - PUT_ASIDE) * gain).min(MAX_GAIN);
            return;
        }
        let mut loss = -gain;
        for source in [&mut self.gained, aside] {
            let paid = loss.min(*source);
            *source -= paid;
            loss -= paid;
        }
        self.taken += loss;
        budget.balance -= loss;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever sequences gain and lose within what they may, the losses are at most the
        /// initial budget and its earnings.
        #[test]
        fn losses_never_exceed_the_initial_budget_and_its_earnings(
            replies in prop::collection::vec(
                prop::collection::vec((1..4_usize, -1.0..2.0_f64), 1..20), 1..40),
        ) {
            let (initial, rate) = (5.0, 0.01);
            let mut budget = TrialBudget::new(initial, rate);
            budget.grow(1);
            let (mut aside, mut net, mut steps) = (0.0, 0.0, 0);
            for reply in replies {
                let mut account = SequenceAccount::default();
                for (tokens, gain) in reply {
                    if !account.is_ahead() {
                        budget.earn(tokens);
                    }
                    steps += tokens;
                    let may_lose = account.may_lose(&budget, aside, 1);
                    let gain = if gain < 0.0 { gain * may_lose } else { gain };
                    account.settle(gain, &mut budget, &mut aside);
                    net += gain;
                    let least = -(initial + rate * steps as f64) - 1e-9;
                    prop_assert!(net >= least, "{} of {}", net, least);
                    prop_assert!(budget.balance >= -1e-9 && budget.balance <= budget.capacity);
                }
            }
        }
    }

    #[test]
    fn gains_return_what_was_taken_and_pay_later_losses() {
        let mut budget = TrialBudget::new(5.0, 0.01);
        budget.grow(1);
        let (mut one, mut aside) = (SequenceAccount::default(), 0.0);
        one.settle(-3.0, &mut budget, &mut aside);
        assert_eq!((budget.available(), one.is_ahead()), (2.0, false));
        assert!(!budget.is_ample());
        one.settle(5.0, &mut budget, &mut aside);
        assert_eq!((budget.available(), one.is_ahead()), (5.0, true));
        one.settle(-1.0, &mut budget, &mut aside);
        assert_eq!(budget.available(), 5.0);
        // A later sequence of the same plan and bucket has what was put aside, another has not.
        assert!((aside - 0.2).abs() < 1e-9, "{aside}");
        let other = SequenceAccount::default();
        assert!((other.may_lose(&budget, aside, 1) - 5.2).abs() < 1e-9);
        assert_eq!(other.may_lose(&budget, 0.0, 2), 2.5);
    }
}
