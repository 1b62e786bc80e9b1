//! States on their way between slots and copies of them in host memory, on a stream of their own.
//!
//! What saves or restores a slot comes behind all that the main stream has queued, and the main
//! stream goes on at once. Only who touches the slot next waits for it, and a chunk only layer by
//! layer: the copies of a layer are through long before a chunk has come to it, so that nobody
//! waits, and no memory of the card is needed in between.

use contract::DeviceError;

use super::Engine;
use crate::driver::{CopyEngine, Event, Gpu, Stream};

/// The last copies of a slot, which are no layer's.
pub(crate) const BEHIND_ALL: usize = usize::MAX;

/// A stream of copies.
pub(crate) struct Lane {
    stream: Stream,
    copy_engine: CopyEngine,
    /// What the main stream had queued when copies were.
    begun: Event,
    /// The last copy of all.
    end: Event,
    slots: Vec<Marks>,
}

/// Places in the stream's queue that layers of a slot wait for: the layer of each, rising.
#[derive(Default)]
struct Marks {
    /// Events outlive their use.
    events: Vec<Event>,
    layers: Vec<usize>,
}

impl Lane {
    pub(super) fn new(gpu: &Gpu, slots: usize) -> Result<Lane, DeviceError> {
        Ok(Lane {
            stream: gpu.new_stream()?,
            copy_engine: gpu.copy_engine(),
            begun: Event::new(gpu)?,
            end: Event::new(gpu)?,
            slots: (0..slots).map(|_| Marks::default()).collect(),
        })
    }

    /// Copies of `slot` that are queued from here on come behind all that the main stream has
    /// queued.
    pub(crate) fn begin(&mut self, gpu: &Gpu, slot: usize) -> Result<(), DeviceError> {
        // What waited for earlier copies of the slot may wait for later ones: they come in order.
        self.slots[slot].layers.clear();
        gpu.stream().record(&self.begun)?;
        self.stream.wait(&self.begun)
    }

    /// Queues a copy between the card and page-locked memory.
    ///
    /// # Safety
    /// Host memory must stay alive until the stream has passed the copy, and not be touched until then.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's word.
        unsafe { self.copy_engine.copy(&self.stream, to, from, bytes) }
    }

    /// Whoever touches `layer` of the slot, or one above, waits for what was queued up to here.
    /// Layers rise.
    pub(crate) fn mark(&mut self, gpu: &Gpu, slot: usize, layer: usize) -> Result<(), DeviceError> {
        let marks = &mut self.slots[slot];
        if marks.events.len() == marks.layers.len() {
            marks.events.push(Event::new(gpu)?);
        }
        self.stream.record(&marks.events[marks.layers.len()])?;
        marks.layers.push(layer);
        self.stream.record(&self.end)
    }

    /// What a chunk of the slot waits for, and behind how many of its launches; `ends`: launches up
    /// to each layer's end.
    pub(super) fn gates(&self, slot: usize, ends: &[usize]) -> Vec<(usize, &Event)> {
        let marks = &self.slots[slot];
        let behind = |layer: usize| match layer {
            0 => 0,
            layer => ends[..layer.min(ends.len())].last().copied().unwrap_or(0),
        };
        let gates = marks.layers.iter().zip(&marks.events);
        gates
            .map(|(layer, event)| (behind(*layer), event))
            .collect()
    }

    /// The main stream waits for all copies of the slot.
    pub(super) fn met(&mut self, slot: usize) {
        self.slots[slot].layers.clear();
    }

    /// Has the main stream wait for all copies of the slot.
    fn meet(&mut self, gpu: &Gpu, slot: usize) -> Result<(), DeviceError> {
        let marks = &mut self.slots[slot];
        let last = marks.layers.len().checked_sub(1);
        marks.layers.clear();
        last.map_or(Ok(()), |last| gpu.stream().wait(&marks.events[last]))
    }
}

impl Engine {
    /// Has whatever is queued from here on come behind copies of a slot's states that are under
    /// way.
    pub(crate) fn meet(&mut self, slot: usize) -> Result<(), DeviceError> {
        self.lane.meet(&self.gpu, slot)
    }

    /// The same for all copies, so that memory they go to or come from may be used by others.
    pub(crate) fn meet_all(&self) -> Result<(), DeviceError> {
        self.gpu.stream().wait(&self.lane.end)
    }

    /// What copies states, and the card.
    pub(crate) fn lane(&mut self) -> (&mut Lane, &Gpu) {
        (&mut self.lane, &self.gpu)
    }
}
