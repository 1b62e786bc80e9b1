//! Plans with the decode kernels: the launches of each part of a layer.

use contract::{AttentionSpec, Mixer};

use super::activations::ActivationFormats;
use super::gemm::{self, GemmOperation};
use super::layer_arguments::{cache, delta_inputs, delta_layer, norm_behind, shape, sum_of_shards};
use super::select::{Depth, StepSize, decode_attention, gated_delta_decode};
use super::{Plan, PlanContext, attention_config};
use crate::launch::Launch;
use crate::launch::all_reduce::ExchangeShape;
use crate::launch::attention::{
    self, AppendTarget, Cache, DecodeBuffers, Mask, Positions, Projections, Shape,
};
use crate::launch::draft::{CaptureTarget, capture_hidden_states};
use crate::launch::embedding::{self, EmbeddingTable};
use crate::launch::ffn::{self, GateUp};
use crate::launch::gated_delta::{self, Layer, TreeLaunch, TreeStep};
use crate::launch::gemm::small_batch::GemmEpilogue;
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape, RowSource};
use crate::memory::BumpAllocator;
use crate::numerics::Numerics;
use crate::state::{DeltaGroup, LayerState};
use crate::weights::{AttentionWeights, DeltaWeights, FfnWeights, MixerWeights, WeightMatrix};

/// A builder over the step header at `step` for `trees` trees in up to `rows` rows, with the
/// fastest numerics.
pub(super) fn builder<'a>(
    context: &'a PlanContext<'a>,
    (rows, trees): (usize, usize),
    step: u64,
    eps: f32,
    arena: BumpAllocator,
) -> DecodeBuilder<'a> {
    DecodeBuilder {
        context,
        rows,
        trees,
        step,
        numerics: Numerics::Fastest,
        depth: Depth::Any,
        source: RowSource::Step(step),
        exchange: None,
        eps,
        arena,
        peak: arena,
        plan: Plan::default(),
    }
}

/// Builder of a plan with the decode kernels, layer by layer. The buffers of all blocks begin at
/// the same arena position.
pub(super) struct DecodeBuilder<'a> {
    pub(super) context: &'a PlanContext<'a>,
    pub(super) rows: usize,
    trees: usize,
    /// Address of the step's header.
    pub(super) step: u64,
    /// Numerics of its launches.
    pub(super) numerics: Numerics,
    /// How many tokens precede its trees.
    pub(super) depth: Depth,
    pub(super) source: RowSource,
    /// What the products that end a block are summed through: in the layers of a shard.
    pub(super) exchange: Option<ExchangeShape>,
    pub(super) eps: f32,
    /// Where a block's buffers begin.
    pub(super) arena: BumpAllocator,
    /// The furthest any block has come.
    pub(super) peak: BumpAllocator,
    pub(super) plan: Plan,
}

impl DecodeBuilder<'_> {
    pub(super) fn push(&mut self, launch: Launch) {
        self.plan.launches.push(launch);
    }

    /// The tokens' embeddings into the residual stream.
    pub(super) fn embed(&mut self) {
        let context = self.context;
        let (table, x) = (context.weights.embedding, context.addresses.residual);
        let scale = context.spec.embedding_scale;
        let launch = embedding::scaled(table, self.rows, self.source, x, scale);
        self.push(launch);
    }

    /// The same from the table of a draft, not scaled.
    pub(super) fn embed_from(&mut self, table: EmbeddingTable) {
        let x = self.context.addresses.residual;
        self.push(embedding::gather(table, self.rows, self.source, x));
    }

    /// The plan without a head, and where the furthest buffer ends.
    pub(super) fn finish(self) -> (Plan, BumpAllocator) {
        (self.plan, self.peak)
    }

    /// Buffers of one block, given back when it is complete.
    pub(super) fn block(&mut self, build: impl FnOnce(&mut Self, &mut BumpAllocator)) {
        let mut arena = self.arena;
        build(self, &mut arena);
        self.note_peak(arena);
    }

    /// Notes how far buffers have come.
    pub(super) fn note_peak(&mut self, arena: BumpAllocator) {
        if arena.used() > self.peak.used() {
            self.peak = arena;
        }
    }

    /// The launches between the projections of layer `i` and its output projection, whose input
    /// they give.
    pub(super) fn mixer(
        &mut self,
        i: usize,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        self.mixer_with(i, projected, arena, |b, group, w, layer, arena| {
            b.delta(group, w, layer, projected, arena)
        })
    }

    /// As [`DecodeBuilder::mixer`], where `delta` makes the launches of a delta layer.
    pub(super) fn mixer_with(
        &mut self,
        i: usize,
        projected: &[u64],
        arena: &mut BumpAllocator,
        delta: impl FnOnce(
            &mut Self,
            &DeltaGroup,
            &DeltaWeights,
            Layer,
            &mut BumpAllocator,
        ) -> ActivationBuffers,
    ) -> ActivationBuffers {
        let context = self.context;
        match (
            &context.spec.layers[i].mixer,
            &context.weights.layers[i].mixer,
            context.state.layer(i),
        ) {
            (Mixer::Attention(a), MixerWeights::Attention(w), LayerState::Kv(group, index)) => {
                let cache = cache(context, group, index);
                let shape = shape(a, context.load_config, self.eps);
                self.attention((a, shape), w, cache, projected, arena)
            }
            (Mixer::GatedDelta(_), MixerWeights::Delta(w), LayerState::Delta(group, index)) => {
                let layer = delta_layer(context, group, index, w);
                delta(self, group, w, layer, arena)
            }
            _ => unreachable!("weights and state were laid out from this spec"),
        }
    }

    /// The output of layer `i` stands in the residual stream.
    pub(super) fn layer_end(&mut self, i: usize) {
        let context = self.context;
        if let Some((column, draft)) = context.capture(i) {
            let hidden = context.spec.hidden;
            let to = CaptureTarget {
                out: draft.features,
                stride: draft.width,
                offset: column * hidden,
                to_feature_pool: true,
            };
            let x = context.addresses.residual;
            self.push(capture_hidden_states(hidden, self.rows, self.source, x, to));
        }
        self.hand_over_layer(i);
        self.plan.layer_ends.push(self.plan.launches.len());
    }

    /// `rms(x)` in the forms that `input_projections` want.
    pub(super) fn normed(
        &mut self,
        weight: u64,
        input_projections: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        let hidden = self.context.spec.hidden;
        let forms = ActivationFormats::of(input_projections.iter().map(|m| m.kind));
        let out = forms.allocate(arena, self.rows, hidden);
        let rms = RmsShape {
            width: hidden,
            eps: self.eps,
        };
        let x = Residual::of(self.context.addresses.residual);
        self.push(norm::rms_norm(rms, self.rows, self.source, x, weight, out));
        out
    }

    /// Products of one input, each with f32 rows of its own.
    pub(super) fn project(
        &mut self,
        input: &ActivationBuffers,
        matrices: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Vec<u64> {
        let outs: Vec<u64> = matrices
            .iter()
            .map(|m| arena.take(4 * self.rows * m.rows))
            .collect();
        self.project_to(input, matrices, &outs);
        outs
    }

    /// The same into places that are there.
    pub(super) fn project_to(
        &mut self,
        input: &ActivationBuffers,
        matrices: &[WeightMatrix],
        outs: &[u64],
    ) {
        let products: Vec<GemmOperation> = matrices
            .iter()
            .zip(outs)
            .map(|(matrix, out)| GemmOperation {
                matrix: *matrix,
                out: *out,
                write: GemmEpilogue::Store,
            })
            .collect();
        self.products(input, &products);
    }

    /// `x += matrix · input`.
    pub(super) fn add(&mut self, input: &ActivationBuffers, matrix: WeightMatrix) {
        let product = GemmOperation {
            matrix,
            out: self.context.addresses.residual,
            write: GemmEpilogue::Add,
        };
        self.products(input, &[product]);
    }

    /// `x += matrix · input`, through the norm `post_norm` if it is not 0; in the layers of a shard
    /// the sum of all shards' products.
    pub(super) fn add_normed(
        &mut self,
        input: &ActivationBuffers,
        matrix: WeightMatrix,
        post_norm: u64,
        arena: &mut BumpAllocator,
    ) {
        if let Some(shape) = self.exchange {
            let update = self.project(input, &[matrix], arena)[0];
            return self.add_shards(shape, update, post_norm);
        }
        if post_norm == 0 {
            return self.add(input, matrix);
        }
        let update = self.project(input, &[matrix], arena)[0];
        let rows = (self.rows, self.source);
        self.push(norm_behind(self.context, rows, update, post_norm));
    }

    /// `x += sum of the shards' products`, this one's at `update`, through the norm `post_norm` if
    /// it is not 0.
    pub(super) fn add_shards(&mut self, shape: ExchangeShape, update: u64, post_norm: u64) {
        let rows = (self.rows, self.source);
        let launches = sum_of_shards(self.context, shape, rows, (update, post_norm));
        self.plan.launches.extend(launches);
    }

    fn products(&mut self, input: &ActivationBuffers, products: &[GemmOperation]) {
        let launches = gemm::launches(self.context, self.rows, input, products);
        self.plan.launches.extend(launches);
    }

    pub(super) fn attention(
        &mut self,
        (a, shape): (&AttentionSpec, Shape),
        w: &AttentionWeights,
        cache: Cache,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        let (context, rows) = (self.context, self.rows);
        let config = attention_config(context.gpu, self.numerics, context.tree_windows);
        let &[q, k, v] = projected else {
            unreachable!("three matrices give three outputs")
        };
        let from = Projections {
            q,
            k,
            v,
            kv_stride: w.k.rows,
            q_norm: w.q_norm,
            k_norm: w.k_norm,
            frequencies: context.frequencies(a),
            biases: w.biases,
        };
        let step = self.step;
        let size = StepSize {
            rows,
            trees: self.trees,
            tokens: self.depth.tokens(cache.max_pages * attention::PAGE),
        };
        let selected = decode_attention(&shape, config, size);
        let attention = selected.kernel;
        self.plan.note(attention.kernel.file(), selected.reason);
        let scratch = arena.take(attention.scratch_bytes(&shape));
        let out = ActivationFormats::of([w.o.kind]).allocate(arena, rows, a.n_heads * a.head_dim);
        let queries = if attention.f16_queries() {
            arena.take(2 * rows * a.n_heads * a.head_dim)
        } else {
            0
        };
        let at = match shape.mask {
            Mask::DraftedAncestors => Positions::Drafted(step),
            Mask::Ancestors | Mask::Full | Mask::Causal => Positions::Step(step),
        };
        let to = AppendTarget {
            cache,
            f16_queries: queries,
        };
        self.push(attention::qk_norm_rope_append(&shape, rows, at, from, to));
        let buffers = DecodeBuffers {
            step,
            projection: q,
            queries,
            cache,
            sinks: w.sinks,
            scratch,
        };
        self.push(attention::tree(&shape, &attention, &buffers));
        self.push(attention::combine(&shape, &attention, &buffers, out));
        out
    }

    fn delta(
        &mut self,
        group: &DeltaGroup,
        w: &DeltaWeights,
        layer: Layer,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        let (context, rows, trees) = (self.context, self.rows, self.trees);
        let shape = gated_delta::Shape::of(&group.spec);
        let inputs = delta_inputs(w, projected);
        let gpu = context.gpu;
        let step = TreeStep { rows, trees };
        let selected = gated_delta_decode(gpu, shape, self.numerics, step);
        let kernel = selected.kernel;
        self.plan.note(kernel.file(), selected.reason);
        let tree = TreeLaunch {
            gpu,
            shape,
            size: step,
            step: self.step,
            layer: &layer,
            inputs: &inputs,
        };
        let bytes = gated_delta::verify_scratch_bytes(gpu, shape, rows, trees, kernel);
        let scratch = arena.take(bytes);
        let forms = ActivationFormats::of([w.out.kind]).allocate(arena, rows, shape.values());
        let out = gated_delta::GatedNormOutput::of(forms);
        let launches = gated_delta::verify(kernel, &tree, scratch, &out);
        self.plan.launches.extend(launches);
        forms
    }

    /// A feed-forward with the norm before it, and that behind it if `post_norm` is not 0.
    pub(super) fn dense_ffn(&mut self, w: &FfnWeights, post_norm: u64, arena: &mut BumpAllocator) {
        let input_projections = [w.gate, w.up];
        let y = self.normed(w.norm, &input_projections, arena);
        let projected = self.project(&y, &input_projections, arena);
        let out = self.gated_unit(w, &projected, arena);
        self.add_normed(&out, w.down, post_norm, arena);
    }

    /// The gated unit of the projections of gate and up.
    pub(super) fn gated_unit(
        &mut self,
        w: &FfnWeights,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        let &[gate, up] = projected else {
            unreachable!("two matrices give two outputs")
        };
        let stride = w.gate.rows;
        let out = ActivationFormats::of([w.down.kind]).allocate(arena, self.rows, stride);
        let from = GateUp { gate, up, stride };
        let size = (stride, self.rows);
        self.push(ffn::gated_unit(size, self.source, from, w.activation, out));
        out
    }
}
