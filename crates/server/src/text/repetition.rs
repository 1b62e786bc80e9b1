//! Noticing a text that says the same over and over: what a model may fall into when its thought was cut off.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use contract::TokenId;

/// Lengths of a stretch that counts when it comes twice in a row. Shorter ones are lists and tables.
const PERIODS: RangeInclusive<usize> = 12..=80;

/// The last tokens, and for each period how many of them agree with those a period before.
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
    /// Takes the next token, and says whether with it a stretch has come twice in a row.
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

    /// Where it is noticed, if it is.
    fn noticed(ids: impl IntoIterator<Item = u32>) -> Option<usize> {
        let mut repetition = RepetitionDetector::default();
        ids.into_iter()
            .position(|id| repetition.repeats(TokenId(id)))
    }

    #[test]
    fn the_second_time_round_is_noticed_at_its_last_token() {
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
    fn short_rounds_long_ones_and_near_misses_are_none() {
        assert_eq!(noticed((0..81).cycle().take(161)), None);
        assert_eq!(noticed((0..11).cycle().take(22)), None);
        let near = (0..20).chain(0..19).chain([99]).chain(0..19);
        assert_eq!(noticed(near), None);
    }
}
