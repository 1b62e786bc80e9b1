//! Saved committed states: the pages of their rows, which others share, and a copy of what is non_paged.
//!
//! PartKind is non_paged is the delta states, the windows, and the draft's rings as far as they are in use, one after another
//! as [`NonPagedLayout`] says, in page-locked memory or on the card. Restoring shares the full pages, copies the last one and
//! what is non_paged, so it is identity bit for bit.

mod export;
mod import;
mod neutral;

use std::ops::Range;
use std::sync::Arc;

use contract::DeviceError;

use crate::driver::{Buffer, Gpu};
use crate::exec::lane::{BEHIND_ALL, Lane};
use crate::pages::{PageCopier, PageId};
use crate::pinned::{PinnedBlock, PinnedPool};
use crate::state::{KvArray, PAGE_SIZE, State};

pub(crate) use export::{CudaDetachedSnapshot, ExportContext, SharedPagePool};

#[cfg(feature = "inspect")]
pub(crate) use neutral::{append_neutral, neutral_bytes, neutral_states, runs};

/// Layers context states are copied before the next chunk may come to the first of them.
const LAYERS_PER_BATCH: usize = 4;

/// The committed state of a sequence at one position. Its pages are let go by the runner when it is freed.
pub(crate) struct Snapshot {
    pub(crate) position: usize,
    pub(crate) pages: Vec<PageId>,
    non_paged: Arc<StateCopy>,
}

/// Bytes of a slot that were copied.
enum StateCopy {
    Device(Buffer<u8>),
    Host(PinnedBlock),
}

/// One plane of the pages of a group: `layers` runs of `width` bytes, `pitch` bytes apart on the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plane {
    base: u64,
    pitch: usize,
    width: usize,
    layers: usize,
    /// Where the plane begins in a block that holds a page.
    at: usize,
}

/// PartKind a page consists of: of each group key values, key scales, value values, value scales, all layers of each.
#[derive(Debug, Clone)]
pub(crate) struct PageLayout {
    groups: Vec<[Plane; 4]>,
    /// Bytes of a page, all layers.
    pub(crate) bytes: usize,
}

impl PageLayout {
    pub(crate) fn new(state: &State) -> PageLayout {
        let mut bytes = 0;
        let groups = state.kv.iter().map(|group| {
            planes(&group.k, &group.v).map(|(base, row_bytes)| {
                let plane = Plane {
                    base,
                    pitch: group.layer_bytes(row_bytes),
                    width: group.page_rows() * row_bytes,
                    layers: group.layers.len(),
                    at: bytes,
                };
                bytes += plane.layers * plane.width;
                plane
            })
        });
        PageLayout {
            groups: groups.collect(),
            bytes,
        }
    }

    /// Bytes of the max_layer_bytes array of one layer of a page, scales included.
    fn max_layer_bytes(&self) -> usize {
        let arrays = self.groups.iter().flat_map(|planes| planes.chunks_exact(2));
        let bytes = arrays.map(|planes| planes[0].width + planes[1].width);
        bytes.max().unwrap_or(0)
    }

    fn planes(&self) -> impl Iterator<Item = &Plane> {
        self.groups.iter().flatten()
    }
}

/// `(base, bytes of a row)` of key values, key scales, value values, value scales; 0 bytes where there are none.
fn planes(k: &KvArray, v: &KvArray) -> [(u64, usize); 4] {
    [
        (k.values, k.value_bytes),
        (k.scales, k.scale_bytes),
        (v.values, v.value_bytes),
        (v.scales, v.scale_bytes),
    ]
}

impl Plane {
    /// Address of a page of its first layer.
    fn page(&self, place: usize) -> u64 {
        self.base + (place * self.width) as u64
    }

    /// The bytes of one layer in a block that holds a page.
    fn of(&self, layer: usize) -> std::ops::Range<usize> {
        let begin = self.at + layer * self.width;
        begin..begin + self.width
    }
}

/// Moves pages of a card.
pub(crate) struct GpuPageCopier<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) map: &'a PageLayout,
    pub(crate) host: &'a PinnedPool,
}

impl GpuPageCopier<'_> {
    /// Queues a copy of the page at `place` into `block`.
    fn fill(&self, block: &PinnedBlock, place: usize) -> Result<(), DeviceError> {
        for plane in self.map.planes() {
            let to = (block.address() + plane.at as u64, plane.width);
            let from = (plane.page(place), plane.pitch);
            // SAFETY: the block is as long as the map says, and its pool outlives the queue.
            unsafe { self.gpu.copy_rows(to, from, plane.width, plane.layers) }?;
        }
        Ok(())
    }
}

impl PageCopier for GpuPageCopier<'_> {
    type HostCopy = PinnedBlock;

    fn save(&mut self, place: usize) -> Result<PinnedBlock, DeviceError> {
        let block = self.host.take(self.map.bytes)?;
        self.fill(&block, place)?;
        Ok(block)
    }

    fn load(&mut self, held: &PinnedBlock, place: usize) -> Result<(), DeviceError> {
        for plane in self.map.planes() {
            let to = (plane.page(place), plane.pitch);
            let from = (held.address() + plane.at as u64, plane.width);
            // SAFETY: the block is as long as the map says, and its pool outlives the queue.
            unsafe { self.gpu.copy_rows(to, from, plane.width, plane.layers) }?;
        }
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        for plane in self.map.planes() {
            let to = (plane.page(to), plane.pitch);
            let from = (plane.page(from), plane.pitch);
            // SAFETY: both sides are on the card.
            unsafe { self.gpu.copy_rows(to, from, plane.width, plane.layers) }?;
        }
        Ok(())
    }
}

/// PartKind a piece of a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartKind {
    /// Delta states of all layers of a group.
    States(usize),
    /// Windows of all layers of a group.
    Windows(usize),
    /// One plane of a draft layer's ring, in the order of [`planes`].
    DraftRing(usize, usize),
}

/// A piece of every slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StatePart {
    what: PartKind,
    /// Address in slot 0, and bytes from one slot to the next.
    base: u64,
    slot_bytes: usize,
    /// Bytes to copy, from the slot's first on, and where they go in a copy.
    bytes: usize,
    at: usize,
}

/// PartKind a snapshot copies of a slot.
#[derive(Debug)]
struct NonPagedLayout {
    parts: Vec<StatePart>,
    bytes: usize,
}

impl NonPagedLayout {
    /// Of slots with `position` committed tokens.
    fn new(state: &State, position: usize) -> NonPagedLayout {
        let mut non_paged = NonPagedLayout {
            parts: Vec::new(),
            bytes: 0,
        };
        for (i, group) in state.delta.iter().enumerate() {
            for (what, base, layer_bytes) in [
                (PartKind::States(i), group.states, group.state_bytes),
                (PartKind::Windows(i), group.windows, group.window_bytes),
            ] {
                let bytes = group.slot_bytes(layer_bytes);
                non_paged.push(what, base, (bytes, bytes));
            }
        }
        let rings = state.draft.iter().flat_map(|draft| &draft.rings);
        for (i, ring) in rings.enumerate() {
            let used = position.div_ceil(PAGE_SIZE).min(ring.pages);
            let planes = planes(&ring.rows.k, &ring.rows.v);
            for (j, (base, row_bytes)) in planes.into_iter().enumerate() {
                let page = ring.rows.page_rows() * row_bytes;
                non_paged.push(
                    PartKind::DraftRing(i, j),
                    base,
                    (ring.pages * page, used * page),
                );
            }
        }
        non_paged
    }

    fn push(&mut self, what: PartKind, base: u64, (slot_bytes, bytes): (usize, usize)) {
        self.parts.push(StatePart {
            what,
            base,
            slot_bytes,
            bytes,
            at: self.bytes,
        });
        self.bytes += bytes;
    }

    /// Where a piece lies in a copy.
    fn range(&self, what: PartKind) -> std::ops::Range<usize> {
        let part = self.parts.iter().find(|part| part.what == what);
        part.map_or(0..0, |part| part.at..part.at + part.bytes)
    }

    /// Queues copies of all pieces between a slot and a copy, layers that are read first before the others.
    fn copy(
        &self,
        (lane, gpu): (&mut Lane, &Gpu),
        state: &State,
        slot: usize,
        copied: &StateCopy,
        direction: Direction,
    ) -> Result<(), DeviceError> {
        let ends = |what: PartKind, range: Range<usize>| {
            let part = self.parts.iter().find(|part| part.what == what);
            let part = part.expect("parts were made from the same state");
            let of_slot = part.base + (slot * part.slot_bytes + range.start) as u64;
            let of_copy = copied.address() + (part.at + range.start) as u64;
            match direction {
                Direction::Save => (of_copy, of_slot),
                Direction::Restore => (of_slot, of_copy),
            }
        };
        let mut batches: Vec<(usize, usize, Range<usize>)> = Vec::new();
        for (i, group) in state.delta.iter().enumerate() {
            for (n, layers) in group.layers.chunks(LAYERS_PER_BATCH).enumerate() {
                let begin = n * LAYERS_PER_BATCH;
                let first = layers.iter().min().copied().unwrap_or(0);
                batches.push((first, i, begin..begin + layers.len()));
            }
        }
        batches.sort_by_key(|(first, ..)| *first);
        lane.begin(gpu, slot)?;
        for (first, i, layers) in batches {
            let group = &state.delta[i];
            for (what, bytes) in [
                (PartKind::States(i), group.state_bytes),
                (PartKind::Windows(i), group.window_bytes),
            ] {
                let (to, from) = ends(what, layers.start * bytes..layers.end * bytes);
                // SAFETY: a copy is as long as its parts, and pools outlive the queue.
                unsafe { lane.copy(to, from, layers.len() * bytes) }?;
            }
            lane.mark(gpu, slot, first)?;
        }
        for part in &self.parts {
            if let PartKind::DraftRing(..) = part.what {
                let (to, from) = ends(part.what, 0..part.bytes);
                // SAFETY: as above.
                unsafe { lane.copy(to, from, part.bytes) }?;
            }
        }
        lane.mark(gpu, slot, BEHIND_ALL)?;
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Save,
    Restore,
}

impl StateCopy {
    fn address(&self) -> u64 {
        match self {
            StateCopy::Device(buffer) => buffer.ptr(),
            StateCopy::Host(block) => block.address(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            StateCopy::Device(buffer) => buffer.bytes(),
            StateCopy::Host(block) => block.len(),
        }
    }
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
