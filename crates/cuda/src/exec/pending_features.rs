//! Features of committed tokens that wait to become the draft's keys and values.
//!
//! The GEMMs that turn features into keys and values cost little more for many rows than for one.
//! They run for all pending rows when a draft or a snapshot needs them, or when the next tree has
//! no room.
//!
//! A tree's features are captured behind the pending rows, and a commit keeps the rows of its path.
//! Only this module knows which rows these are.

use contract::DeviceError;

use super::Engine;
use crate::plan::PlanKey;
use crate::state::FEATURE_ROWS;
use crate::step::{self, Commit, ROWS, Step, StepPath, TREES};

/// The features of every slot.
#[derive(Debug, Default)]
pub(super) struct PendingFeatures {
    slots: Vec<SlotFeatures>,
}

/// The features of one slot.
#[derive(Debug, Clone, Default)]
struct SlotFeatures {
    /// Position of the first token that waits; the others follow it.
    first: usize,
    /// Where each of them is.
    rows: Vec<u16>,
    /// Rows in use: the next tree's come behind.
    used: usize,
}

impl PendingFeatures {
    /// Of `slots` slots beside a draft, none where there is no draft.
    pub(super) fn new(slots: usize) -> PendingFeatures {
        PendingFeatures {
            slots: vec![SlotFeatures::default(); slots],
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
    fn clear(&mut self, slot: usize) {
        if let Some(kept) = self.slots.get_mut(slot) {
            kept.rows.clear();
            kept.used = 0;
        }
    }

    /// Removes the pending features of some of `slots`, as many as fit one pass. Returns them and
    /// their number of rows.
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
            self.clear(slot);
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
            .filter(|(slot, n)| self.pending.is_full(*slot, *n));
        let full: Vec<usize> = full.map(|(slot, _)| *slot).collect();
        self.consume_features(&full)?;
        for (index, (slot, _)) in slots.into_iter().enumerate() {
            step.set_feature_row(index, self.pending.place(slot));
        }
        Ok(())
    }

    /// The features of committed paths wait.
    pub(super) fn keep_features(&mut self, commit: &Commit) {
        for path in commit.path.iter().take(commit.paths as usize) {
            self.pending.retain(path);
        }
    }

    /// Has the features that wait in `slots` become the draft's keys and values; does not wait for
    /// it.
    pub(crate) fn consume_features(&mut self, slots: &[usize]) -> Result<(), DeviceError> {
        while let Some((header, rows)) = self.pending.take(slots) {
            for path in header.path.iter().take(header.paths as usize) {
                self.wait_for_copies(path.slot as usize)?;
            }
            if self.headers.pending_in_flight {
                self.sync()?;
            }
            self.headers.pending_in_flight = true;
            let bytes = step::bytes_of(&header);
            self.headers.up.pending.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            self.queue(PlanKey::DraftContext(step::bucket(rows)))?;
        }
        Ok(())
    }

    /// Lets go of the features that wait in a slot, whose states another text gets.
    pub(crate) fn drop_features(&mut self, slot: usize) {
        self.pending.clear(slot);
    }
}

#[cfg(test)]
mod tests {
    use contract::NodeIdx;

    use super::*;

    fn kept(pending: &mut PendingFeatures, slot: usize, committed: usize, nodes: &[u16]) {
        let mut commit = Commit::new();
        let nodes: Vec<NodeIdx> = nodes.iter().map(|node| NodeIdx(*node)).collect();
        commit.push(slot, committed, &nodes);
        pending.retain(&commit.path[0]);
    }

    fn rows(path: &StepPath) -> &[i32] {
        &path.node[..path.length as usize]
    }

    #[test]
    fn trees_come_behind_rows_that_wait_and_their_paths_stay() {
        let mut pending = PendingFeatures::new(2);
        assert_eq!(pending.place(1), FEATURE_ROWS);
        kept(&mut pending, 1, 30, &[0, 2, 5]);
        assert_eq!(pending.place(1), FEATURE_ROWS + 6);
        kept(&mut pending, 1, 33, &[0]);
        kept(&mut pending, 0, 7, &[0, 1]);
        assert_eq!((pending.place(0), pending.place(1)), (2, FEATURE_ROWS + 7));
        let (header, n) = pending.take(&[1, 0]).unwrap();
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
        assert_eq!(pending.take(&[1, 0]), None);
        assert_eq!((pending.place(0), pending.place(1)), (0, FEATURE_ROWS));
    }

    #[test]
    fn full_slots_are_reported_and_features_beyond_one_pass_take_two() {
        let mut pending = PendingFeatures::new(3);
        for slot in 0..3 {
            for token in 0..30 {
                kept(&mut pending, slot, token, &[0]);
            }
        }
        assert!(pending.is_full(0, 35) && !pending.is_full(0, 34));
        let taken = |pending: &mut PendingFeatures| pending.take(&[0, 1, 2]).map(|(_, n)| n);
        assert_eq!(taken(&mut pending), Some(60));
        assert_eq!(taken(&mut pending), Some(30));
        assert_eq!(taken(&mut pending), None);
        kept(&mut pending, 2, 9, &[0]);
        pending.clear(2);
        assert_eq!(taken(&mut pending), None);
    }

    #[test]
    fn without_a_draft_nothing_waits() {
        let mut pending = PendingFeatures::new(0);
        kept(&mut pending, 0, 0, &[0, 1]);
        assert!(!pending.is_full(0, ROWS) && pending.take(&[0]).is_none());
    }
}
