//! Which bytes of a file are there.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A set of bytes, as sorted ranges that neither touch nor overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Adds `start..end`.
    pub(crate) fn add(&mut self, added: Range<u64>) {
        if added.is_empty() {
            return;
        }
        let (mut start, mut end) = (added.start, added.end);
        // All ranges that touch the new one lie next to each other.
        let first = self.0.partition_point(|&(_, e)| e < start);
        let last = self.0.partition_point(|&(s, _)| s <= end);
        if first < last {
            start = start.min(self.0[first].0);
            end = end.max(self.0[last - 1].1);
        }
        self.0.splice(first..last, [(start, end)]);
    }

    /// Number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// The bytes of `0..size` that are not in the set, in pieces of at most `most` bytes.
    pub(crate) fn missing(&self, size: u64, most: u64) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for &(start, end) in self.0.iter().chain([&(size, size)]) {
            while at < start {
                let end = start.min(at.saturating_add(most.max(1)));
                gaps.push(at..end);
                at = end;
            }
            at = at.max(end);
        }
        gaps
    }

    /// Whether the ranges are sorted, apart and within `0..size`; a record on disk may be anything.
    pub(crate) fn is_valid(&self, size: u64) -> bool {
        let sorted = self.0.windows(2).all(|pair| pair[0].1 < pair[1].0);
        sorted
            && self
                .0
                .iter()
                .all(|&(start, end)| start < end && end <= size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_order_of_pieces_gives_the_same_set() {
        let mut set = Ranges::default();
        let mut naive = [false; 100];
        let mut state = 1_u64;
        for step in 0..400 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let start = (state >> 33) % 100;
            let end = (start + (state >> 50) % 12).min(100);
            set.add(start..end);
            for at in start..end {
                naive[usize::try_from(at).unwrap()] = true;
            }
            assert!(set.is_valid(100), "{step}: {set:?}");
            let there = naive.iter().filter(|&&there| there).count();
            assert_eq!(set.bytes(), there as u64, "{step}");
            let mut gone = 0;
            for gap in set.missing(100, 7) {
                assert!(gap.end - gap.start <= 7 && !gap.is_empty());
                gone += gap.end - gap.start;
                for at in gap {
                    assert!(!naive[usize::try_from(at).unwrap()], "{step}: {at}");
                }
            }
            assert_eq!(gone + set.bytes(), 100, "{step}");
        }
    }

    #[test]
    fn damaged_records_are_noticed() {
        for (ranges, valid) in [
            (vec![], true),
            (vec![(0, 5), (6, 10)], true),
            (vec![(0, 5), (5, 10)], false),
            (vec![(6, 10), (0, 5)], false),
            (vec![(0, 11)], false),
            (vec![(5, 5)], false),
            (vec![(7, 5)], false),
        ] {
            assert_eq!(Ranges(ranges.clone()).is_valid(10), valid, "{ranges:?}");
        }
    }
}
