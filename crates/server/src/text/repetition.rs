//! Detection of repeated text, which a model may produce after its reasoning was cut.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use contract::TokenId;

/// Period lengths in tokens; shorter periods are lists and tables.
const PERIODS: RangeInclusive<usize> = 12..=80;

/// Recent tokens, and per period the number of tokens that equal the one a period earlier.
#[derive(Debug, Clone)]
pub struct RepetitionDetector {
    last: VecDeque<TokenId>,
    agreeing: Vec<usize>,
}

impl Default for RepetitionDetector {
    fn default() -> RepetitionDetector {
        RepetitionDetector {
            last: VecDeque::with_capacity(*PERIODS.end() + 1),
            agreeing: vec![0; PERIODS.count()],
        }
    }
}

impl RepetitionDetector {
    /// Adds a token; true if a period has now occurred twice in a row.
    pub fn repeats(&mut self, token: TokenId) -> bool {
        let mut closes = false;
        for (period, agreeing) in PERIODS.zip(&mut self.agreeing) {
            let before = self.last.len().checked_sub(period).map(|at| self.last[at]);
            *agreeing = if before == Some(token) {
                *agreeing + 1
            } else {
                0
            };
            closes |= *agreeing >= period;
        }
        self.last.push_back(token);
        if self.last.len() > *PERIODS.end() {
            self.last.pop_front();
        }
        closes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Index at which repetition is detected, if it is.
    fn noticed(ids: impl IntoIterator<Item = u32>) -> Option<usize> {
        let mut repetition = RepetitionDetector::default();
        ids.into_iter()
            .position(|id| repetition.repeats(TokenId(id)))
    }

    #[test]
    fn repetition_is_detected_at_the_last_token_of_the_second_period() {
        for period in [12, 13, 40, 80] {
            let text = (1000..1030).chain((0..period).cycle().take(500));
            assert_eq!(
                noticed(text),
                Some(30 + 2 * period as usize - 1),
                "{period}"
            );
        }
    }

    #[test]
    fn short_long_and_inexact_periods_are_not_repetition() {
        assert_eq!(noticed((0..81).cycle().take(161)), None);
        assert_eq!(noticed((0..11).cycle().take(22)), None);
        let near = (0..20).chain(0..19).chain([99]).chain(0..19);
        assert_eq!(noticed(near), None);
    }
}
