//! Moves experts between host memory and slots of the device, between steps.
//!
//! A step's counts of uses come down behind it. After the wait at its end, the table of addresses
//! changes: an expert that leaves a slot is read from host memory from then on, and the copy of the
//! one that comes starts behind that change on a stream of its own. The slot's address enters the
//! table after the next step, behind the copy. So no launch reads a slot that is being written, and
//! no step waits unless it ends before a copy does.

use std::time::Instant;

use contract::DeviceError;

use super::Engine;
use crate::driver::{CopyEngine, Event, Gpu, Pinned, Stream};
use crate::experts::cache::{ExpertCache, Swap};
use crate::weights::PlacedLayers;

/// Most bytes that are copied for one step: a sixth of a millisecond of PCIe 5.0.
const BYTES_PER_STEP: usize = 8 << 20;

/// The slots of a model's experts.
pub(super) struct ExpertSlots {
    /// Copies of experts. Dropping it waits for them.
    stream: Stream,
    copy_engine: CopyEngine,
    /// Recorded on the main stream behind a change of the table.
    begun: Event,
    /// Recorded behind the copies that `in_flight` has.
    end: Event,
    placed: PlacedLayers,
    cache: ExpertCache,
    /// As the device has it, `[layer][expert]`.
    table: Pinned<u64>,
    /// Uses of each expert, `[layer][expert]`.
    counts: Pinned<u32>,
    /// Swaps whose experts have no slot in the table yet.
    in_flight: Vec<Swap>,
    /// Swaps of one step.
    most: usize,
}

/// Page-locked bytes that slots of so many experts of all layers take.
pub(crate) fn pinned_bytes(placed: &PlacedLayers) -> usize {
    (size_of::<u64>() + size_of::<u32>()) * placed.layers.len() * placed.n_experts
}

impl ExpertSlots {
    fn new(gpu: &Gpu, placed: PlacedLayers) -> Result<ExpertSlots, DeviceError> {
        let (layers, n_experts) = (placed.layers.len(), placed.n_experts);
        let largest = placed.layers.iter().map(|layer| layer.expert_bytes).max();
        let mut slots = ExpertSlots {
            stream: gpu.new_stream()?,
            copy_engine: gpu.copy_engine(),
            begun: Event::new(gpu)?,
            end: Event::new(gpu)?,
            cache: ExpertCache::new(layers, n_experts, placed.n_slots),
            table: gpu.pinned(layers * n_experts)?,
            counts: gpu.pinned(layers * n_experts)?,
            in_flight: Vec::new(),
            most: (BYTES_PER_STEP / largest.unwrap_or(1).max(1)).max(1),
            placed,
        };
        for layer in 0..layers {
            for expert in 0..n_experts {
                let at = if expert < slots.placed.n_slots {
                    slots.placed.layers[layer].slot(expert)
                } else {
                    slots.placed.layers[layer].in_host(expert)
                };
                slots.set(layer, expert, at);
            }
        }
        Ok(slots)
    }

    /// Sets an address of the table, which no queued copy may read.
    fn set(&mut self, layer: usize, expert: usize, at: u64) {
        self.table.as_mut_slice()[layer * self.placed.n_experts + expert] = at;
    }

    fn upload(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        let (to, all) = (self.placed.tables, 0..self.table.len());
        // SAFETY: the table lives as long as the engine's stream has work, and is written only
        // after a wait for the main stream.
        unsafe { gpu.copy_to_device(gpu.stream(), to, &self.table, all) }
    }

    /// Applies what the last step's counts ask for. The main stream is idle.
    fn advance(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        let arrived = std::mem::take(&mut self.in_flight);
        let swaps = self.cache.step(self.counts.as_slice(), self.most);
        if arrived.is_empty() && swaps.is_empty() {
            return Ok(());
        }
        if !arrived.is_empty() {
            gpu.stream().wait(&self.end)?;
        }
        for swap in arrived {
            let at = self.placed.layers[swap.layer].slot(swap.slot);
            self.set(swap.layer, swap.comes, at);
        }
        for swap in &swaps {
            let at = self.placed.layers[swap.layer].in_host(swap.leaves);
            self.set(swap.layer, swap.leaves, at);
        }
        self.upload(gpu)?;
        if swaps.is_empty() {
            return Ok(());
        }
        gpu.stream().record(&self.begun)?;
        self.stream.wait(&self.begun)?;
        for swap in &swaps {
            let layer = &self.placed.layers[swap.layer];
            let (to, from) = (layer.slot(swap.slot), layer.in_host(swap.comes));
            // SAFETY: experts in host memory are never written after loading, and the engine drops
            // this stream before their memory.
            unsafe {
                self.copy_engine
                    .copy(&self.stream, to, from, layer.expert_bytes)
            }?;
        }
        self.stream.record(&self.end)?;
        self.in_flight = swaps;
        Ok(())
    }
}

impl Drop for ExpertSlots {
    fn drop(&mut self) {
        let reads = self.cache.reads();
        let percent = 100.0 * reads.in_slots as f64 / reads.all.max(1) as f64;
        tracing::info!(
            reads = reads.all,
            in_slots = format!("{percent:.1} %"),
            "experts read while the model was open"
        );
    }
}

impl Engine {
    /// Fills the slots with the first experts of each layer, and the table. Host memory has all
    /// experts.
    pub(crate) fn place_experts(&mut self, placed: &PlacedLayers) -> Result<(), DeviceError> {
        let slots = ExpertSlots::new(&self.gpu, placed.clone())?;
        let counts = size_of::<u32>() * slots.counts.len();
        self.regions.zero(&self.gpu, placed.uses, counts)?;
        slots.upload(&self.gpu)?;
        self.gpu.sync()?;
        let (began, mut bytes) = (Instant::now(), 0);
        for layer in &placed.layers {
            let of_slots = placed.n_slots * layer.expert_bytes;
            let stream = self.gpu.stream();
            // SAFETY: the wait below comes before anything else touches the memory.
            unsafe {
                slots
                    .copy_engine
                    .copy(stream, layer.slots, layer.host, of_slots)
            }?;
            bytes += of_slots;
        }
        self.gpu.sync()?;
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(
            on_device = placed.n_slots,
            n_experts = placed.n_experts,
            layers = placed.layers.len(),
            bus_bytes_per_s = (bytes as f64 / seconds) as u64,
            "experts in slots of the device, all others read from host memory"
        );
        self.expert_slots = Some(slots);
        Ok(())
    }

    /// Queues the copy of the counts of uses to the host.
    pub(super) fn queue_expert_counts(&mut self) -> Result<(), DeviceError> {
        let Some(slots) = &mut self.expert_slots else {
            return Ok(());
        };
        let (all, from) = (0..slots.counts.len(), slots.placed.uses);
        // SAFETY: read after the wait at the end of the step.
        unsafe {
            self.gpu
                .copy_to_host(self.gpu.stream(), &mut slots.counts, all, from)
        }
    }

    /// Moves experts after a step, whose end was waited for.
    pub(super) fn move_experts(&mut self) -> Result<(), DeviceError> {
        match &mut self.expert_slots {
            Some(slots) => slots.advance(&self.gpu),
            None => Ok(()),
        }
    }
}
