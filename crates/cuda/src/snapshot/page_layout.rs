//! The byte layout of a page, and copies of pages.

use contract::DeviceError;

use crate::driver::Gpu;
use crate::pages::PageCopier;
use crate::pinned::{PinnedBlock, PinnedPool};
use crate::state::{KvArray, State};

/// One plane of a KV group's pages: `layers` runs of `width` bytes, `pitch` bytes apart on the
/// device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plane {
    pub(super) base: u64,
    pub(super) pitch: usize,
    pub(super) width: usize,
    pub(super) layers: usize,
    /// Offset of the plane in a host page.
    pub(super) at: usize,
}

/// The planes of a page. Each group has key values, key scales, value values and value scales of
/// all its layers.
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

    /// Bytes of the largest array of one layer of a page, scales included.
    pub(super) fn max_layer_bytes(&self) -> usize {
        let arrays = self.groups.iter().flat_map(|planes| planes.chunks_exact(2));
        let bytes = arrays.map(|planes| planes[0].width + planes[1].width);
        bytes.max().unwrap_or(0)
    }

    pub(super) fn planes(&self) -> impl Iterator<Item = &Plane> {
        self.groups.iter().flatten()
    }
}

/// `(base, bytes of a row)` of key values, key scales, value values and value scales. Absent scales
/// have 0 bytes.
pub(super) fn planes(k: &KvArray, v: &KvArray) -> [(u64, usize); 4] {
    [
        (k.values, k.value_bytes),
        (k.scales, k.scale_bytes),
        (v.values, v.value_bytes),
        (v.scales, v.scale_bytes),
    ]
}

impl Plane {
    /// Device address of a page of the first layer.
    pub(super) fn page(&self, index: usize) -> u64 {
        self.base + (index * self.width) as u64
    }

    /// Byte range of one layer in a host page.
    pub(super) fn of(&self, layer: usize) -> std::ops::Range<usize> {
        let begin = self.at + layer * self.width;
        begin..begin + self.width
    }
}

/// Copies pages of a device.
pub(crate) struct GpuPageCopier<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) page_layout: &'a PageLayout,
    pub(crate) host: &'a PinnedPool,
}

impl GpuPageCopier<'_> {
    /// Queues a copy of device page `index` into `block`.
    pub(super) fn fill(&self, block: &PinnedBlock, index: usize) -> Result<(), DeviceError> {
        for plane in self.page_layout.planes() {
            let to = (block.address() + plane.at as u64, plane.width);
            let from = (plane.page(index), plane.pitch);
            // SAFETY: the block has the layout's length, and its pool outlives the queue.
            unsafe { self.gpu.copy_rows(to, from, plane.width, plane.layers) }?;
        }
        Ok(())
    }
}

impl PageCopier for GpuPageCopier<'_> {
    type HostCopy = PinnedBlock;

    fn save(&mut self, index: usize) -> Result<PinnedBlock, DeviceError> {
        let block = self.host.take(self.page_layout.bytes)?;
        self.fill(&block, index)?;
        Ok(block)
    }

    fn load(&mut self, page: &PinnedBlock, index: usize) -> Result<(), DeviceError> {
        for plane in self.page_layout.planes() {
            let to = (plane.page(index), plane.pitch);
            let from = (page.address() + plane.at as u64, plane.width);
            // SAFETY: the block has the layout's length, and its pool outlives the queue.
            unsafe { self.gpu.copy_rows(to, from, plane.width, plane.layers) }?;
        }
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        for plane in self.page_layout.planes() {
            let to = (plane.page(to), plane.pitch);
            let from = (plane.page(from), plane.pitch);
            // SAFETY: both addresses are on the device.
            unsafe { self.gpu.copy_rows(to, from, plane.width, plane.layers) }?;
        }
        Ok(())
    }
}
