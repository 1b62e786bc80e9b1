//! Export of a snapshot to device-neutral bytes, on any thread.
//!
//! Committed rows never change, so another thread reads them while sequences continue. A detached
//! snapshot holds references to its pages. The page pool is locked while a group of pages is
//! copied, so none of them moves meanwhile.

use std::io::Write;
use std::sync::Arc;

use contract::snapshot::{
    HEADER_BYTES, SECTION_BYTES, SectionKind, SnapshotHeader, SnapshotIdentity, write_header,
    write_section,
};
use contract::{DetachedSnapshot, DeviceError};

use super::neutral::{append_neutral, neutral_states, runs};
use super::non_paged::{NonPagedLayout, PartKind, StateCopy};
use super::page_layout::PageLayout;
use super::saved::Snapshot;
use super::sections::{KvSide, expected_bytes, index_of, ring_positions, rings};
use crate::driver::{CopyEngine, Stream};
use crate::pages::{PageId, SharedPagePool};
use crate::pinned::{PinnedBlock, PinnedPool};
use crate::state::{KvGroup, LayerState, State};

/// Pages copied to the host per lock of the pool.
const PAGES_PER_FETCH: usize = 32;

/// State shared by the exports of a runner.
#[derive(Clone)]
pub(crate) struct ExportContext {
    pub(crate) page_pool: Arc<SharedPagePool>,
    pub(crate) host: Arc<PinnedPool>,
    pub(crate) page_layout: Arc<PageLayout>,
    pub(crate) state: Arc<State>,
    pub(crate) copy_engine: CopyEngine,
    pub(crate) identity: SnapshotIdentity,
    /// The runner's first layer in the whole model.
    pub(crate) first_layer: usize,
}

/// A snapshot that is written independently of the runner.
pub(crate) struct CudaDetachedSnapshot {
    context: ExportContext,
    position: usize,
    pages: Vec<PageId>,
    non_paged: Arc<StateCopy>,
}

/// Buffers that bring rows of pages to the host.
struct ExportStaging {
    stream: Stream,
    stage: PinnedBlock,
    rows: Vec<u8>,
}

impl CudaDetachedSnapshot {
    pub(crate) fn new(context: ExportContext, snapshot: &Snapshot) -> CudaDetachedSnapshot {
        let pages = context.page_pool.lock().retain_again(&snapshot.pages);
        *context.page_pool.exports() += 1;
        CudaDetachedSnapshot {
            context,
            position: snapshot.position,
            pages,
            non_paged: Arc::clone(&snapshot.non_paged),
        }
    }

    /// All sections in file order.
    fn sections(&self) -> impl Iterator<Item = (SectionKind, usize)> {
        let state = &self.context.state;
        let of_layer = |layer: usize| match state.layer(layer) {
            LayerState::Kv(..) => [(SectionKind::Keys, layer), (SectionKind::Values, layer)],
            LayerState::Delta(..) => [
                (SectionKind::DeltaState, layer),
                (SectionKind::ConvWindow, layer),
            ],
        };
        let n_layers = state.n_layers();
        let layers = (0..n_layers).flat_map(of_layer);
        let hidden = state.hidden.map(|_| (SectionKind::MtpHidden, n_layers - 1));
        let of_ring = |layer| {
            [
                (SectionKind::DraftKeys, layer),
                (SectionKind::DraftValues, layer),
            ]
        };
        let rings = (0..rings(state).len()).flat_map(of_ring);
        layers.chain(hidden).chain(rings)
    }

    /// Length of a section's content in bytes.
    fn section_bytes(&self, kind: SectionKind, layer: usize) -> usize {
        let state = &self.context.state;
        expected_bytes(state, self.position, kind, number(layer)).unwrap_or(0)
    }

    /// Rows of one array of one layer in the neutral layout.
    fn read_rows<'a>(
        &self,
        (group_number, group): (usize, &KvGroup),
        (side, layer): (KvSide, usize),
        staging: &'a mut ExportStaging,
    ) -> Result<&'a [u8], DeviceError> {
        let ExportContext {
            page_pool,
            page_layout,
            copy_engine,
            ..
        } = &self.context;
        let array = side.array(group);
        let planes = [0, 1].map(|i| page_layout.groups[group_number][side as usize + i]);
        let page_bytes = planes[0].width + planes[1].width;
        let runs: Vec<_> = runs(0..self.position, usize::MAX).collect();
        staging.rows.clear();
        for runs in runs.chunks(PAGES_PER_FETCH) {
            {
                let pages = page_pool.lock();
                let mut synced = false;
                for (i, (number, _)) in runs.iter().enumerate() {
                    let at = i * page_bytes;
                    match pages.locate(self.pages[*number]) {
                        Ok(index) => {
                            for (plane, at) in planes.iter().zip([at, at + planes[0].width]) {
                                let from = plane.page(index) + (layer * plane.pitch) as u64;
                                let to = staging.stage.address() + at as u64;
                                // SAFETY: the staging block is not accessed before the wait below.
                                unsafe {
                                    copy_engine.copy(&staging.stream, to, from, plane.width)
                                }?;
                            }
                        }
                        Err(page) => {
                            // The eviction copy of this page may still be running.
                            if !synced {
                                copy_engine.sync_all()?;
                                synced = true;
                            }
                            let (values, scales) = (planes[0].of(layer), planes[1].of(layer));
                            let to = &mut staging.stage.bytes_mut()[at..at + page_bytes];
                            let (to_values, to_scales) = to.split_at_mut(values.len());
                            to_values.copy_from_slice(&page.bytes()[values]);
                            to_scales.copy_from_slice(&page.bytes()[scales]);
                        }
                    }
                }
                staging.stream.sync()?;
            }
            for (i, (_, within)) in runs.iter().enumerate() {
                let page = &staging.stage.bytes()[i * page_bytes..][..page_bytes];
                let planes = page.split_at(planes[0].width);
                append_neutral((group, array), within.clone(), planes, &mut staging.rows);
            }
        }
        Ok(&staging.rows)
    }

    /// Rows of one array of a draft layer, from the non-paged copy.
    fn ring_rows(
        &self,
        parts: &NonPagedLayout,
        non_paged: &[u8],
        (side, layer): (KvSide, usize),
    ) -> Vec<u8> {
        let ring = &rings(&self.context.state)[layer];
        let (group, array) = (&ring.rows, side.array(&ring.rows));
        let planes =
            [0, 1].map(|i| &non_paged[parts.range(PartKind::DraftRing(layer, side as usize + i))]);
        let mut rows = Vec::new();
        for (page, within) in runs(ring_positions(ring, self.position), ring.pages) {
            let of_page = |plane: usize, row_bytes: usize| {
                let bytes = group.page_rows() * row_bytes;
                &planes[plane][page * bytes..][..bytes]
            };
            let planes = (of_page(0, array.value_bytes), of_page(1, array.scale_bytes));
            append_neutral((group, array), within, planes, &mut rows);
        }
        rows
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("layers are far below 2^31")
}

impl DetachedSnapshot for CudaDetachedSnapshot {
    fn bytes(&self) -> u64 {
        let sections = self.sections();
        let bytes = sections.map(|(kind, layer)| SECTION_BYTES + self.section_bytes(kind, layer));
        (HEADER_BYTES + bytes.sum::<usize>()) as u64
    }

    fn write(&mut self, sink: &mut dyn Write) -> Result<(), DeviceError> {
        let ExportContext {
            host,
            page_layout,
            state,
            copy_engine,
            identity,
            ..
        } = &self.context;
        let mut staging = ExportStaging {
            stream: copy_engine.stream()?,
            stage: host.take(PAGES_PER_FETCH * page_layout.max_layer_bytes())?,
            rows: Vec::new(),
        };
        // Wait for writes of the rows, for the non-paged copy, and for earlier uses of the staging
        // block.
        copy_engine.sync_all()?;
        let fetched;
        let non_paged = match &*self.non_paged {
            StateCopy::Host(block) => block.bytes(),
            StateCopy::Device(buffer) => {
                let block = host.take(buffer.bytes())?;
                copy_engine.sync_all()?;
                // SAFETY: the stream is synchronised before the block is read.
                unsafe {
                    copy_engine.copy(
                        &staging.stream,
                        block.address(),
                        buffer.ptr(),
                        buffer.bytes(),
                    )
                }?;
                staging.stream.sync()?;
                fetched = block;
                fetched.bytes()
            }
        };
        let sections: Vec<(SectionKind, usize)> = self.sections().collect();
        let header = SnapshotHeader {
            identity: *identity,
            position: self.position as u64,
            sections: number(sections.len()),
        };
        write_header(sink, &header)?;
        let parts = NonPagedLayout::new(state, self.position);
        for (kind, layer) in sections {
            let converted;
            let content: &[u8] = match kind {
                SectionKind::DraftKeys | SectionKind::DraftValues => {
                    let side = match kind {
                        SectionKind::DraftKeys => KvSide::Keys,
                        _ => KvSide::Values,
                    };
                    converted = self.ring_rows(&parts, non_paged, (side, layer));
                    &converted
                }
                SectionKind::MtpHidden => &non_paged[parts.range(PartKind::MtpHidden)],
                _ => match (state.layer(layer), kind) {
                    (LayerState::Delta(group, index), SectionKind::DeltaState) => {
                        let all = &non_paged
                            [parts.range(PartKind::States(index_of(&state.delta, group)))];
                        let one = &all[index * group.state_bytes..][..group.state_bytes];
                        converted = neutral_states(group, one);
                        &converted
                    }
                    (LayerState::Delta(group, index), _) => {
                        let all = &non_paged
                            [parts.range(PartKind::Windows(index_of(&state.delta, group)))];
                        &all[index * group.window_bytes..][..group.window_bytes]
                    }
                    (LayerState::Kv(group, index), kind) => {
                        let side = match kind {
                            SectionKind::Keys => KvSide::Keys,
                            _ => KvSide::Values,
                        };
                        let group = (index_of(&state.kv, group), group);
                        self.read_rows(group, (side, index), &mut staging)?
                    }
                },
            };
            let of_draft = matches!(kind, SectionKind::DraftKeys | SectionKind::DraftValues);
            let first = if of_draft {
                0
            } else {
                self.context.first_layer
            };
            write_section(sink, kind, number(first + layer), content)?;
        }
        Ok(())
    }
}

impl Drop for CudaDetachedSnapshot {
    fn drop(&mut self) {
        let page_pool = &self.context.page_pool;
        page_pool.lock().release_snapshot(self.pages.drain(..));
        *page_pool.exports() -= 1;
        page_pool.export_ended.notify_all();
    }
}
