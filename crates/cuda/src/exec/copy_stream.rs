//! Copies of recurrent states between slots and host memory, on a separate stream.
//!
//! A save or a restore of a slot starts when the main stream has done what was queued before; the
//! main stream itself does not wait. The next use of the slot waits for the copy, a chunk layer by
//! layer. A layer's copies end long before a chunk reaches the layer, so the wait costs nothing,
//! and no GPU memory is needed between.

use contract::DeviceError;

use super::Engine;
use crate::driver::{CopyEngine, Event, Gpu, Stream};

/// Marks copies of a slot that belong to no layer.
pub(crate) const AFTER_ALL_LAYERS: usize = usize::MAX;

/// A stream for state copies.
pub(crate) struct CopyStream {
    stream: Stream,
    copy_engine: CopyEngine,
    /// Recorded on the main stream before the copies.
    begun: Event,
    /// Recorded after the last copy.
    end: Event,
    slots: Vec<LayerEvents>,
}

/// Events that the layers of a slot wait for, with the layer of each, in rising order.
#[derive(Default)]
struct LayerEvents {
    /// Reused; never shrinks.
    events: Vec<Event>,
    layers: Vec<usize>,
}

impl CopyStream {
    pub(super) fn new(gpu: &Gpu, slots: usize) -> Result<CopyStream, DeviceError> {
        Ok(CopyStream {
            stream: gpu.new_stream()?,
            copy_engine: gpu.copy_engine(),
            begun: Event::new(gpu)?,
            end: Event::new(gpu)?,
            slots: (0..slots).map(|_| LayerEvents::default()).collect(),
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

    /// Queues a copy between the GPU and page-locked memory.
    ///
    /// # Safety
    /// Host memory must stay alive until the stream has passed the copy, and not be touched until
    /// then.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { self.copy_engine.copy(&self.stream, to, from, bytes) }
    }

    /// Users of `layer` of the slot, or of a higher layer, wait for the copies queued so far. Calls
    /// come in rising order of layers.
    pub(crate) fn mark(&mut self, gpu: &Gpu, slot: usize, layer: usize) -> Result<(), DeviceError> {
        let marks = &mut self.slots[slot];
        if marks.events.len() == marks.layers.len() {
            marks.events.push(Event::new(gpu)?);
        }
        self.stream.record(&marks.events[marks.layers.len()])?;
        marks.layers.push(layer);
        self.stream.record(&self.end)
    }

    /// Events that a chunk of the slot waits for, each with the launch that waits; `ends`: launches
    /// up to the end of each layer.
    pub(super) fn layer_waits(&self, slot: usize, ends: &[usize]) -> Vec<(usize, &Event)> {
        let marks = &self.slots[slot];
        let behind = |layer: usize| match layer {
            0 => 0,
            layer => ends[..layer.min(ends.len())].last().copied().unwrap_or(0),
        };
        let layer_waits = marks.layers.iter().zip(&marks.events);
        layer_waits
            .map(|(layer, event)| (behind(*layer), event))
            .collect()
    }

    /// The main stream waits for all copies of the slot.
    pub(super) fn clear_waits(&mut self, slot: usize) {
        self.slots[slot].layers.clear();
    }

    /// Has the main stream wait for all copies of the slot.
    fn wait_for_copies(&mut self, gpu: &Gpu, slot: usize) -> Result<(), DeviceError> {
        let marks = &mut self.slots[slot];
        let last = marks.layers.len().checked_sub(1);
        marks.layers.clear();
        last.map_or(Ok(()), |last| gpu.stream().wait(&marks.events[last]))
    }
}

impl Engine {
    /// Has whatever is queued from here on come behind copies of a slot's states that are under
    /// way.
    pub(crate) fn wait_for_copies(&mut self, slot: usize) -> Result<(), DeviceError> {
        self.copy_stream.wait_for_copies(&self.gpu, slot)
    }

    /// The same for all copies, so that memory they go to or come from may be used by others.
    pub(crate) fn wait_for_all_copies(&self) -> Result<(), DeviceError> {
        self.gpu.stream().wait(&self.copy_stream.end)
    }

    /// The copy stream and the GPU, for copies behind the last commit.
    pub(crate) fn copy_stream(&mut self) -> Result<(&mut CopyStream, &Gpu), DeviceError> {
        self.join_commit()?;
        Ok((&mut self.copy_stream, &self.gpu))
    }
}
