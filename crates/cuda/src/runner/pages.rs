//! Pages and states of sequences and snapshots.

use contract::{DeviceError, SeqId, SnapshotId, SnapshotInfo};

use super::{CudaRunner, copier};
use crate::snapshot::Snapshot;
use crate::state::PAGE_SIZE;

impl CudaRunner {
    /// Extends a sequence's page table to its first `n` rows.
    pub(super) fn ensure_pages(&mut self, seq: SeqId, n: usize) -> Result<(), DeviceError> {
        let before = self.sequence(seq)?.table.len();
        if before * PAGE_SIZE >= n {
            return Ok(());
        }
        let Some(sequence) = self.sequences.get_mut(&seq) else {
            return Err(DeviceError::UnknownSequence(seq));
        };
        let mut copier = copier(self.engine.gpu(), &self.page_layout, &self.host);
        let mut pages = self.page_pool.lock();
        let grown = pages.extend_table(&mut sequence.table, n.div_ceil(PAGE_SIZE), &mut copier);
        let page_indices = sequence.table[before..].iter();
        let page_indices: Vec<usize> = page_indices.map(|id| pages.page_index(*id)).collect();
        drop(pages);
        let written = grown.and_then(|()| {
            self.engine
                .write_table(sequence.slot, before, &page_indices)
        });
        self.record_fault(written)
    }

    /// Page indices of a sequence.
    #[cfg(feature = "inspect")]
    pub(crate) fn page_indices(&self, sequence: &super::Sequence) -> Vec<usize> {
        let pages = self.page_pool.lock();
        sequence
            .table
            .iter()
            .map(|id| pages.page_index(*id))
            .collect()
    }

    /// Restores a snapshot into a sequence whose page table is empty.
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
        let mut copier = copier(self.engine.gpu(), &self.page_layout, &self.host);
        let mut pages = self.page_pool.lock();
        sequence.table = pages.restore(&saved.pages, position, &mut copier)?;
        let page_indices = sequence.table.iter().map(|id| pages.page_index(*id));
        let page_indices: Vec<usize> = page_indices.collect();
        drop(pages);
        sequence.position = position;
        self.engine.drop_features(slot);
        let state = self.engine.shared_state();
        saved.restore(self.engine.copy_stream()?, &state, slot)?;
        self.engine.write_table(slot, 0, &page_indices)
    }

    pub(super) fn keep_snapshot(&mut self, snapshot: Snapshot) -> SnapshotInfo {
        let id = SnapshotId(self.take_id());
        let pages = (snapshot.pages.len() * self.page_layout.bytes) as u64;
        let info = SnapshotInfo {
            id,
            position: snapshot.position,
            bytes: snapshot.non_paged_bytes() + pages,
        };
        self.snapshots.insert(id, snapshot);
        info
    }
}
