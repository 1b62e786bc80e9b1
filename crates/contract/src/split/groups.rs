//! Whether the sequences of a step run together, or in two groups that occupy the stages in turn.
//!
//! A stage works on one group while the stage above works on the other. With `n` stages, two groups
//! take `(n + 1) / n` times as long as one of them alone on one device. That is less than a step of
//! all where a step is bound by arithmetic, and more where it is bound by reading weights. So both
//! are timed, by the shape of the step.

use std::collections::BTreeMap;
use std::time::Duration;

/// How a step of several sequences runs in pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepGroups {
    /// In two groups where that is measured to be faster; together on devices that are not
    /// batch-invariant, since groups would change the bits of results there.
    #[default]
    Measured,
    /// In two groups.
    Two,
    /// Together.
    One,
}

/// Rows that count as one shape of a step.
const ROW_BUCKET: usize = 8;
/// Steps of a shape that are timed in either way before the faster is chosen.
const TRIALS: u32 = 3;
/// After so many steps of a shape the slower way is timed again.
const RETRIAL: u32 = 256;
/// Weight of a new time in its average.
const NEW: f64 = 0.25;

/// Measured times of steps by their number of sequences and their rows.
pub(super) struct GroupTimes {
    groups: StepGroups,
    shapes: BTreeMap<(usize, usize), ShapeTimes>,
}

#[derive(Default)]
struct ShapeTimes {
    /// Together, and in two groups.
    ways: [WayTimes; 2],
    steps: u32,
}

#[derive(Default)]
struct WayTimes {
    mean_s: f64,
    n: u32,
}

impl GroupTimes {
    pub(super) fn new(groups: StepGroups, batch_invariant: bool) -> GroupTimes {
        GroupTimes {
            groups: match groups {
                StepGroups::Measured if !batch_invariant => StepGroups::One,
                groups => groups,
            },
            shapes: BTreeMap::new(),
        }
    }

    /// Whether a step of sequences with these rows runs in two groups.
    pub(super) fn splits(&mut self, rows: &[usize]) -> bool {
        if rows.len() < 2 {
            return false;
        }
        match self.groups {
            StepGroups::One => return false,
            StepGroups::Two => return true,
            StepGroups::Measured => {}
        }
        let shape = self.shapes.entry(shape(rows)).or_default();
        shape.steps += 1;
        let [together, apart] = &shape.ways;
        if together.n.min(apart.n) < TRIALS {
            return apart.n < together.n;
        }
        let faster = apart.mean_s < together.mean_s;
        faster != shape.steps.is_multiple_of(RETRIAL)
    }

    /// Notes the time of a step that ran as [`GroupTimes::splits`] said.
    pub(super) fn note(&mut self, rows: &[usize], apart: bool, time: Duration) {
        if self.groups != StepGroups::Measured || rows.len() < 2 {
            return;
        }
        let shape = self.shapes.entry(shape(rows)).or_default();
        let way = &mut shape.ways[usize::from(apart)];
        let seconds = time.as_secs_f64();
        way.n += 1;
        way.mean_s = if way.n == 1 {
            seconds
        } else {
            way.mean_s + NEW * (seconds - way.mean_s)
        };
    }
}

fn shape(rows: &[usize]) -> (usize, usize) {
    let sum: usize = rows.iter().sum();
    (rows.len(), sum.div_ceil(ROW_BUCKET))
}

/// How many sequences at the front make the first of two groups of about the same rows; at least
/// one of at least two.
pub(super) fn first_group(rows: &[usize]) -> usize {
    let all: usize = rows.iter().sum();
    let mut sum = 0;
    let fits = rows.iter().take_while(|rows| {
        sum += **rows;
        // Up to here half of the rows, rounded to the nearer border.
        2 * sum <= all + **rows
    });
    fits.count().clamp(1, rows.len().saturating_sub(1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of 100 steps that ran in two groups, where a step of `rows` takes `us(rows)` on
    /// one device and there are two stages.
    fn share_of_two(rows: &[usize], us: impl Fn(usize) -> u64) -> usize {
        let mut times = GroupTimes::new(StepGroups::Measured, true);
        let mut split = 0;
        for _ in 0..100 {
            let apart = times.splits(rows);
            let sum: usize = rows.iter().sum();
            let us = if apart { us(sum / 2) * 3 / 2 } else { us(sum) };
            times.note(rows, apart, Duration::from_micros(us));
            split += usize::from(apart);
        }
        split
    }

    #[test]
    fn steps_split_where_arithmetic_bounds_them_and_not_where_weights_do() {
        assert!(share_of_two(&[24, 24], |rows| 100 * rows as u64) > 90);
        assert!(share_of_two(&[1, 1], |_| 6000) < 10);
        assert_eq!(share_of_two(&[24], |rows| rows as u64), 0);
    }

    #[test]
    fn slower_way_is_tried_again() {
        let mut times = GroupTimes::new(StepGroups::Measured, true);
        let rows = [8, 8];
        let mut split_at_last = 0;
        for step in 0..2 * RETRIAL {
            let apart = times.splits(&rows);
            // Splitting becomes faster after a while.
            let us = if apart && step > 100 {
                1
            } else {
                10 + u64::from(apart)
            };
            times.note(&rows, apart, Duration::from_micros(us));
            split_at_last += usize::from(apart && step > RETRIAL);
        }
        assert!(split_at_last > 200, "{split_at_last}");
    }

    #[test]
    fn groups_have_about_the_same_rows() {
        assert_eq!(first_group(&[24, 24]), 1);
        assert_eq!(first_group(&[1, 1, 1, 1]), 2);
        assert_eq!(first_group(&[40, 1, 1]), 1);
        assert_eq!(first_group(&[1, 1, 40]), 2);
        assert_eq!(first_group(&[10, 10, 10]), 2);
        assert_eq!(first_group(&[5]), 1);
    }
}
