//! A scorer's passes over chunks of its prompt: layer by layer, with the keys and values of one
//! layer at a time.
//!
//! The residual stream of the whole prompt lies beside the passes' buffers. The rows of a chunk are
//! copied to where the launches expect them and back, so a layer's launches are the same for every
//! chunk. A chunk's keys are written before its queries are attended to. Attention is causal, so
//! one pass over the chunks completes a layer.

use contract::{AttentionSpec, BlockSparsity, LoadConfig, Mixer};

use super::{DequantBuffers, PANEL_ALIGN, PrefillBuilder};
use crate::gpu_props::GpuProps;
use crate::launch::attention::{self, Cache, KeptBlocks, Shape, kv_layout};
use crate::launch::gated_delta::{self, Layer, Slots};
use crate::launch::gemm::prefill::DequantScratch;
use crate::launch::logits::LogitsReduction;
use crate::launch::norm::RowSource;
use crate::launch::score::{self, BlockBuffers, TailBuffers, TailInputs};
use crate::launch::{CompileUnit, Launch, embedding};
use crate::memory::BumpAllocator;
use crate::numerics::Numerics;
use crate::plan::draft::DraftLists;
use crate::plan::layer_arguments::shape;
use crate::plan::rotations::Rotations;
use crate::plan::select::block_sparse_attention;
use crate::plan::{Addresses, MOE_COUNTER_BYTES, Plan, PlanContext, StageBoundary};
use crate::scorer::ScoreCall;
use crate::state::{PAGE_SIZE, SequenceCapacity, State};
use crate::step::ChunkHead;
use crate::weights::{AttentionWeights, DeltaWeights, MixerWeights, Weights};

const BLOCK: usize = BlockSparsity::BLOCK;

/// What a scorer's passes are built for.
pub(crate) struct ScoringModel<'a> {
    /// The model up to its exit layer, and how keys and values are stored.
    pub(crate) load_config: &'a LoadConfig,
    pub(crate) weights: &'a Weights,
    pub(crate) gpu: GpuProps,
    /// Rows of a chunk, a multiple of 128.
    pub(crate) rows: usize,
    /// The longest prompt.
    pub(crate) max_tokens: usize,
    /// Most tail queries.
    pub(crate) max_tail: usize,
}

/// Device memory that the host writes, copies or reads.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ScoringAddresses {
    /// [`ScoreCall`].
    pub(crate) call: u64,
    /// [`ChunkHead`] and the tokens of a chunk.
    pub(crate) chunk: u64,
    /// f32 `[rows][hidden]`: the residual stream of a chunk.
    pub(crate) residual: u64,
    /// f32 `[max_tokens][hidden]`: the residual stream of the prompt.
    pub(crate) stream: u64,
    /// Recurrent state and window of a delta layer, and their bytes.
    pub(crate) state: (u64, usize),
    /// f32 `[tail][tokens]`, zero before the first layer.
    pub(crate) best: u64,
    /// f32 `[chunks]`.
    pub(crate) scores: u64,
}

/// The launches of one layer over a chunk.
#[derive(Debug)]
pub(crate) struct ScoringLayer<L = Launch> {
    /// Tail queries among the chunk's rows; empty without attention.
    pub(crate) queries: Vec<L>,
    /// Tail logits alone, for the exit layer; empty without attention.
    pub(crate) keys: Vec<L>,
    /// The layer's output.
    pub(crate) output: Vec<L>,
    /// The launch of `output` that makes tail logits.
    pub(crate) tail_logits: Option<usize>,
    /// After all chunks: takes over the layer's weights; empty without attention.
    pub(crate) raise: Vec<L>,
}

/// Every list of launches of a scorer.
pub(crate) struct ScoringPlans {
    /// The embeddings of a chunk's tokens.
    pub(crate) embed: Vec<Launch>,
    pub(crate) layers: Vec<ScoringLayer>,
    /// After the last layer: chunk scores.
    pub(crate) chunk_scores: Vec<Launch>,
    pub(crate) addresses: ScoringAddresses,
    /// Tables to be written once: address and bytes.
    pub(crate) tables: Vec<(u64, Vec<u8>)>,
    /// Runs to be zeroed once: address and bytes.
    pub(crate) zeroed: [(u64, usize); 2],
}

impl ScoringPlans {
    /// Builds the lists. Keys and values of one layer take memory from the first region, recurrent
    /// states of one layer from the second, everything else from the third.
    pub(crate) fn new(
        model: &ScoringModel<'_>,
        [kv, states, scratch]: [&mut BumpAllocator; 3],
    ) -> ScoringPlans {
        let ScoringModel {
            load_config,
            weights,
            rows,
            max_tokens,
            ..
        } = *model;
        let spec = &*load_config.target;
        let eps = spec.norm_eps;
        let shapes = || spec.attention_layers().map(|a| shape(a, load_config, eps));
        let pages = max_tokens.div_ceil(PAGE_SIZE);
        let page_table = scratch.take(4 * pages);
        let cache = layer_cache(shapes(), (page_table, pages), kv);
        let state = delta_state(spec.delta_layers().map(gated_delta::Shape::of), states);
        let dequant = DequantBuffers::of(spec, weights, rows);
        let own = Addresses {
            chunk: scratch.take(ChunkHead::bytes(rows)),
            residual: scratch.take(4 * rows * spec.hidden),
            moe_counter: scratch.take(MOE_COUNTER_BYTES),
            split_k_flags: scratch.take(dequant.split_k_flag_bytes),
            ..Addresses::default()
        };
        let call = scratch.take(ScoreCall::BYTES);
        let stream = scratch.take(4 * max_tokens * spec.hidden);
        let tail = tail_buffers(model, shapes(), scratch);
        let blocks = block_buffers(model, shapes(), scratch);
        let (rotations, mut tables) = Rotations::of(spec.attention_layers(), load_config, scratch);
        let places = (0..pages).map(|page| i32::try_from(page).unwrap_or(i32::MAX));
        tables.push((page_table, places.flat_map(i32::to_le_bytes).collect()));
        let slots = SequenceCapacity {
            sequences: 1,
            pages_per_sequence: pages,
            pool_pages: pages,
        };
        // The passes get the addresses of their one layer's memory instead.
        let no_layers = State {
            slots,
            kv: Vec::new(),
            delta: Vec::new(),
            page_table,
            draft: None,
            hidden: None,
        };
        let context = PlanContext {
            spec,
            weights,
            state: &no_layers,
            load_config,
            gpu: model.gpu,
            tree_windows: false,
            numerics: Numerics::Fastest,
            fused_layers: false,
            gemv: false,
            dense: true,
            addresses: own,
            dequant,
            rotations,
            reduce: LogitsReduction {
                vocab: spec.vocab,
                stride: spec.vocab,
                k: 1,
            },
            draft_lists: DraftLists::ByDepth,
            draft_ids: 0,
            stage: StageBoundary::whole(load_config, false),
            exchange: None,
        };
        let dequantized = scratch.take_aligned(dequant.bytes, PANEL_ALIGN);
        let builder = PrefillBuilder {
            context: &context,
            rows,
            scratch: DequantScratch {
                weights: dequantized,
                weight_bytes: dequant.bytes,
                split_k_flags: own.split_k_flags,
            },
            features: None,
            arena: *scratch,
            peak: *scratch,
            plan: Plan::default(),
        };
        let mut scoring = ScoringBuilder {
            builder,
            call,
            cache,
            state,
            blocks,
            tail,
        };
        let source = RowSource::Chunk(own.chunk);
        let embed = vec![embedding::gather(
            weights.embedding,
            rows,
            source,
            own.residual,
        )];
        let layers = (0..spec.layers.len()).map(|i| scoring.layer(i)).collect();
        let heads = spec.attention_layers().last().map_or(1, |a| a.n_heads);
        *scratch = scoring.builder.peak;
        ScoringPlans {
            embed,
            layers,
            chunk_scores: score::chunk_scores(heads, call, tail).into(),
            addresses: ScoringAddresses {
                call,
                chunk: own.chunk,
                residual: own.residual,
                stream,
                state: state.whole,
                best: tail.best,
                scores: tail.scores,
            },
            tables,
            zeroed: [
                (own.split_k_flags, dequant.split_k_flag_bytes),
                (own.moe_counter, MOE_COUNTER_BYTES),
            ],
        }
    }

    /// Every unit that a launch is compiled from, each once.
    pub(crate) fn units(&self) -> Vec<CompileUnit> {
        let of_layers = self.layers.iter().flat_map(|layer| {
            let lists = [&layer.queries, &layer.keys, &layer.output, &layer.raise];
            lists.into_iter().flatten()
        });
        let all = self.embed.iter().chain(of_layers).chain(&self.chunk_scores);
        let mut units: Vec<CompileUnit> = all.map(|launch| launch.unit.clone()).collect();
        units.sort();
        units.dedup();
        units
    }
}

/// Memory of the recurrent state of the widest delta layer.
#[derive(Debug, Clone, Copy)]
struct DeltaMemory {
    state: u64,
    window: u64,
    /// All of it, and its bytes.
    whole: (u64, usize),
}

fn delta_state(
    shapes: impl Iterator<Item = gated_delta::Shape>,
    arena: &mut BumpAllocator,
) -> DeltaMemory {
    let (mut state_bytes, mut window_bytes) = (0, 0);
    for shape in shapes {
        state_bytes = state_bytes.max(shape.state_bytes());
        window_bytes = window_bytes.max(shape.window_bytes());
    }
    let state = arena.take(state_bytes);
    let window = arena.take(window_bytes);
    let begin = usize::try_from(window - state).expect("a state is far below an address");
    DeltaMemory {
        state,
        window,
        whole: (state, begin + window_bytes),
    }
}

/// Keys and values of the widest layer, one after the other.
fn layer_cache(
    shapes: impl Iterator<Item = Shape>,
    (page_table, pages): (u64, usize),
    arena: &mut BumpAllocator,
) -> Cache {
    let (mut keys, mut values) = (0, 0);
    for shape in shapes {
        let rows = pages * PAGE_SIZE * shape.n_kv_heads;
        keys = keys.max(rows * kv_layout::row_bytes(shape.k, shape.head_dim).0);
        values = values.max(rows * kv_layout::row_bytes(shape.v, shape.head_dim).0);
    }
    Cache {
        k: arena.take(keys),
        k_scale: 0,
        v: arena.take(values),
        v_scale: 0,
        page_table,
        max_pages: pages,
    }
}

fn tail_buffers(
    model: &ScoringModel<'_>,
    shapes: impl Iterator<Item = Shape>,
    arena: &mut BumpAllocator,
) -> TailBuffers {
    let (mut heads, mut width) = (0, 0);
    for shape in shapes {
        heads = heads.max(shape.n_heads);
        width = width.max(shape.n_heads * shape.head_dim);
    }
    let (max_tail, max_tokens) = (model.max_tail, model.max_tokens);
    TailBuffers {
        max_tail,
        max_tokens,
        queries: arena.take(4 * max_tail * width),
        logits: arena.take(4 * max_tail * heads * max_tokens),
        stats: arena.take(4 * max_tail * heads * 2),
        best: arena.take(4 * max_tail * max_tokens),
        means: arena.take(8 * max_tokens),
        scores: arena.take(4 * max_tokens),
    }
}

fn block_buffers(
    model: &ScoringModel<'_>,
    shapes: impl Iterator<Item = Shape>,
    arena: &mut BumpAllocator,
) -> BlockBuffers {
    let max_blocks = model.max_tokens.div_ceil(BLOCK);
    let mut most = [0; 3];
    for shape in shapes {
        let bytes = BlockBuffers::bytes(&shape, model.rows, max_blocks);
        for (most, bytes) in most.iter_mut().zip(bytes) {
            *most = bytes.max(*most);
        }
    }
    let [means, lse, kept] = most.map(|bytes| arena.take(bytes));
    BlockBuffers {
        max_blocks,
        means,
        lse,
        kept,
    }
}

/// Addresses of bytes to be written there.
/// An attention layer and its shape for the kernels.
type Layered<'a> = (&'a AttentionSpec, &'a Shape);

/// Builds a scorer's lists from the launches of a prefill.
struct ScoringBuilder<'a> {
    builder: PrefillBuilder<'a>,
    call: u64,
    cache: Cache,
    state: DeltaMemory,
    blocks: BlockBuffers,
    tail: TailBuffers,
}

impl ScoringBuilder<'_> {
    fn layer(&mut self, i: usize) -> ScoringLayer {
        let context = self.builder.context;
        let weights = &context.weights.layers[i];
        let norm = weights.mixer_norm;
        let mut layer = ScoringLayer {
            queries: Vec::new(),
            keys: Vec::new(),
            output: Vec::new(),
            tail_logits: None,
            raise: Vec::new(),
        };
        match (&context.spec.layers[i].mixer, &weights.mixer) {
            (Mixer::Attention(a), MixerWeights::Attention(w)) => {
                let shape = shape(a, context.load_config, context.spec.norm_eps);
                layer.queries = self.queries((a, &shape), w, norm);
                layer.keys = self.keys((a, &shape), w, norm);
                layer.tail_logits = Some(self.attention((a, &shape), w, norm));
                layer.raise = score::raise(a.n_heads, self.call, self.tail).into();
            }
            (Mixer::GatedDelta(d), MixerWeights::Delta(w)) => {
                let state = self.delta_layer(w);
                self.builder
                    .block(|b, arena| b.delta(d, w, norm, state, arena));
            }
            _ => unreachable!("weights were laid out from this spec"),
        }
        self.builder.block(|b, arena| b.ffn(&weights.ffn, 0, arena));
        layer.output = self.take();
        layer
    }

    fn take(&mut self) -> Vec<Launch> {
        std::mem::take(&mut self.builder.plan.launches)
    }

    fn delta_layer(&self, w: &DeltaWeights) -> Layer {
        let slot = |at| Slots { at, stride: 0 };
        Layer {
            state: slot(self.state.state),
            window: slot(self.state.window),
            factors: slot(0),
            conv: w.conv,
            a: w.a,
            dt: w.dt,
            norm: w.norm,
            eps: self.builder.context.spec.norm_eps,
        }
    }

    /// Projected rows for the tail's launches.
    fn tail_inputs(
        &self,
        a: &AttentionSpec,
        w: &AttentionWeights,
        (rows, norm): (u64, u64),
    ) -> TailInputs {
        TailInputs {
            rows,
            kv_stride: w.k.rows,
            norm,
            frequencies: self.builder.context.frequencies(a),
        }
    }

    fn tail_logits(&self, (a, shape): Layered<'_>, w: &AttentionWeights, k: u64) -> Launch {
        let from = self.tail_inputs(a, w, (k, w.k_norm));
        score::tail_logits(shape, self.builder.chunk(), self.call, from, self.tail)
    }

    fn queries(&mut self, layer: Layered<'_>, w: &AttentionWeights, norm: u64) -> Vec<Launch> {
        let mut q = 0;
        self.builder.block(|b, arena| {
            let y = b.normed(norm, &[w.q], arena);
            q = b.project(y, &[w.q], arena)[0];
        });
        let from = self.tail_inputs(layer.0, w, (q, w.q_norm));
        let chunk = self.builder.chunk();
        let launch = score::tail_queries(layer.1, chunk, self.call, from, self.tail);
        self.builder.push(launch);
        self.take()
    }

    fn keys(&mut self, layer: Layered<'_>, w: &AttentionWeights, norm: u64) -> Vec<Launch> {
        let mut k = 0;
        self.builder.block(|b, arena| {
            let y = b.normed(norm, &[w.k], arena);
            k = b.project(y, &[w.k], arena)[0];
        });
        let launch = self.tail_logits(layer, w, k);
        self.builder.push(launch);
        self.take()
    }

    /// Attention over the kept blocks. Returns the index of the launch that makes tail logits.
    fn attention(&mut self, (a, shape): Layered<'_>, w: &AttentionWeights, norm: u64) -> usize {
        let (call, cache, blocks) = (self.call, self.cache, self.blocks);
        let input_projections = w.input_projections();
        let mut projected = Vec::new();
        let mut out = None;
        self.builder.block(|b, arena| {
            let y = b.normed(norm, &input_projections, arena);
            projected = b.project(y, &input_projections, arena);
            out = Some(b.out(&[w.o], a.n_heads * a.head_dim, arena));
        });
        // The buffers stay valid until the next block of launches begins.
        let out = out.expect("the block has just been built");
        let at = self.builder.plan.launches.len();
        let tail_logits = self.tail_logits((a, shape), w, projected[1]);
        let b = &mut self.builder;
        b.push(tail_logits);
        b.append((a, shape), w, &projected, cache);
        let (chunk, q) = (b.chunk(), projected[0]);
        let launches = score::kept_blocks(shape, chunk, call, (q, cache), blocks);
        b.plan.launches.extend(launches);
        let selected = block_sparse_attention(shape);
        b.plan.note(selected.kernel.file(), selected.reason);
        let kept = KeptBlocks {
            at: blocks.kept,
            words: blocks.words(),
        };
        let kernel = selected.kernel;
        let launch = attention::prefill_block_sparse(kernel, shape, chunk, (q, cache), kept, out);
        b.push(launch);
        b.add(out, w.o);
        at
    }
}
