//! Whether decoding sequences step together, or in two groups in turn.
//!
//! In turn, a step drafts for one group and begins its verify, then finishes that of the other
//! group: on several devices, one group is drafted or in the lower stages while the other is
//! verified. Passes of half of the sequences cost more than half, so both ways are timed, by the
//! number of sequences, and the one with more tokens per second is taken. Tokens are the expected
//! ones where those are known, since accepted ones vary.

use std::collections::BTreeMap;
use std::time::Duration;

use contract::StepGroups;

/// Steps of each sequence that are timed at once.
const WINDOW: u32 = 8;
/// The slower way is timed again after so many steps, and twice as many each time that it stays
/// the slower one.
const RETRIAL: u32 = 256;
/// Limit of the doubling.
const MAX_RETRIAL: u32 = 1 << 13;
/// Two groups are taken if they are faster by this factor.
const MARGIN: f64 = 1.02;
/// Weight of a new window in the average rate.
const NEW: f64 = 0.5;

/// The choice between both ways.
#[derive(Debug)]
pub(super) struct Alternation {
    groups: StepGroups,
    /// What both ways have yielded, by the number of sequences.
    measured: BTreeMap<usize, Rates>,
    window: Option<Window>,
}

#[derive(Debug)]
struct Rates {
    /// Tokens per second together and in turn.
    ways: [Option<f64>; 2],
    /// Timed steps since the slower way was timed.
    steps: u32,
    /// Steps until it is timed again.
    wait: u32,
}

impl Rates {
    fn in_turn_is_faster(&self) -> Option<bool> {
        let [together, in_turn] = self.ways;
        Some(in_turn? > MARGIN * together?)
    }
}

/// Steps that are being timed.
#[derive(Debug)]
struct Window {
    sequences: usize,
    in_turn: bool,
    /// Steps that are not counted: the first may fill the devices, and the first ones of a way
    /// find the device unprepared for their shapes.
    skips: u32,
    /// The end of the last of these.
    since: Duration,
    steps: u32,
    tokens: f64,
}

impl Alternation {
    /// A choice with nothing timed; only steps together where the runner cannot begin a verify.
    pub(super) fn new(groups: StepGroups, begins_verify: bool) -> Alternation {
        Alternation {
            groups: if begins_verify {
                groups
            } else {
                StepGroups::One
            },
            measured: BTreeMap::new(),
            window: None,
        }
    }

    /// Whether the next step of so many sequences is one of two groups in turn.
    pub(super) fn chooses(&mut self, sequences: usize) -> bool {
        if sequences < 2 {
            return false;
        }
        match self.groups {
            StepGroups::One => return false,
            StepGroups::Two => return true,
            StepGroups::Measured => {}
        }
        if let Some(window) = self.window.as_ref().filter(|w| w.sequences == sequences) {
            return window.in_turn;
        }
        let rates = self.measured.entry(sequences).or_insert(Rates {
            ways: [None; 2],
            steps: 0,
            wait: RETRIAL,
        });
        let in_turn = match rates.in_turn_is_faster() {
            Some(faster) => faster != (rates.steps >= rates.wait),
            None => rates.ways[0].is_some(),
        };
        let is_first = rates.ways[usize::from(in_turn)].is_none();
        self.window = Some(Window {
            sequences,
            in_turn,
            skips: if is_first { steps_of(in_turn) } else { 1 },
            since: Duration::ZERO,
            steps: 0,
            tokens: 0.0,
        });
        in_turn
    }

    /// Notes the end of a step of all sequences together, or of one of two groups.
    pub(super) fn note(&mut self, in_turn: bool, tokens: f64, now: Duration) {
        let Some(window) = self.window.as_mut().filter(|w| w.in_turn == in_turn) else {
            return self.interrupt();
        };
        if window.skips > 0 {
            window.skips -= 1;
            window.since = now;
            return;
        }
        window.steps += 1;
        window.tokens += tokens;
        if window.steps < steps_of(in_turn) {
            return;
        }
        let (sequences, tokens) = (window.sequences, window.tokens);
        let seconds = now.saturating_sub(window.since).as_secs_f64();
        self.window = None;
        if let Some(rates) = self.measured.get_mut(&sequences).filter(|_| seconds > 0.0) {
            rates.observe(in_turn, tokens / seconds);
        }
    }

    /// Forgets the steps that are being timed: other work came in between.
    pub(super) fn interrupt(&mut self) {
        self.window = None;
    }
}

/// Steps of a window.
fn steps_of(in_turn: bool) -> u32 {
    WINDOW * (1 + u32::from(in_turn))
}

impl Rates {
    fn observe(&mut self, in_turn: bool, rate: f64) {
        let before = self.in_turn_is_faster();
        let mean = &mut self.ways[usize::from(in_turn)];
        *mean = Some(mean.map_or(rate, |mean| mean + NEW * (rate - mean)));
        self.steps += WINDOW;
        if before.is_some_and(|faster| faster != in_turn) {
            let stays = before == self.in_turn_is_faster();
            self.wait = if stays {
                (2 * self.wait).min(MAX_RETRIAL)
            } else {
                RETRIAL
            };
            self.steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of 1,000 steps of `n` sequences in turn, where a step together takes `us.0` and
    /// one of a group `us.1`, for one token of each sequence.
    fn share_in_turn(n: usize, us: (u64, u64)) -> usize {
        let mut alternation = Alternation::new(StepGroups::Measured, true);
        let (mut now, mut in_turn) = (Duration::ZERO, 0);
        for _ in 0..1000 {
            let chosen = alternation.chooses(n);
            now += Duration::from_micros(if chosen { us.1 } else { us.0 });
            let tokens = if chosen { n as f64 / 2.0 } else { n as f64 };
            alternation.note(chosen, tokens, now);
            in_turn += usize::from(chosen);
        }
        in_turn
    }

    #[test]
    fn way_with_more_tokens_per_second_is_taken() {
        assert!(share_in_turn(4, (9_000, 4_200)) > 900);
        assert!(share_in_turn(4, (9_000, 5_000)) < 80);
        assert!(share_in_turn(2, (7_100, 7_100)) < 80);
        assert_eq!(share_in_turn(1, (6_000, 1)), 0);
    }

    #[test]
    fn nothing_is_chosen_without_a_clock_or_a_runner_that_begins() {
        assert_eq!(share_in_turn(4, (0, 0)), 0);
        assert!(!Alternation::new(StepGroups::Two, false).chooses(4));
        assert!(Alternation::new(StepGroups::Two, true).chooses(2));
    }

    #[test]
    fn interrupted_steps_are_not_counted() {
        let mut alternation = Alternation::new(StepGroups::Measured, true);
        for second in 0..100 {
            assert!(!alternation.chooses(2));
            alternation.note(false, 1.0, Duration::from_secs(second));
            if second % 5 == 0 {
                alternation.interrupt();
            }
        }
    }
}
