//! The online cost model: the measured table, corrected by the times of recent steps.

use std::time::Duration;

use crate::stats::StepTimes;

use super::table::{CostTable, DraftUse};

/// The cost table corrected by recent steps. It was measured at a short context, and contexts and
/// load change.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OnlineCostModel {
    measured: CostTable,
    now: CostTable,
}

impl OnlineCostModel {
    /// The table as measured.
    pub(crate) fn new(measured: CostTable) -> OnlineCostModel {
        OnlineCostModel {
            now: measured.clone(),
            measured,
        }
    }

    /// The current table.
    pub(crate) fn now(&self) -> &CostTable {
        &self.now
    }

    /// Observes a step of `rows` nodes and of these drafts. Zero times are ignored.
    pub(crate) fn observe(&mut self, (rows, drafted): (usize, DraftUse), times: StepTimes) {
        /// Weight of one step; some steps are disturbed.
        const EMA_WEIGHT: f64 = 0.2;
        /// Exponent of the correction for sizes more than a factor of two away. It is an exponent,
        /// not a factor, so that noise that cancels leaves no trace.
        const FAR_EXPONENT: f64 = 0.25;
        /// Share by which each step returns other sizes to the measured shape at the current speed.
        /// Without it a slow period would never be forgotten.
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
        // A step's drafts are timed together, so the sources that drafted share a deviation.
        let expected = self.now.drafts(drafted);
        let deviation = deviation(times.draft, expected).filter(|_| expected > 0.0);
        let has_drafted = [drafted.block > 0, drafted.mtp > 0, false];
        let drafts = self.now.drafts.iter_mut().zip(&self.measured.drafts);
        for ((now, measured), has_drafted) in drafts.zip(has_drafted) {
            match deviation.filter(|_| has_drafted) {
                Some(deviation) => {
                    for (_, seconds) in now {
                        *seconds *= 1.0 + EMA_WEIGHT * deviation;
                    }
                }
                None => now.iter_mut().zip(measured).for_each(fade),
            }
        }
    }
}
