//! A scorer on the GPU: a model without LM head, run over a whole prompt layer by layer.
//!
//! Beside its weights it has the residual stream of the prompt, one layer's keys and values, and
//! the buffers of one chunk ([`ScoringPlans`](crate::plan::ScoringPlans)). It runs on a stream of
//! its own, so decode steps of the served model go on between its launches: their blocks are placed
//! first ([`Gpu::with_first_stream`]). Only chunk scores come back. Formulas: [`contract::scorer`].

mod call;
mod layout;

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::time::Instant;

use contract::scorer::check_score_call;
use contract::{
    DeviceError, LoadProgress, Mixer, ModelSpec, ScoreProgress, ScoreSettings, Scorer,
    ScorerConfig, ScorerInfo, TokenId,
};

use crate::compile::Modules;
use crate::driver::{Event, Function, Gpu, Pinned};
use crate::exec::Regions;
use crate::launch::Launch;
use crate::options::Options;
use crate::plan::{ScoringAddresses, ScoringLayer};
use crate::probe::GpuInfo;
use crate::step::ChunkHead;
use crate::weights::{Sources, WeightSet};

pub(crate) use call::ScoreCall;
pub(crate) use layout::ScorerLayout;
use layout::{CHUNK_ROWS, MAX_TAIL};

/// The widest moving average, in tokens.
const MAX_SMOOTHING: usize = 4097;
/// Chunks of a layer that are queued before the host waits for the first of them.
const QUEUED_CHUNKS: usize = 3;

/// A launch with its function.
type Ready = (Function, Launch);

/// An opened scorer. Fields are dropped in order: what points at memory goes before the memory.
pub(crate) struct CudaScorer {
    info: ScorerInfo,
    /// Whether each layer has attention.
    is_attention: Vec<bool>,
    embed: Vec<Ready>,
    layers: Vec<ScoringLayer<Ready>>,
    chunk_scores: Vec<Ready>,
    addresses: ScoringAddresses,
    /// Values of a row of the residual stream.
    hidden: usize,
    /// Rows of a chunk.
    rows: usize,
    /// Headers of all chunks of a call with their tokens, that of the tail, and that of the call.
    headers: Pinned<u8>,
    /// Chunk scores.
    scores: Pinned<f32>,
    /// Keeps the functions loaded.
    _modules: Modules,
    /// Keeps everything that the launches address.
    _regions: Regions,
    gpu: Gpu,
}

/// Which of a layer's parts are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerRole {
    /// The layer's output.
    Below,
    /// The output and the tail's weights.
    Scored,
    /// The tail's weights alone.
    Exit,
}

/// The parts of each layer that a call needs; the last layer has attention.
fn roles(is_attention: &[bool], scored_layers: Option<usize>) -> Vec<LayerRole> {
    let scored = scored_layers.unwrap_or(usize::MAX);
    let mut above = 0;
    let of_layer = |is_attention: &bool| {
        if !is_attention {
            return LayerRole::Below;
        }
        above += 1;
        match above {
            1 => LayerRole::Exit,
            _ if above <= scored => LayerRole::Scored,
            _ => LayerRole::Below,
        }
    };
    let mut roles: Vec<LayerRole> = is_attention.iter().rev().map(of_layer).collect();
    roles.reverse();
    roles
}

/// The last attention layer up to `exit_layer`, and how many there are up to it.
fn exit_of(spec: &ModelSpec, exit_layer: Option<usize>) -> Option<(usize, usize)> {
    let last = exit_layer.unwrap_or(usize::MAX);
    let is_attention = |layer: &usize| matches!(spec.layers[*layer].mixer, Mixer::Attention(_));
    let layers = (0..spec.layers.len()).filter(|layer| *layer <= last);
    let attention: Vec<usize> = layers.filter(is_attention).collect();
    attention.last().map(|exit| (*exit, attention.len()))
}

impl CudaScorer {
    /// Loads the layers up to the exit.
    pub(crate) fn open(
        config: &ScorerConfig,
        (info, options): (&GpuInfo, &Options),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CudaScorer, DeviceError> {
        let planned = ScorerLayout::new(config, info, [0; 4])?;
        let gpu = Gpu::open_known(info.clone())?;
        let (free, total) = gpu.memory()?;
        let unused = options.vram_limit.map_or(free, |limit| {
            let in_use = total.saturating_sub(free);
            free.min(limit.saturating_sub(in_use))
        });
        planned.require(unused)?;
        let started = Instant::now();
        let units = planned.plans.units();
        let modules = Modules::compile(&gpu, &units, &options.compile, &mut |at| {
            tracing::debug!(done = at.done, total = at.total, unit = %at.unit, "kernel ready");
        })?;
        let byte = if options.poison { 0xff } else { 0 };
        let [weights, kv, states, scratch] = planned.device_sizes;
        let sizes = [weights, kv, states, scratch, 0, planned.table_bytes];
        let mut regions = Regions::new(&gpu, sizes, byte)?;
        let [weights, kv, states, scratch, _, table] = regions.bases();
        let layout = ScorerLayout::at(config, info, ([weights, kv, states, scratch], table))?;
        let sources = Sources {
            target: &*config.weights,
            draft: None,
        };
        let sets = &[WeightSet::Target];
        layout.weights.load(&gpu, (sources, sets), progress)?;
        let table = (regions.table.device_ptr(), regions.table.as_mut_slice());
        layout.weights.load_table(sources, table, progress)?;
        for (at, bytes) in &layout.plans.tables {
            regions.write(&gpu, *at, bytes)?;
        }
        for (at, bytes) in layout.plans.zeroed {
            regions.zero(&gpu, at, bytes)?;
        }
        gpu.sync()?;
        let ready = |launches: Vec<Launch>| {
            let pairs = launches
                .into_iter()
                .map(|launch| Ok((modules.function(&gpu, &launch)?, launch)));
            pairs.collect::<Result<Vec<Ready>, DeviceError>>()
        };
        let layers = layout.plans.layers.into_iter().map(|layer| {
            Ok(ScoringLayer {
                queries: ready(layer.queries)?,
                keys: ready(layer.keys)?,
                output: ready(layer.output)?,
                tail_logits: layer.tail_logits,
                raise: ready(layer.raise)?,
            })
        });
        let layers = layers.collect::<Result<Vec<_>, DeviceError>>()?;
        tracing::info!(
            device = %layout.info.device,
            kernels = units.len(),
            open_ms = started.elapsed().as_millis() as u64,
            weights_bytes = layout.info.weights_bytes,
            working_bytes = planned.working_bytes(),
            "scorer opened on the GPU"
        );
        Ok(CudaScorer {
            is_attention: layout.is_attention,
            embed: ready(layout.plans.embed)?,
            layers,
            chunk_scores: ready(layout.plans.chunk_scores)?,
            addresses: layout.plans.addresses,
            hidden: layout.hidden,
            rows: layout.rows,
            headers: gpu.pinned(header_bytes(config.max_tokens, layout.rows))?,
            scores: gpu.pinned(config.max_tokens)?,
            info: layout.info,
            _modules: modules,
            _regions: regions,
            gpu,
        })
    }

    fn run(&self, launches: &[Ready]) -> Result<(), DeviceError> {
        launches
            .iter()
            .try_for_each(|(function, launch)| self.gpu.run_function(function, launch))
    }

    /// Queues the copy of bytes of the headers to a device address.
    fn upload(&self, to: u64, range: Range<usize>) -> Result<(), DeviceError> {
        // SAFETY: headers are written at the beginning of a call only, after a wait for the stream.
        unsafe {
            self.gpu
                .copy_to_device(self.gpu.stream(), to, &self.headers, range)
        }
    }

    /// Queues the copy of rows of the prompt's residual stream to those of a chunk.
    fn load_rows(&self, rows: Range<usize>) -> Result<(), DeviceError> {
        let row_bytes = 4 * self.hidden;
        let from = self.addresses.stream + (rows.start * row_bytes) as u64;
        self.gpu
            .copy_bytes(self.addresses.residual, from, rows.len() * row_bytes)
    }

    /// The other way round.
    fn store_rows(&self, rows: Range<usize>) -> Result<(), DeviceError> {
        let row_bytes = 4 * self.hidden;
        let to = self.addresses.stream + (rows.start * row_bytes) as u64;
        self.gpu
            .copy_bytes(to, self.addresses.residual, rows.len() * row_bytes)
    }

    /// Writes the headers of a call and uploads that of the call itself.
    fn write_headers(
        &mut self,
        tokens: &[TokenId],
        settings: &ScoreSettings,
    ) -> Result<HeaderPlaces, DeviceError> {
        // The last call may have been given up.
        self.gpu.sync()?;
        let n = tokens.len();
        let mut bytes = Vec::with_capacity(header_bytes(n, self.rows));
        let mut chunks = Vec::new();
        for (i, piece) in tokens.chunks(self.rows).enumerate() {
            chunks.push(bytes.len());
            ChunkHead::new(0, i * self.rows, piece.len()).write(piece, &mut bytes);
        }
        let tail = bytes.len();
        let tail_tokens = settings.tail_tokens;
        ChunkHead::new(0, n - tail_tokens, tail_tokens).write(&[], &mut bytes);
        let call = bytes.len();
        bytes.extend_from_slice(&ScoreCall::new(n, settings).bytes());
        self.headers.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        self.upload(self.addresses.call, call..bytes.len())?;
        Ok(HeaderPlaces { chunks, tail })
    }
}

/// Where headers begin in page-locked memory.
struct HeaderPlaces {
    chunks: Vec<usize>,
    tail: usize,
}

/// Bytes of all headers of a call.
fn header_bytes(tokens: usize, rows: usize) -> usize {
    let heads = tokens.div_ceil(rows) + 1;
    heads * ChunkHead::bytes(0) + 4 * tokens + ScoreCall::BYTES
}

/// Chunks under way, and the progress of a call.
struct ChunkQueue<'a> {
    queued: VecDeque<(Event, usize)>,
    at: ScoreProgress,
    report: &'a mut dyn FnMut(ScoreProgress) -> ControlFlow<()>,
}

impl ChunkQueue<'_> {
    /// Notes that `rows` rows have been queued; reports those that are done, and waits if too many
    /// are under way.
    fn queue(&mut self, gpu: &Gpu, rows: usize) -> Result<ControlFlow<()>, DeviceError> {
        let event = Event::new(gpu)?;
        gpu.stream().record(&event)?;
        self.queued.push_back((event, rows));
        self.wait(QUEUED_CHUNKS)
    }

    /// Waits until at most `left` chunks are under way.
    fn wait(&mut self, left: usize) -> Result<ControlFlow<()>, DeviceError> {
        while self.queued.len() > left {
            let Some((event, rows)) = self.queued.pop_front() else {
                break;
            };
            event.sync()?;
            self.at.done += rows;
            if (self.report)(self.at).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

impl Scorer for CudaScorer {
    fn info(&self) -> &ScorerInfo {
        &self.info
    }

    fn score(
        &mut self,
        tokens: &[TokenId],
        settings: &ScoreSettings,
        progress: &mut dyn FnMut(ScoreProgress) -> ControlFlow<()>,
    ) -> Result<Option<Vec<f32>>, DeviceError> {
        check_score_call(&self.info, tokens, settings)?;
        check_limits(settings)?;
        let n = tokens.len();
        let places = self.write_headers(tokens, settings)?;
        let addresses = self.addresses;
        self.gpu
            .zero_bytes(addresses.best, 4 * settings.tail_tokens * n)?;
        let pieces: Vec<(usize, Range<usize>)> = (0..n)
            .step_by(self.rows)
            .map(|at| at..n.min(at + self.rows))
            .zip(places.chunks)
            .map(|(rows, header)| (header, rows))
            .collect();
        for (header, rows) in &pieces {
            let bytes = ChunkHead::bytes(rows.len());
            self.upload(addresses.chunk, *header..header + bytes)?;
            self.run(&self.embed)?;
            self.store_rows(rows.clone())?;
        }
        let mut steps = ChunkQueue {
            queued: VecDeque::new(),
            at: ScoreProgress {
                done: 0,
                total: n * self.layers.len(),
            },
            report: progress,
        };
        let head_bytes = ChunkHead::bytes(0);
        let roles = roles(&self.is_attention, settings.scored_layers);
        for (layer, role) in self.layers.iter().zip(roles) {
            if layer.tail_logits.is_none() {
                let (at, bytes) = addresses.state;
                self.gpu.zero_bytes(at, bytes)?;
            }
            if role != LayerRole::Below {
                self.upload(addresses.chunk, places.tail..places.tail + head_bytes)?;
                self.load_rows(n - settings.tail_tokens..n)?;
                self.run(&layer.queries)?;
            }
            for (header, rows) in &pieces {
                self.upload(addresses.chunk, *header..header + head_bytes)?;
                self.load_rows(rows.clone())?;
                match (role, layer.tail_logits) {
                    (LayerRole::Exit, _) => self.run(&layer.keys)?,
                    (LayerRole::Below, Some(unused)) => {
                        self.run(&layer.output[..unused])?;
                        self.run(&layer.output[unused + 1..])?;
                    }
                    _ => self.run(&layer.output)?,
                }
                if role != LayerRole::Exit {
                    self.store_rows(rows.clone())?;
                }
                if steps.queue(&self.gpu, rows.len())?.is_break() {
                    return Ok(None);
                }
            }
            if role != LayerRole::Below {
                self.run(&layer.raise)?;
            }
        }
        self.run(&self.chunk_scores)?;
        if steps.wait(0)?.is_break() {
            return Ok(None);
        }
        let chunks = n.div_ceil(settings.chunk);
        let (gpu, to) = (&self.gpu, &mut self.scores);
        // SAFETY: read after the wait below.
        unsafe { gpu.copy_to_host(gpu.stream(), to, 0..chunks, addresses.scores) }?;
        gpu.sync()?;
        Ok(Some(self.scores.as_slice()[..chunks].to_vec()))
    }
}

/// Refuses settings beyond what the buffers hold.
fn check_limits(settings: &ScoreSettings) -> Result<(), DeviceError> {
    let refused = |detail: String| {
        Err(DeviceError::InvalidCall {
            call: "score",
            detail,
        })
    };
    if settings.tail_tokens > MAX_TAIL {
        return refused(format!(
            "a tail of {} tokens, the GPU scores with up to {MAX_TAIL}",
            settings.tail_tokens
        ));
    }
    if settings.smoothing > MAX_SMOOTHING {
        return refused(format!(
            "smoothing over {} tokens, the GPU smooths over up to {MAX_SMOOTHING}",
            settings.smoothing
        ));
    }
    Ok(())
}

const _: () = assert!(MAX_TAIL <= CHUNK_ROWS, "the tail is one chunk");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_scored_from_the_exit_down() {
        use LayerRole::{Below, Exit, Scored};
        let attention = [true, false, true, false, true];
        assert_eq!(
            roles(&attention, None),
            [Scored, Below, Scored, Below, Exit]
        );
        assert_eq!(
            roles(&attention, Some(1)),
            [Below, Below, Below, Below, Exit]
        );
        assert_eq!(
            roles(&attention, Some(2)),
            [Below, Below, Scored, Below, Exit]
        );
    }

    #[test]
    fn headers_of_the_longest_prompt_fit_their_memory() {
        // Two whole chunks and one of 9 tokens, the tail and the call.
        let bytes = header_bytes(2 * 128 + 9, 128);
        let parts = [128, 128, 9, 0].map(ChunkHead::bytes);
        assert_eq!(bytes, parts.iter().sum::<usize>() + ScoreCall::BYTES);
    }
}
