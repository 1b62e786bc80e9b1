//! A saved committed state on this device.

use std::sync::Arc;

use contract::DeviceError;

use super::non_paged::{Direction, NonPagedLayout, StateCopy};
use crate::driver::Gpu;
use crate::exec::lane::Lane;
use crate::pages::PageId;
use crate::pinned::PinnedPool;
use crate::state::State;

/// The committed state of a sequence at one position. Its pages are let go by the runner when it is freed.
pub(crate) struct Snapshot {
    pub(crate) position: usize,
    pub(crate) pages: Vec<PageId>,
    pub(super) non_paged: Arc<StateCopy>,
}

impl Snapshot {
    /// Copies what is no page of a slot with `position` committed tokens; does not wait. Its `pages` are for the
    /// caller to add.
    pub(crate) fn save_slot(
        (lane, gpu): (&mut Lane, &Gpu),
        host: &PinnedPool,
        state: &State,
        (slot, position): (usize, usize),
        place: contract::SnapshotLocation,
    ) -> Result<Snapshot, DeviceError> {
        let non_paged = NonPagedLayout::new(state, position);
        // Taking the block has the next one locked, which would hold up the calls that queue the copies.
        let _held = host.pause_prelocking();
        let copied = match place {
            contract::SnapshotLocation::Device => StateCopy::Device(gpu.alloc(non_paged.bytes)?),
            contract::SnapshotLocation::Host => StateCopy::Host(host.take(non_paged.bytes)?),
        };
        non_paged.copy((lane, gpu), state, slot, &copied, Direction::Save)?;
        Ok(Snapshot {
            position,
            pages: Vec::new(),
            non_paged: Arc::new(copied),
        })
    }

    /// Copies what is no page into a slot; does not wait.
    pub(crate) fn restore(
        &self,
        lane: (&mut Lane, &Gpu),
        state: &State,
        slot: usize,
    ) -> Result<(), DeviceError> {
        let non_paged = NonPagedLayout::new(state, self.position);
        non_paged.copy(lane, state, slot, &self.non_paged, Direction::Restore)
    }

    /// Bytes held beside the pages.
    pub(crate) fn non_paged_bytes(&self) -> u64 {
        self.non_paged.bytes() as u64
    }
}
