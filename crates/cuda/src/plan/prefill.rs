//! A chunk of a prompt: embedding and every layer, many rows at a time. Cached rows, states and
//! windows are committed on the way; the head is a plan of its own, over the rows that were asked
//! for.

mod experts;
mod scoring;
mod stage;

use contract::{AttentionSpec, GateActivation, GatedDeltaSpec, Mixer, ModelSpec};

use super::gemm::gemm_matrix;
use super::layer_arguments::{cache, delta_inputs, delta_layer, norm_behind, shape, sum_of_shards};
use super::mtp::{Head, chunk_stream};
use super::select::{prefill_attention, prefill_gemm};
use super::{Plan, PlanContext};
use crate::launch::all_reduce::ExchangeShape;
use crate::launch::attention::{self, AppendTarget, Cache, Positions, Projections};
use crate::launch::draft::capture_hidden_states;
use crate::launch::gated_delta::{self, ChunkLaunch, Layer};
use crate::launch::gemm::panels::{ChunkRows, Panels, PrefillActivations};
use crate::launch::gemm::prefill::{self as gemm, DequantScratch, PrefillGemm, PrefillGemmInputs};
use crate::launch::gemm::small_batch::{GemmEpilogue, GemmMatrix};
use crate::launch::mtp::{self, KeptRows};
use crate::launch::norm::panels::{self, F32Rows};
use crate::launch::norm::{self, RmsShape, RowSource};
use crate::launch::{Launch, embedding};
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;
use crate::state::LayerState;
use crate::weights::{
    AttentionWeights, DeltaWeights, DraftLayerWeights, DraftWeights, FeedForwardWeights,
    FfnWeights, LayerWeights, MixerWeights, WeightMatrix, Weights,
};

pub(crate) use scoring::{ScoringAddresses, ScoringLayer, ScoringModel, ScoringPlans};

/// Alignment of panels, in bytes.
const PANEL_ALIGN: u64 = 1024;
/// Maximum dequantized weights at once, in bytes; more than the widest layer of today's models
/// needs.
const MAX_DEQUANTIZED: usize = 512 << 20;

/// Bytes of dequantized weights and of the split-K flags of the GEMMs.
#[derive(Debug, Clone, Copy)]
pub(super) struct DequantBuffers {
    pub(super) bytes: usize,
    pub(super) split_k_flag_bytes: usize,
}

impl DequantBuffers {
    /// For the matrices of a model and chunks of up to `rows` rows.
    pub(super) fn of(spec: &ModelSpec, weights: &Weights, rows: usize) -> DequantBuffers {
        let hidden = spec.hidden;
        let mut bytes = 0;
        let mut fit = |matrices: &[WeightMatrix]| {
            let packed = matrices.iter().filter(|m| m.kind != WeightKind::F32);
            let cols = matrices.first().map_or(hidden, |m| m.cols);
            let all = gemm::dequantized_bytes(packed.map(|m| m.rows), cols);
            bytes = bytes.max(all.clamp(gemm::min_dequantized_bytes(cols), MAX_DEQUANTIZED));
        };
        for layer in &weights.layers {
            match &layer.ffn {
                FeedForwardWeights::Dense(w) => {
                    fit(&[w.gate, w.up]);
                    fit(&[w.down]);
                }
                FeedForwardWeights::Experts(w) => {
                    if let Some(shared) = &w.shared {
                        fit(&[shared.gate, shared.up]);
                        fit(&[shared.down]);
                    }
                }
            }
            match &layer.mixer {
                MixerWeights::Attention(w) => {
                    fit(&[w.q, w.k, w.v]);
                    fit(&[w.o]);
                }
                MixerWeights::Delta(w) => {
                    fit(&[w.qkv, w.z, w.beta, w.alpha]);
                    fit(&[w.out]);
                }
            }
        }
        if let Some(draft) = &weights.draft {
            fit(&[draft.fc]);
            let parts = |w: &DraftLayerWeights| [w.attention.k, w.attention.v];
            let all: Vec<WeightMatrix> = draft.layers.iter().flat_map(parts).collect();
            fit(&all);
        }
        if let Some(mtp) = &weights.mtp {
            fit(&[mtp.eh_proj]);
            fit(&[mtp.attention.k, mtp.attention.v]);
        }
        DequantBuffers {
            bytes,
            split_k_flag_bytes: gemm::split_k_flag_bytes(rows, bytes),
        }
    }
}

/// The plan of a chunk of up to `rows` rows.
pub(super) fn build(
    context: &PlanContext<'_>,
    rows: usize,
    reason: &'static str,
    arena: &mut BumpAllocator,
) -> Plan {
    let weights = arena.take_aligned(context.dequant.bytes, PANEL_ALIGN);
    let mut plan = Plan::default();
    plan.note("gemm/prefill_dequant.cu", reason);
    let mut builder = PrefillBuilder {
        context,
        rows,
        scratch: DequantScratch {
            weights,
            weight_bytes: context.dequant.bytes,
            split_k_flags: context.addresses.split_k_flags,
        },
        features: None,
        arena: *arena,
        peak: *arena,
        plan,
    };
    if let Some(draft) = &context.state.draft {
        builder.features = Some(builder.arena.take(4 * rows * draft.width));
        builder.peak = builder.arena;
    }
    if context.stage.is_first {
        let (at, table) = (context.addresses, context.weights.embedding);
        let source = builder.source();
        let scale = context.spec.embedding_scale;
        builder.push(embedding::scaled(table, rows, source, at.residual, scale));
    } else {
        builder.received_rows();
    }
    for i in 0..context.spec.layers.len() {
        builder.layer(i);
    }
    if let (Some(draft), Some(features)) = (&context.weights.draft, builder.features) {
        builder.block(|b, arena| b.context(draft, features, arena));
    }
    if let Some(head) = Head::of(context) {
        builder.block(|b, arena| b.mtp(&head, arena));
    }
    *arena = builder.peak;
    builder.plan
}

/// Puts a chunk together, layer by layer. Each block's buffers begin at the same place of the
/// arena.
struct PrefillBuilder<'a> {
    context: &'a PlanContext<'a>,
    rows: usize,
    scratch: DequantScratch,
    /// Features of the rows for a draft, f32 `[rows][taps * hidden]`.
    features: Option<u64>,
    /// Where a block's buffers begin.
    arena: BumpAllocator,
    /// The furthest any block has come.
    peak: BumpAllocator,
    plan: Plan,
}

impl PrefillBuilder<'_> {
    fn push(&mut self, launch: Launch) {
        self.plan.launches.push(launch);
    }

    fn source(&self) -> RowSource {
        RowSource::Chunk(self.context.addresses.chunk)
    }

    fn chunk(&self) -> ChunkRows {
        ChunkRows {
            header: self.context.addresses.chunk,
            rows: self.rows,
        }
    }

    fn gemm(&mut self) -> PrefillGemm {
        let selected = prefill_gemm(self.context.gpu);
        self.plan
            .note(selected.kernel.kernel.file(), selected.reason);
        selected.kernel
    }

    /// Buffers of one block, given back when it is complete.
    fn block(&mut self, build: impl FnOnce(&mut Self, &mut BumpAllocator)) {
        let mut arena = self.arena;
        build(self, &mut arena);
        if arena.used() > self.peak.used() {
            self.peak = arena;
        }
    }

    fn layer(&mut self, i: usize) {
        let context = self.context;
        let weights = &context.weights.layers[i];
        match (
            &context.spec.layers[i].mixer,
            &weights.mixer,
            context.state.layer(i),
        ) {
            (Mixer::Attention(a), MixerWeights::Attention(w), LayerState::Kv(group, index)) => {
                let cache = cache(context, group, index);
                self.block(|b, arena| b.attention(a, weights, w, cache, arena));
            }
            (Mixer::GatedDelta(_), MixerWeights::Delta(w), LayerState::Delta(group, index)) => {
                let layer = delta_layer(context, group, index, w);
                self.block(|b, arena| b.delta(&group.spec, w, weights.mixer_norm, layer, arena));
            }
            _ => unreachable!("weights and state were laid out from this spec"),
        }
        self.block(|b, arena| b.ffn(&weights.ffn, weights.post_ffn_norm, arena));
        if let Some(to) = self.features.and_then(|out| context.chunk_capture(i, out)) {
            let (hidden, source) = (context.spec.hidden, self.source());
            let x = context.addresses.residual;
            self.push(capture_hidden_states(hidden, self.rows, source, x, to));
        }
        self.hand_over_layer(i);
        self.plan.layer_ends.push(self.plan.launches.len());
    }

    /// Buffers for rows of `width` values in the forms that `input_projections` want.
    fn out(
        &self,
        input_projections: &[WeightMatrix],
        width: usize,
        arena: &mut BumpAllocator,
    ) -> PrefillActivations {
        let plain = input_projections.iter().any(|m| m.kind == WeightKind::F32);
        let packed = input_projections.iter().any(|m| m.kind != WeightKind::F32);
        let panels = if packed {
            arena.take_aligned(Panels::bytes(self.rows, width), PANEL_ALIGN)
        } else {
            0
        };
        let f32 = if plain {
            arena.take(4 * self.rows * width)
        } else {
            0
        };
        PrefillActivations { panels, f32 }
    }

    /// The draft's keys and values of the chunk's rows, from their features.
    fn context(&mut self, draft: &DraftWeights, features: u64, arena: &mut BumpAllocator) {
        let (context, chunk) = (self.context, self.chunk());
        let (width, hidden) = (draft.fc.cols, draft.fc.rows);
        let input = self.out(&[draft.fc], width, arena);
        let features = F32Rows {
            at: features,
            width,
        };
        self.push(panels::convert(chunk, features, input));
        let raw = self.project(input, &[draft.fc], arena)[0];
        let input_projections = super::draft::context_readers(draft);
        let f = self.out(&input_projections, hidden, arena);
        let rms = RmsShape {
            width: hidden,
            eps: super::draft::eps(context),
        };
        self.push(panels::rms_norm(rms, chunk, raw, draft.hidden_norm, f));
        let projected = self.project(f, &input_projections, arena);
        let at = Positions::Chunk(chunk.header);
        let launches = super::draft::write_draft_context(context, chunk.rows, at, &projected);
        self.plan.launches.extend(launches);
    }

    /// The rows of a multi-token-prediction head, from the chunk's tokens and residual stream.
    fn mtp(&mut self, head: &Head<'_>, arena: &mut BumpAllocator) {
        let (context, rows, hidden) = (self.context, self.rows, self.context.spec.hidden);
        let (chunk, eh_proj) = (self.chunk(), head.weights.eh_proj);
        let source = RowSource::Chunk(chunk.header);
        // The embeddings, then the layer's input. The LM head reads the residual stream afterwards.
        let x = arena.take(4 * rows * hidden);
        self.push(head.embed(rows, source, x));
        let joined = self.out(&[eh_proj], eh_proj.cols, arena);
        let (stream, inputs) = (chunk_stream(context), head.join_inputs(context, x));
        self.push(mtp::join_prefill(rows, stream, inputs, joined));
        let product = gemm_matrix(&eh_proj, x, GemmEpilogue::Store);
        self.products(joined, eh_proj.cols, &[product]);
        let matrices = head.key_value_matrices();
        let y = self.out(&matrices, hidden, arena);
        let rms = RmsShape {
            width: hidden,
            eps: context.spec.norm_eps,
        };
        self.push(panels::rms_norm(rms, chunk, x, head.weights.mixer_norm, y));
        let projected = self.project(y, &matrices, arena);
        let positions = Positions::Chunk(chunk.header);
        self.push(head.append(context, rows, positions, &projected));
        self.push(head.keep(context, rows, KeptRows::LastOfChunk(chunk.header)));
    }

    /// `rms(x)` for `input_projections`.
    fn normed(
        &mut self,
        weight: u64,
        input_projections: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> PrefillActivations {
        let rms = RmsShape {
            width: self.context.spec.hidden,
            eps: self.context.spec.norm_eps,
        };
        let out = self.out(input_projections, rms.width, arena);
        let x = self.context.addresses.residual;
        self.push(panels::rms_norm(rms, self.chunk(), x, weight, out));
        out
    }

    /// Products of one input, each with f32 rows of its own.
    fn project(
        &mut self,
        input: PrefillActivations,
        matrices: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Vec<u64> {
        let outs: Vec<u64> = matrices
            .iter()
            .map(|m| arena.take(4 * self.rows * m.rows))
            .collect();
        let operands: Vec<GemmMatrix> = matrices
            .iter()
            .zip(&outs)
            .map(|(matrix, out)| gemm_matrix(matrix, *out, GemmEpilogue::Store))
            .collect();
        self.products(input, matrices[0].cols, &operands);
        outs
    }

    /// `x += matrix · input`.
    fn add(&mut self, input: PrefillActivations, matrix: WeightMatrix) {
        let x = self.context.addresses.residual;
        self.products(
            input,
            matrix.cols,
            &[gemm_matrix(&matrix, x, GemmEpilogue::Add)],
        );
    }

    /// `x += matrix · input`, through the norm `post_norm` if it is not 0; in a shard the sum of
    /// all shards' products.
    fn add_normed(
        &mut self,
        input: PrefillActivations,
        matrix: WeightMatrix,
        post_norm: u64,
        arena: &mut BumpAllocator,
    ) {
        if let Some(shape) = self.context.exchange {
            let update = self.project(input, &[matrix], arena)[0];
            return self.add_shards(shape, update, post_norm);
        }
        if post_norm == 0 {
            return self.add(input, matrix);
        }
        let update = self.project(input, &[matrix], arena)[0];
        let rows = (self.rows, self.source());
        self.push(norm_behind(self.context, rows, update, post_norm));
    }

    /// `x += sum of the shards' products`, this one's at `update`, through the norm `post_norm` if
    /// it is not 0.
    fn add_shards(&mut self, shape: ExchangeShape, update: u64, post_norm: u64) {
        let rows = (self.rows, self.source());
        let launches = sum_of_shards(self.context, shape, rows, (update, post_norm));
        self.plan.launches.extend(launches);
    }

    fn products(&mut self, input: PrefillActivations, cols: usize, matrices: &[GemmMatrix]) {
        let inputs = PrefillGemmInputs {
            panels: input.panels,
            f32: input.f32,
        };
        let gemm = self.gemm();
        let launches = gemm::gemm(gemm, self.chunk(), cols, matrices, inputs, self.scratch);
        self.plan.launches.extend(launches);
    }

    fn attention(
        &mut self,
        a: &AttentionSpec,
        layer: &LayerWeights,
        w: &AttentionWeights,
        cache: Cache,
        arena: &mut BumpAllocator,
    ) {
        let context = self.context;
        let shape = shape(a, context.load_config, context.spec.norm_eps);
        let input_projections = w.input_projections();
        let y = self.normed(layer.mixer_norm, &input_projections, arena);
        let projected = self.project(y, &input_projections, arena);
        self.append((a, &shape), w, &projected, cache);
        let out = self.out(&[w.o], a.n_heads * a.head_dim, arena);
        let selected = prefill_attention(&shape, context.gpu);
        let kernel = selected.kernel;
        self.plan.note(kernel.file(), selected.reason);
        let (chunk, q) = (self.chunk(), projected[0]);
        self.push(attention::prefill(kernel, &shape, chunk, q, cache, out));
        self.add_normed(out, w.o, layer.post_mixer_norm, arena);
    }

    /// Norms and rotates the projections `[q, k, v]`, q in place, and writes keys and values.
    fn append(
        &mut self,
        (a, shape): (&AttentionSpec, &attention::Shape),
        w: &AttentionWeights,
        projected: &[u64],
        cache: Cache,
    ) {
        let from = Projections {
            q: projected[0],
            k: projected[1],
            v: projected[2],
            kv_stride: w.k.rows,
            q_norm: w.q_norm,
            k_norm: w.k_norm,
            frequencies: self.context.frequencies(a),
            biases: w.biases,
        };
        let at = Positions::Chunk(self.chunk().header);
        let to = AppendTarget {
            cache,
            f16_queries: 0,
        };
        self.push(attention::qk_norm_rope_append(
            shape, self.rows, at, from, to,
        ));
    }

    fn delta(
        &mut self,
        spec: &GatedDeltaSpec,
        w: &DeltaWeights,
        norm: u64,
        layer: Layer,
        arena: &mut BumpAllocator,
    ) {
        let (context, rows) = (self.context, self.rows);
        let shape = gated_delta::Shape::of(spec);
        let input_projections = [w.qkv, w.z, w.beta, w.alpha];
        let y = self.normed(norm, &input_projections, arena);
        let projected = self.project(y, &input_projections, arena);
        let inputs = delta_inputs(w, &projected);
        let scratch = arena.take(gated_delta::prefill_scratch_bytes(shape, rows));
        let to = self.out(&[w.out], shape.values(), arena);
        let out = gated_delta::GatedNormOutput {
            activations: norm::ActivationBuffers::f32(to.f32),
            panels: (to.panels != 0).then(|| Panels::new(to.panels, rows)),
        };
        let chunk = context.addresses.chunk;
        let launch = ChunkLaunch {
            shape,
            rows,
            chunk,
            layer: &layer,
            inputs: &inputs,
        };
        self.plan
            .push_chunked_delta(context.gpu, &launch, scratch, &out);
        self.add_normed(to, w.out, 0, arena);
    }

    fn dense_ffn(&mut self, w: &FfnWeights, post_norm: u64, arena: &mut BumpAllocator) {
        let y = self.normed(w.norm, &[w.gate, w.up], arena);
        let matrices = ([w.gate, w.up], w.activation, w.down);
        let out = self.gated_unit(y, matrices, arena);
        self.add_normed(out, w.down, post_norm, arena);
    }

    /// `f(gate y) * (up y)` in the form that `down` reads.
    fn gated_unit(
        &mut self,
        y: PrefillActivations,
        ([gate, up], activation, down): ([WeightMatrix; 2], GateActivation, WeightMatrix),
        arena: &mut BumpAllocator,
    ) -> PrefillActivations {
        let chunk = self.chunk();
        let width = gate.rows;
        let out = self.out(&[down], width, arena);
        let pair = gemm::SwiGluMatrices {
            cols: gate.cols,
            ffn: width,
            gate: (gate.kind, gate.at),
            up: (up.kind, up.at),
        };
        if activation == GateActivation::Silu && pair.fits() && out.f32 == 0 {
            let gemm = self.gemm();
            let launches = gemm::gemm_swiglu(gemm, chunk, pair, y.panels, self.scratch, out.panels);
            self.plan.launches.extend(launches);
        } else {
            let projected = self.project(y, &[gate, up], arena);
            let both = [projected[0], projected[1]].map(|at| F32Rows { at, width });
            self.push(panels::gated_unit(chunk, both, activation, out));
        }
        out
    }
}
