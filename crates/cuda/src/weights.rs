//! Device layout of a model's weights, and their loading.
//!
//! [`crate::pack`] repacks matrices by weight kind. Vectors become f32. The embedding table keeps
//! its file layout if the gather kernel reads it, because steps look up its rows. Threads repack
//! into page-locked buffers, and finished buffers are copied while others fill.
//!
//! The embedding table of a large model stays in page-locked host memory. A step reads 3 KB of it
//! per token, which is negligible. On the device it would take the memory of tens of thousands of
//! tokens.

mod delta;
mod draft;
mod experts;
mod host;
mod mtp;
mod part;
mod scorer;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use contract::quant::dequantize_row;
use contract::{
    AttentionSpec, DenseSpec, DeviceError, DraftSpec, FeedForward, GateActivation, LoadProgress,
    Mixer, WeightError, WeightRef, WeightSource,
};

use crate::driver::{Event, Gpu, Pinned};
use crate::launch::embedding::EmbeddingTable;
use crate::memory::BumpAllocator;
use crate::pack::{self, WeightKind};

pub(crate) use delta::DeltaWeights;
pub(crate) use draft::{Conditioned, ConvWeights, DraftLayerWeights, DraftWeights};
use experts::StackHalf;
pub(crate) use experts::{ExpertWeights, FeedForwardWeights, PlacedLayers};
use host::Apart;
pub(crate) use mtp::MtpWeights;
pub(crate) use part::{WeightPart, fuses, mixer_inputs, table_on_host};

/// Bytes of one page-locked staging buffer.
const STAGING_BYTES: usize = 16 << 20;
/// Concurrent copies. Their buffers are not being filled.
const COPIES_IN_FLIGHT: usize = 2;
/// More threads do not read a file faster.
const MAX_THREADS: usize = 16;

/// A matrix `[rows, cols]` in device layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WeightMatrix {
    pub(crate) kind: WeightKind,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) at: u64,
}

/// Addresses of all weights.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) embedding: EmbeddingTable,
    pub(crate) layers: Vec<LayerWeights>,
    /// 0 in a scorer.
    pub(crate) final_norm: u64,
    /// Without rows in a scorer and in a pipeline stage below the last.
    pub(crate) head: WeightMatrix,
    /// In a pipeline stage below the last whose layers may be fused: the norm before the mixer of
    /// the layer above, and the matrices that project its input.
    pub(crate) above: Option<(u64, Vec<WeightMatrix>)>,
    /// The multi-token-prediction head, if there is one.
    pub(crate) mtp: Option<MtpWeights>,
    pub(crate) draft: Option<DraftWeights>,
    /// Where experts lie, if not all of them are on the device.
    pub(crate) experts: Option<PlacedLayers>,
    items: Vec<WeightEntry>,
}

/// A feed-forward and the norm before it.
#[derive(Debug, Clone)]
pub(crate) struct FfnWeights {
    pub(crate) norm: u64,
    pub(crate) gate: WeightMatrix,
    pub(crate) up: WeightMatrix,
    pub(crate) down: WeightMatrix,
    /// The function of the gate.
    pub(crate) activation: GateActivation,
}

/// One layer. Vectors are addresses of f32 values; absent norms are 0.
#[derive(Debug, Clone)]
pub(crate) struct LayerWeights {
    pub(crate) mixer_norm: u64,
    pub(crate) mixer: MixerWeights,
    /// Behind the mixer.
    pub(crate) post_mixer_norm: u64,
    pub(crate) ffn: FeedForwardWeights,
    /// Behind the feed-forward.
    pub(crate) post_ffn_norm: u64,
}

/// The mixer of a layer.
#[derive(Debug, Clone)]
pub(crate) enum MixerWeights {
    Attention(AttentionWeights),
    Delta(DeltaWeights),
}

impl MixerWeights {
    /// The matrices that project its input, in the mixer's order.
    pub(crate) fn input_projections(&self) -> Vec<WeightMatrix> {
        match self {
            MixerWeights::Attention(w) => w.input_projections().to_vec(),
            MixerWeights::Delta(w) => vec![w.qkv, w.z, w.beta, w.alpha],
        }
    }

    /// The output projection.
    pub(crate) fn out(&self) -> WeightMatrix {
        match self {
            MixerWeights::Attention(w) => w.o,
            MixerWeights::Delta(w) => w.out,
        }
    }
}

/// Weights of an attention mixer. Absent norms and sinks are 0.
#[derive(Debug, Clone)]
pub(crate) struct AttentionWeights {
    pub(crate) q_norm: u64,
    pub(crate) k_norm: u64,
    /// `[n_heads]`: a score without a value that joins each head's softmax.
    pub(crate) sinks: u64,
    pub(crate) q: WeightMatrix,
    pub(crate) k: WeightMatrix,
    pub(crate) v: WeightMatrix,
    pub(crate) o: WeightMatrix,
    /// Of `q`, `k` and `v`, f32; 0 for none.
    pub(crate) biases: [u64; 3],
}

impl AttentionWeights {
    /// The matrices that project its input.
    pub(crate) fn input_projections(&self) -> [WeightMatrix; 3] {
        [self.q, self.k, self.v]
    }
}

/// One weight to load.
#[derive(Debug, Clone)]
struct WeightEntry {
    of: WeightSet,
    weight: WeightRef,
    /// The rows of it that are loaded, if not all.
    half: Option<StackHalf>,
    /// How the experts of a stack lie, if not one behind the other.
    apart: Option<Apart>,
    at: u64,
    form: Encoding,
}

/// The file of a weight, or a host table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightSet {
    Target,
    Draft,
    /// In host memory: the target's embedding table, that of its multi-token-prediction head, and
    /// experts that do not fit the device.
    HostTable,
}

/// Conversion of a weight's file bytes.
#[derive(Debug, Clone, Copy)]
enum Encoding {
    Packed(WeightKind),
    /// F32 values as [`WeightKind::F16`].
    Halves,
    Floats,
    Table,
}

impl Encoding {
    /// Device bytes of `rows` rows.
    fn bytes(self, weight: &WeightRef, rows: usize) -> usize {
        match self {
            Encoding::Packed(kind) => kind.bytes(rows, weight.cols),
            Encoding::Halves => WeightKind::F16.bytes(rows, weight.cols),
            Encoding::Floats => 4 * rows * weight.cols,
            Encoding::Table => rows * pack::table_type(weight.ty).row_bytes(weight.cols),
        }
    }
}

/// Assigns consecutive addresses to weights.
struct LayoutBuilder<'a> {
    of: WeightSet,
    arena: &'a mut BumpAllocator,
    items: Vec<WeightEntry>,
}

impl<'a> LayoutBuilder<'a> {
    fn new(of: WeightSet, arena: &'a mut BumpAllocator) -> LayoutBuilder<'a> {
        LayoutBuilder {
            of,
            arena,
            items: Vec::new(),
        }
    }

    fn item(&mut self, weight: &WeightRef, form: Encoding) -> u64 {
        self.part(weight, None, form)
    }

    /// The rows of `half`, or all.
    fn part(&mut self, weight: &WeightRef, half: Option<StackHalf>, form: Encoding) -> u64 {
        let mut entry = WeightEntry {
            of: self.of,
            weight: weight.clone(),
            half,
            apart: None,
            at: 0,
            form,
        };
        entry.at = self.arena.take(form.bytes(weight, entry.rows()));
        let at = entry.at;
        self.items.push(entry);
        at
    }

    fn matrix(&mut self, weight: &WeightRef) -> WeightMatrix {
        let kind = WeightKind::of(weight.ty);
        WeightMatrix {
            kind,
            rows: weight.rows,
            cols: weight.cols,
            at: self.item(weight, Encoding::Packed(kind)),
        }
    }

    fn vector(&mut self, weight: &WeightRef) -> u64 {
        self.item(weight, Encoding::Floats)
    }

    /// 0 for none.
    fn optional_vector(&mut self, weight: Option<&WeightRef>) -> u64 {
        weight.map_or(0, |weight| self.vector(weight))
    }

    /// A table whose single rows are read.
    fn table(&mut self, weight: &WeightRef) -> EmbeddingTable {
        EmbeddingTable {
            ty: pack::table_type(weight.ty),
            width: weight.cols,
            at: self.item(weight, Encoding::Table),
        }
    }

    fn ffn(&mut self, norm: &WeightRef, ffn: &DenseSpec) -> FfnWeights {
        FfnWeights {
            norm: self.vector(norm),
            gate: self.matrix(&ffn.gate),
            up: self.matrix(&ffn.up),
            down: self.matrix(&ffn.down),
            activation: ffn.activation,
        }
    }

    fn attention(&mut self, a: &AttentionSpec) -> AttentionWeights {
        AttentionWeights {
            q_norm: self.optional_vector(a.q_norm.as_ref()),
            k_norm: self.optional_vector(a.k_norm.as_ref()),
            sinks: 0,
            q: self.matrix(&a.q),
            k: self.matrix(&a.k),
            v: self.matrix(&a.v),
            o: self.matrix(&a.o),
            biases: [&a.biases.q, &a.biases.k, &a.biases.v]
                .map(|bias| self.optional_vector(bias.as_ref())),
        }
    }
}

impl Weights {
    /// Lays out all weights of a model that passed [`crate::check::require_supported`]. The target
    /// uses `arena`, a host table `table_arena`, the draft `draft_arena`.
    pub(crate) fn new(
        (part, arena): (WeightPart<'_>, &mut BumpAllocator),
        table_arena: &mut BumpAllocator,
        (draft, draft_arena): (Option<&DraftSpec>, &mut BumpAllocator),
    ) -> Weights {
        let WeightPart { spec, slots, .. } = part;
        let on_host = part.table_on_host;
        let mut table = LayoutBuilder::new(WeightSet::HostTable, table_arena);
        let mut plan = LayoutBuilder::new(WeightSet::Target, arena);
        let table_builder = if on_host { &mut table } else { &mut plan };
        let embedding = table_builder.table(&spec.embedding);
        let mut placed = slots.and_then(|slots| PlacedLayers::new(spec, slots, &mut plan));
        let layers = spec.layers.iter().map(|layer| LayerWeights {
            mixer_norm: plan.vector(&layer.mixer_norm),
            mixer: match &layer.mixer {
                Mixer::Attention(a) => MixerWeights::Attention(plan.attention(a)),
                Mixer::GatedDelta(d) => MixerWeights::Delta(plan.delta(d)),
            },
            ffn: match (&layer.ffn, &mut placed) {
                (FeedForward::Experts(experts), Some(placed)) => {
                    let placed = (placed, &mut table);
                    let experts = plan.placed_experts(&layer.ffn_norm, experts, placed);
                    FeedForwardWeights::Experts(Box::new(experts))
                }
                _ => plan.feed_forward(&layer.ffn_norm, &layer.ffn),
            },
            post_mixer_norm: plan.optional_vector(layer.post_mixer_norm.as_ref()),
            post_ffn_norm: plan.optional_vector(layer.post_ffn_norm.as_ref()),
        });
        let layers = layers.collect();
        let (final_norm, head) = (plan.vector(&spec.final_norm), plan.matrix(&spec.head));
        let above = part.above.map(|layer| {
            let inputs = mixer_inputs(&layer.mixer);
            let norm = plan.vector(&layer.mixer_norm);
            (
                norm,
                inputs
                    .into_iter()
                    .map(|matrix| plan.matrix(matrix))
                    .collect(),
            )
        });
        let shared = mtp::SharedWeights {
            embedding,
            final_norm,
            head,
        };
        let mtp = spec.mtp.as_ref().and_then(|mtp| {
            let table = on_host.then_some(&mut table);
            mtp::lay_out((spec, mtp), shared, &mut plan, table)
        });
        let mut items = plan.items;
        items.append(&mut table.items);
        let mut plan = LayoutBuilder::new(WeightSet::Draft, draft_arena);
        let draft = draft.map(|draft| draft::lay_out(draft, &mut plan));
        items.append(&mut plan.items);
        Weights {
            embedding,
            layers,
            final_norm,
            head,
            above,
            mtp,
            draft,
            experts: placed,
            items,
        }
    }

    /// Weights of the given sets in loading order.
    fn of<'a>(&'a self, sets: &'a [WeightSet]) -> impl Iterator<Item = &'a WeightEntry> {
        self.items.iter().filter(|item| sets.contains(&item.of))
    }

    /// Page-locked memory that loading takes on this machine. Freed when it ends.
    pub(crate) fn staging_bytes(&self, sets: &[WeightSet]) -> usize {
        let chunks: Vec<LoadChunk<'_>> = self.of(sets).flat_map(WeightEntry::chunks).collect();
        let (threads, largest) = staging(&chunks);
        (threads + COPIES_IN_FLIGHT) * largest
    }

    /// Loads the given sets to the device and waits for them.
    pub(crate) fn load(
        &self,
        gpu: &Gpu,
        (sources, sets): (Sources<'_>, &[WeightSet]),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<(), DeviceError> {
        let chunks: Vec<LoadChunk<'_>> = self.of(sets).flat_map(WeightEntry::chunks).collect();
        let (threads, largest) = staging(&chunks);
        let copies = gpu.new_stream()?;
        let mut stages = Vec::with_capacity(threads + COPIES_IN_FLIGHT);
        for _ in 0..threads + COPIES_IN_FLIGHT {
            stages.push(gpu.pinned::<u8>(largest)?);
        }
        let mut at = LoadProgress {
            done_bytes: 0,
            total_bytes: self.of(sets).map(|i| i.source_bytes(i.rows())).sum(),
        };
        progress(at);
        let (free, stage) = mpsc::channel::<Pinned<u8>>();
        let stage = Arc::new(Mutex::new(stage));
        let (done, filled) = mpsc::channel();
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..threads {
                let (stage, done, next, chunks) =
                    (Arc::clone(&stage), done.clone(), &next, &chunks);
                scope.spawn(move || {
                    loop {
                        // Take a buffer first: the owner of a chunk must be able to fill it.
                        let Ok(buffer) = stage
                            .lock()
                            .map_err(drop)
                            .and_then(|s| s.recv().map_err(drop))
                        else {
                            return;
                        };
                        let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) else {
                            return;
                        };
                        let mut buffer = buffer;
                        let result = chunk.fill(sources, buffer.as_mut_slice());
                        if done.send((chunk, buffer, result)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(done);
            for buffer in stages {
                let _ = free.send(buffer);
            }
            let mut under_way: VecDeque<(Event, Pinned<u8>)> = VecDeque::new();
            let mut outcome = Ok(());
            for _ in 0..chunks.len() {
                if under_way.len() == COPIES_IN_FLIGHT
                    && let Some((event, buffer)) = under_way.pop_front()
                {
                    outcome = event.sync();
                    let _ = free.send(buffer);
                }
                let Ok((chunk, buffer, result)) = filled.recv() else {
                    break;
                };
                outcome = outcome.and(result.map_err(DeviceError::from));
                if outcome.is_err() {
                    break;
                }
                // SAFETY: the buffer stays in `under_way` until its event has passed.
                let copied =
                    unsafe { gpu.copy_to_device(&copies, chunk.at, &buffer, 0..chunk.bytes) };
                outcome = copied.and_then(|()| {
                    let event = Event::new(gpu)?;
                    copies.record(&event)?;
                    under_way.push_back((event, buffer));
                    Ok(())
                });
                if outcome.is_err() {
                    break;
                }
                at.done_bytes += chunk.source_bytes();
                progress(at);
            }
            // Ends the threads that wait for a buffer.
            drop(free);
            let arrived = copies.sync();
            outcome.and(arrived)
        })
    }
}

/// Packing threads, and bytes of each thread's buffer.
fn staging(chunks: &[LoadChunk<'_>]) -> (usize, usize) {
    let largest = chunks.iter().map(|p| p.bytes).max().unwrap_or(0);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    (threads.min(MAX_THREADS).min(chunks.len().max(1)), largest)
}

/// The weight files.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    pub(crate) target: &'a dyn WeightSource,
    pub(crate) draft: Option<&'a dyn WeightSource>,
}

/// Rows of one weight that fit one buffer.
struct LoadChunk<'a> {
    item: &'a WeightEntry,
    first_row: usize,
    rows: usize,
    at: u64,
    bytes: usize,
}

impl WeightEntry {
    /// Rows that are loaded.
    fn rows(&self) -> usize {
        match self.half {
            Some(half) => half.rows(&self.weight),
            None => self.weight.rows,
        }
    }

    /// Bytes of so many rows in the file.
    fn source_bytes(&self, rows: usize) -> u64 {
        (rows * self.weight.ty.row_bytes(self.weight.cols)) as u64
    }

    /// Splits the weight at row tiles into chunks of one buffer.
    fn chunks(&self) -> impl Iterator<Item = LoadChunk<'_>> {
        let (weight, form) = (&self.weight, self.form);
        let step = match form {
            Encoding::Packed(kind) => kind.row_step(),
            Encoding::Halves => WeightKind::F16.row_step(),
            Encoding::Floats | Encoding::Table => 1,
        };
        let step_bytes = form.bytes(weight, step).max(1);
        let per_chunk = (STAGING_BYTES / step_bytes).max(1) * step;
        let all = self.rows();
        // Rows that lie one behind the other, and bytes from them to the next.
        let Apart { rows: run, stride } = self.apart.unwrap_or(Apart {
            rows: all.max(1),
            stride: 0,
        });
        let runs = (0..all).step_by(run).enumerate();
        runs.flat_map(move |(i, begin)| {
            let end = (begin + run).min(all);
            (begin..end).step_by(per_chunk).map(move |first_row| {
                let rows = per_chunk.min(end - first_row);
                let before = i * stride + form.bytes(weight, first_row - begin);
                LoadChunk {
                    item: self,
                    first_row,
                    rows,
                    at: self.at + before as u64,
                    bytes: form.bytes(weight, rows),
                }
            })
        })
    }
}

impl LoadChunk<'_> {
    fn source_bytes(&self) -> u64 {
        self.item.source_bytes(self.rows)
    }

    /// Writes the rows in device layout to the front of `out`.
    fn fill(&self, sources: Sources<'_>, out: &mut [u8]) -> Result<(), WeightError> {
        let weight = &self.item.weight;
        let source = match (self.item.of, sources.draft) {
            (WeightSet::Draft, Some(draft)) => draft,
            _ => sources.target,
        };
        let bytes = source.bytes(weight)?;
        if bytes.len() != weight.bytes() {
            return Err(WeightError::Mismatch {
                name: Arc::clone(&weight.name),
                detail: format!("{} bytes, {} expected", bytes.len(), weight.bytes()),
            });
        }
        let row_bytes = weight.ty.row_bytes(weight.cols);
        let rows = self.first_row..self.first_row + self.rows;
        let bytes = match self.item.half {
            Some(half) => Cow::Owned(half.gather(rows, row_bytes, bytes)),
            None => Cow::Borrowed(&bytes[rows.start * row_bytes..rows.end * row_bytes]),
        };
        let bytes = &*bytes;
        let out = &mut out[..self.bytes];
        match self.item.form {
            Encoding::Table => pack::table_rows(weight.ty, weight.cols, bytes, out),
            Encoding::Floats => {
                let mut row = vec![0.0; weight.cols];
                let rows = bytes.chunks_exact(row_bytes);
                for (bytes, out) in rows.zip(out.chunks_exact_mut(4 * weight.cols)) {
                    dequantize_row(weight.ty, bytes, &mut row);
                    for (x, out) in row.iter().zip(out.chunks_exact_mut(4)) {
                        out.copy_from_slice(&x.to_le_bytes());
                    }
                }
            }
            Encoding::Halves => pack::pack_halves(weight.cols, bytes, out),
            Encoding::Packed(_) => pack::pack(weight.ty, weight.cols, bytes, out),
        }
        Ok(())
    }
}
