//! A saved committed state on this device.

use std::sync::Arc;

use contract::DeviceError;

use super::non_paged::{Direction, NonPagedLayout, StateCopy};
use crate::driver::Gpu;
use crate::exec::copy_stream::CopyStream;
use crate::pages::PageId;
use crate::pinned::PinnedPool;
use crate::state::State;

/// The committed state of a sequence at one position. The runner releases its pages.
pub(crate) struct Snapshot {
    pub(crate) position: usize,
    pub(crate) pages: Vec<PageId>,
    pub(super) non_paged: Arc<StateCopy>,
}

impl Snapshot {
    /// Queues a copy of the non-paged state of a slot with `position` committed tokens. The caller
    /// adds the `pages`.
    pub(crate) fn save_slot(
        (copy_stream, gpu): (&mut CopyStream, &Gpu),
        host: &PinnedPool,
        state: &State,
        (slot, position): (usize, usize),
        location: contract::SnapshotLocation,
    ) -> Result<Snapshot, DeviceError> {
        let non_paged = NonPagedLayout::new(state, position);
        // Taking a block starts pre-locking, which would delay the launches of the copies.
        let _pause = host.pause_prelocking();
        let copied = match location {
            contract::SnapshotLocation::Device => StateCopy::Device(gpu.alloc(non_paged.bytes)?),
            contract::SnapshotLocation::Host => StateCopy::Host(host.take(non_paged.bytes)?),
        };
        non_paged.copy((copy_stream, gpu), state, slot, &copied, Direction::Save)?;
        Ok(Snapshot {
            position,
            pages: Vec::new(),
            non_paged: Arc::new(copied),
        })
    }

    /// Queues a copy of the non-paged state into a slot.
    pub(crate) fn restore(
        &self,
        copy_stream: (&mut CopyStream, &Gpu),
        state: &State,
        slot: usize,
    ) -> Result<(), DeviceError> {
        let non_paged = NonPagedLayout::new(state, self.position);
        non_paged.copy(
            copy_stream,
            state,
            slot,
            &self.non_paged,
            Direction::Restore,
        )
    }

    /// Bytes held besides the pages.
    pub(crate) fn non_paged_bytes(&self) -> u64 {
        self.non_paged.bytes() as u64
    }
}
