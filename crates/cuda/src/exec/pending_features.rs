//! Features of committed tokens that wait to become the draft's keys and values.
//!
//! The products that make them cost hardly more for many rows than for one, so they are made for
//! all that wait when a draft or a snapshot needs them, or when there is no room for another
//! tree's. Taps leave a tree's features behind those that wait, where a commit lets the rows of its
//! path stay; which rows these are is known here alone.

use contract::DeviceError;

use super::Engine;
use crate::plan::Key;
use crate::state::FEATURE_ROWS;
use crate::step::{self, Commit, ROWS, Step, StepPath, TREES};

/// The features of every slot.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    slots: Vec<Kept>,
}

/// The features of one slot.
#[derive(Debug, Clone, Default)]
struct Kept {
    /// Position of the first token that waits; the others follow it.
    first: usize,
    /// Where each of them is.
    rows: Vec<u16>,
    /// Rows in use: the next tree's come behind.
    used: usize,
}

impl Waiting {
    /// Of `slots` slots beside a draft, none where there is no draft.
    pub(super) fn new(slots: usize) -> Waiting {
        Waiting {
            slots: vec![Kept::default(); slots],
        }
    }

    /// Whether a tree of `nodes` nodes has no room behind the rows that wait.
    fn is_full(&self, slot: usize, nodes: usize) -> bool {
        let kept = self.slots.get(slot);
        kept.is_some_and(|kept| kept.used + nodes > FEATURE_ROWS)
    }

    /// Where the features of a tree go.
    fn place(&self, slot: usize) -> usize {
        let used = self.slots.get(slot).map_or(0, |kept| kept.used);
        slot * FEATURE_ROWS + used
    }

    /// The rows of a path of the tree last verified stay.
    fn retain(&mut self, path: &StepPath) {
        let Some(kept) = self.slots.get_mut(path.slot as usize) else {
            return;
        };
        if kept.rows.is_empty() {
            kept.first = path.committed as usize;
        }
        let nodes = path.node.iter().take(path.length as usize);
        let base = kept.used;
        let mut next = base;
        for node in nodes {
            let row = base + *node as usize;
            kept.rows.push(row as u16);
            next = next.max(row + 1);
        }
        kept.used = next;
    }

    /// Drops the pending features of a slot.
    fn forget(&mut self, slot: usize) {
        if let Some(kept) = self.slots.get_mut(slot) {
            kept.rows.clear();
            kept.used = 0;
        }
    }

    /// What waits in some of `slots`, as much as fits one pass, and how many rows it is; it waits
    /// no longer.
    fn take(&mut self, slots: &[usize]) -> Option<(Commit, usize)> {
        let (mut header, mut rows) = (Commit::new(), 0);
        for &slot in slots {
            let Some(kept) = self.slots.get(slot).filter(|kept| !kept.rows.is_empty()) else {
                continue;
            };
            if rows + kept.rows.len() > ROWS || header.paths as usize == TREES {
                break;
            }
            rows += kept.rows.len();
            header.push_rows(
                slot,
                kept.first,
                kept.rows.iter().map(|row| usize::from(*row)),
            );
            self.forget(slot);
        }
        (rows > 0).then_some((header, rows))
    }
}

impl Engine {
    /// Makes room for the features of a step's trees, and says where they go.
    pub(super) fn place_features(&mut self, step: &mut Step) -> Result<(), DeviceError> {
        let trees = step.tree;
        let trees = trees.iter().take(step.trees as usize);
        let slots: Vec<(usize, usize)> = trees
            .map(|tree| (tree.slot as usize, tree.nodes as usize))
            .collect();
        let full = slots
            .iter()
            .filter(|(slot, n)| self.waiting.is_full(*slot, *n));
        let full: Vec<usize> = full.map(|(slot, _)| *slot).collect();
        self.give_context(&full)?;
        for (index, (slot, _)) in slots.into_iter().enumerate() {
            step.place_features(index, self.waiting.place(slot));
        }
        Ok(())
    }

    /// The features of committed paths wait.
    pub(super) fn keep_features(&mut self, commit: &Commit) {
        for path in commit.path.iter().take(commit.paths as usize) {
            self.waiting.retain(path);
        }
    }

    /// Has the features that wait in `slots` become the draft's keys and values; does not wait for
    /// it.
    pub(crate) fn give_context(&mut self, slots: &[usize]) -> Result<(), DeviceError> {
        while let Some((header, rows)) = self.waiting.take(slots) {
            for path in header.path.iter().take(header.paths as usize) {
                self.meet(path.slot as usize)?;
            }
            if self.headers.waiting_in_flight {
                self.sync()?;
            }
            self.headers.waiting_in_flight = true;
            let bytes = step::bytes_of(&header);
            self.headers.up.waiting.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            self.queue(Key::Waiting(step::bucket(rows)))?;
        }
        Ok(())
    }

    /// Lets go of the features that wait in a slot, whose states another text gets.
    pub(crate) fn forget_features(&mut self, slot: usize) {
        self.waiting.forget(slot);
    }
}

#[cfg(test)]
mod tests {
    use contract::NodeIdx;

    use super::*;

    fn kept(waiting: &mut Waiting, slot: usize, committed: usize, nodes: &[u16]) {
        let mut commit = Commit::new();
        let nodes: Vec<NodeIdx> = nodes.iter().map(|node| NodeIdx(*node)).collect();
        commit.push(slot, committed, &nodes);
        waiting.retain(&commit.path[0]);
    }

    fn rows(path: &StepPath) -> &[i32] {
        &path.node[..path.length as usize]
    }

    #[test]
    fn trees_come_behind_rows_that_wait_and_their_paths_stay() {
        let mut waiting = Waiting::new(2);
        assert_eq!(waiting.place(1), FEATURE_ROWS);
        kept(&mut waiting, 1, 30, &[0, 2, 5]);
        assert_eq!(waiting.place(1), FEATURE_ROWS + 6);
        kept(&mut waiting, 1, 33, &[0]);
        kept(&mut waiting, 0, 7, &[0, 1]);
        assert_eq!((waiting.place(0), waiting.place(1)), (2, FEATURE_ROWS + 7));
        let (header, n) = waiting.take(&[1, 0]).unwrap();
        assert_eq!((header.paths, n), (2, 6));
        let [one, other, ..] = &header.path;
        assert_eq!(
            (one.slot, one.committed, rows(one)),
            (1, 30, &[0, 2, 5, 6][..])
        );
        assert_eq!(
            (other.slot, other.committed, rows(other)),
            (0, 7, &[0, 1][..])
        );
        assert_eq!(waiting.take(&[1, 0]), None);
        assert_eq!((waiting.place(0), waiting.place(1)), (0, FEATURE_ROWS));
    }

    #[test]
    fn what_has_no_room_is_told_and_what_does_not_fit_one_pass_takes_two() {
        let mut waiting = Waiting::new(3);
        for slot in 0..3 {
            for token in 0..30 {
                kept(&mut waiting, slot, token, &[0]);
            }
        }
        assert!(waiting.is_full(0, 35) && !waiting.is_full(0, 34));
        let taken = |waiting: &mut Waiting| waiting.take(&[0, 1, 2]).map(|(_, n)| n);
        assert_eq!(taken(&mut waiting), Some(60));
        assert_eq!(taken(&mut waiting), Some(30));
        assert_eq!(taken(&mut waiting), None);
        kept(&mut waiting, 2, 9, &[0]);
        waiting.forget(2);
        assert_eq!(taken(&mut waiting), None);
    }

    #[test]
    fn without_a_draft_nothing_waits() {
        let mut waiting = Waiting::new(0);
        kept(&mut waiting, 0, 0, &[0, 1]);
        assert!(!waiting.is_full(0, ROWS) && waiting.take(&[0]).is_none());
    }
}
