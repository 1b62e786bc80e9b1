//! What sequences and snapshots hold of the card.

use contract::{DeviceError, SeqId, SnapshotId, SnapshotInfo};

use super::{CudaRunner, copier};
use crate::snapshot::Snapshot;
use crate::state::PAGE_SIZE;

impl CudaRunner {
    /// Sees to it that a sequence has pages for its first `n` rows.
    pub(super) fn give_pages(&mut self, seq: SeqId, n: usize) -> Result<(), DeviceError> {
        let before = self.sequence(seq)?.table.len();
        if before * PAGE_SIZE >= n {
            return Ok(());
        }
        let Some(sequence) = self.sequences.get_mut(&seq) else {
            return Err(DeviceError::UnknownSequence(seq));
        };
        let mut copier = copier(self.engine.gpu(), &self.map, &self.host);
        let mut pages = self.page_pool.lock();
        let grown = pages.extend_table(&mut sequence.table, n.div_ceil(PAGE_SIZE), &mut copier);
        let places = sequence.table[before..].iter();
        let places: Vec<usize> = places.map(|id| pages.page_index(*id)).collect();
        drop(pages);
        let written = grown.and_then(|()| self.engine.write_table(sequence.slot, before, &places));
        self.watched(written)
    }

    /// Where the pages of a sequence are.
    #[cfg(feature = "inspect")]
    pub(crate) fn places(&self, sequence: &super::Sequence) -> Vec<usize> {
        let pages = self.page_pool.lock();
        sequence
            .table
            .iter()
            .map(|id| pages.page_index(*id))
            .collect()
    }

    /// Puts a sequence whose table is empty into a snapshot's state.
    pub(super) fn restore_into(
        &mut self,
        seq: SeqId,
        snapshot: SnapshotId,
    ) -> Result<(), DeviceError> {
        let (Some(saved), Some(sequence)) =
            (self.snapshots.get(&snapshot), self.sequences.get_mut(&seq))
        else {
            return Err(DeviceError::UnknownSnapshot(snapshot));
        };
        let (slot, position) = (sequence.slot, saved.position);
        let mut copier = copier(self.engine.gpu(), &self.map, &self.host);
        let mut pages = self.page_pool.lock();
        sequence.table = pages.restore(&saved.pages, position, &mut copier)?;
        let places = sequence.table.iter().map(|id| pages.page_index(*id));
        let places: Vec<usize> = places.collect();
        drop(pages);
        sequence.position = position;
        self.engine.drop_features(slot);
        let state = self.engine.shared_state();
        saved.restore(self.engine.copy_stream(), &state, slot)?;
        self.engine.write_table(slot, 0, &places)
    }

    pub(super) fn keep_snapshot(&mut self, snapshot: Snapshot) -> SnapshotInfo {
        let id = SnapshotId(self.take_id());
        let pages = (snapshot.pages.len() * self.map.bytes) as u64;
        let info = SnapshotInfo {
            id,
            position: snapshot.position,
            bytes: snapshot.non_paged_bytes() + pages,
        };
        self.snapshots.insert(id, snapshot);
        info
    }
}
