//! The online cost model: the measured table, corrected by the times of recent steps.

use std::time::Duration;

use crate::stats::StepTimes;

use super::table::CostTable;

/// The table as rounds go now: it was measured after few tokens, contexts grow, and machines have other work.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OnlineCostModel {
    measured: CostTable,
    now: CostTable,
}

impl OnlineCostModel {
    /// As measured.
    pub(crate) fn new(measured: CostTable) -> OnlineCostModel {
        OnlineCostModel {
            now: measured.clone(),
            measured,
        }
    }

    /// The table as rounds go now.
    pub(crate) fn now(&self) -> &CostTable {
        &self.now
    }

    /// Takes in a round of `rows` nodes and of drafts for `drafted` sequences. Times of a clock that stands still
    /// say nothing.
    pub(crate) fn learn(&mut self, (rows, drafted): (usize, usize), times: StepTimes) {
        /// What one round counts; most are alike, and some are disturbed.
        const EMA_WEIGHT: f64 = 0.2;
        /// With which power a number of rows that is less than half or more than twice its own goes along. A power, and
        /// not a share of each step: what noise adds and takes away again must leave nothing behind.
        const FAR_EXPONENT: f64 = 0.25;
        /// How much of what is thought of other passes each round forgets, in favour of what was measured at first
        /// and the speed of now. What a busy hour has taught would else never be found out to be over.
        const FORGET_RATE: f64 = 1.0 / 256.0;
        let deviation = |took: Duration, expected: f64| {
            let deviation = took.as_secs_f64() / expected;
            (deviation > 0.0).then(|| deviation.clamp(0.5, 2.0) - 1.0)
        };
        let Some(verified) = deviation(times.verify + times.commit, self.now.verify(rows)) else {
            return;
        };
        let factor = 1.0 + EMA_WEIGHT * verified;
        let is_near = |size: usize| size <= 2 * rows && rows <= 2 * size;
        for (size, seconds) in &mut self.now.verify {
            *seconds *= factor.powf(if is_near(*size) { 1.0 } else { FAR_EXPONENT });
        }
        let speed = self.now.verify(rows) / self.measured.verify(rows);
        let fade = |(now, first): (&mut (usize, f64), &(usize, f64))| {
            now.1 *= (first.1 * speed / now.1).powf(FORGET_RATE);
        };
        let sizes = self.now.verify.iter_mut().zip(&self.measured.verify);
        sizes.filter(|(now, _)| !is_near(now.0)).for_each(fade);
        match deviation(times.draft, self.now.draft(drafted)).filter(|_| drafted > 0) {
            Some(deviation) => {
                for (_, seconds) in &mut self.now.draft {
                    *seconds *= 1.0 + EMA_WEIGHT * deviation;
                }
            }
            None => {
                let drafts = self.now.draft.iter_mut();
                drafts.zip(&self.measured.draft).for_each(fade);
            }
        }
    }
}
