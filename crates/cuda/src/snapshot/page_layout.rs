//! Where the bytes of a page lie, and copies of pages.

use contract::DeviceError;

use crate::driver::Gpu;
use crate::pages::PageCopier;
use crate::pinned::{PinnedBlock, PinnedPool};
use crate::state::{KvArray, State};

/// One plane of the pages of a group: `layers` runs of `width` bytes, `pitch` bytes apart on the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plane {
    pub(super) base: u64,
    pub(super) pitch: usize,
    pub(super) width: usize,
    pub(super) layers: usize,
    /// Where the plane begins in a block that holds a page.
    pub(super) at: usize,
}

/// PartKind a page consists of: of each group key values, key scales, value values, value scales, all layers of each.
#[derive(Debug, Clone)]
pub(crate) struct PageLayout {
    pub(super) groups: Vec<[Plane; 4]>,
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
    pub(super) fn max_layer_bytes(&self) -> usize {
        let arrays = self.groups.iter().flat_map(|planes| planes.chunks_exact(2));
        let bytes = arrays.map(|planes| planes[0].width + planes[1].width);
        bytes.max().unwrap_or(0)
    }

    pub(super) fn planes(&self) -> impl Iterator<Item = &Plane> {
        self.groups.iter().flatten()
    }
}

/// `(base, bytes of a row)` of key values, key scales, value values, value scales; 0 bytes where there are none.
pub(super) fn planes(k: &KvArray, v: &KvArray) -> [(u64, usize); 4] {
    [
        (k.values, k.value_bytes),
        (k.scales, k.scale_bytes),
        (v.values, v.value_bytes),
        (v.scales, v.scale_bytes),
    ]
}

impl Plane {
    /// Address of a page of its first layer.
    pub(super) fn page(&self, place: usize) -> u64 {
        self.base + (place * self.width) as u64
    }

    /// The bytes of one layer in a block that holds a page.
    pub(super) fn of(&self, layer: usize) -> std::ops::Range<usize> {
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
    pub(super) fn fill(&self, block: &PinnedBlock, place: usize) -> Result<(), DeviceError> {
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
