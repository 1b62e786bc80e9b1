//! The non-paged state of a slot, and copies of it.

use std::ops::Range;

use contract::DeviceError;

use super::page_layout::planes;
use crate::driver::{Buffer, Gpu};
use crate::exec::copy_stream::{AFTER_ALL_LAYERS, CopyStream};
use crate::pinned::PinnedBlock;
use crate::state::{PAGE_SIZE, State};

/// Layers copied between two marks. A later step waits for the mark of its first layers only.
const LAYERS_PER_BATCH: usize = 4;

/// A copy of the non-paged state of a slot.
pub(super) enum StateCopy {
    Device(Buffer<u8>),
    Host(PinnedBlock),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Save,
    Restore,
}

/// The content of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    /// Delta states of all layers of a group.
    States(usize),
    /// Convolution windows of all layers of a group.
    Windows(usize),
    /// One plane of a draft layer's ring, as [`planes`] orders them.
    DraftRing(usize, usize),
    /// The last committed position's hidden row, for a multi-token-prediction head.
    MtpHidden,
}

/// One contiguous part of every slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StatePart {
    pub(super) what: PartKind,
    /// Address in slot 0, and the stride between slots.
    pub(super) base: u64,
    pub(super) slot_bytes: usize,
    /// Bytes copied from the start of the slot's part, and their offset in the copy.
    pub(super) bytes: usize,
    pub(super) at: usize,
}

/// The parts that a snapshot copies from a slot.
#[derive(Debug)]
pub(super) struct NonPagedLayout {
    pub(super) parts: Vec<StatePart>,
    pub(super) bytes: usize,
}

impl NonPagedLayout {
    /// For a slot with `position` committed tokens.
    pub(super) fn new(state: &State, position: usize) -> NonPagedLayout {
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
        if let Some(hidden) = state.hidden {
            let row = 4 * hidden.width;
            let bytes = (hidden.rows_per_slot * row, row);
            non_paged.push(PartKind::MtpHidden, hidden.at, bytes);
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

    /// The byte range of a part in the copy.
    pub(super) fn range(&self, what: PartKind) -> std::ops::Range<usize> {
        let part = self.parts.iter().find(|part| part.what == what);
        part.map_or(0..0, |part| part.at..part.at + part.bytes)
    }

    /// Queues copies of all parts between a slot and a copy, in order of first use by a step.
    pub(super) fn copy(
        &self,
        (copy_stream, gpu): (&mut CopyStream, &Gpu),
        state: &State,
        slot: usize,
        copied: &StateCopy,
        direction: Direction,
    ) -> Result<(), DeviceError> {
        let ends = |what: PartKind, range: Range<usize>| {
            let part = self.parts.iter().find(|part| part.what == what);
            let part = part.expect("parts come from the same state");
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
        copy_stream.begin(gpu, slot)?;
        for (first, i, layers) in batches {
            let group = &state.delta[i];
            for (what, bytes) in [
                (PartKind::States(i), group.state_bytes),
                (PartKind::Windows(i), group.window_bytes),
            ] {
                let (to, from) = ends(what, layers.start * bytes..layers.end * bytes);
                // SAFETY: the copy is as long as its parts, and the pools outlive the queue.
                unsafe { copy_stream.copy(to, from, layers.len() * bytes) }?;
            }
            copy_stream.mark(gpu, slot, first)?;
        }
        for part in &self.parts {
            if let PartKind::DraftRing(..) | PartKind::MtpHidden = part.what {
                let (to, from) = ends(part.what, 0..part.bytes);
                // SAFETY: as above.
                unsafe { copy_stream.copy(to, from, part.bytes) }?;
            }
        }
        copy_stream.mark(gpu, slot, AFTER_ALL_LAYERS)?;
        Ok(())
    }
}

impl StateCopy {
    pub(super) fn address(&self) -> u64 {
        match self {
            StateCopy::Device(buffer) => buffer.ptr(),
            StateCopy::Host(block) => block.address(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            StateCopy::Device(buffer) => buffer.bytes(),
            StateCopy::Host(block) => block.len(),
        }
    }
}
