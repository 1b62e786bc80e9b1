//! A step of trees: embedding, every layer, the head.

use contract::{AttentionSpec, Mixer, OpenPlan, OutputGate};

use super::activations::ActivationFormats;
use super::fused_layers::FusedLayerPlan;
use super::gemm::{self, GemmOperation};
use super::select::{
    DecodeGemm, Depth, GemmFits, StepSize, decode_attention, decode_gemm, gated_delta_decode,
};
use super::{Plan, PlanContext, attention_config, gemv, lm_head};
use crate::launch::attention::{self, Cache, DecodeBuffers, Mask, Positions, Projections, Shape};
use crate::launch::gated_delta::{self, Layer, Slots, TreeLaunch, TreeStep};
use crate::launch::gemm::small_batch::GemmEpilogue;
use crate::launch::logits::{self, CaptureTarget};
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape, RowSource};
use crate::launch::{Launch, embedding, ffn};
use crate::memory::BumpAllocator;
use crate::numerics::Numerics;
use crate::state::{DeltaGroup, KvGroup, LayerState};
use crate::weights::{AttentionWeights, DeltaWeights, FfnWeights, MixerWeights, WeightMatrix};

/// How the attention kernels see a layer.
pub(super) fn shape(a: &AttentionSpec, open: &OpenPlan, eps: f32) -> Shape {
    Shape {
        n_heads: a.n_heads,
        n_kv_heads: a.n_kv_heads,
        head_dim: a.head_dim,
        rope: a.rope,
        gate: a.gate == OutputGate::SigmoidPerHead,
        normed: a.q_norm.is_some(),
        k: open.kv.k,
        v: open.kv.v,
        rotated: true,
        eps,
        scale: a.scale,
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    }
}

/// Where a layer's cached rows are.
pub(super) fn cache(context: &PlanContext<'_>, group: &KvGroup, index: usize) -> Cache {
    let at = |base: u64, row_bytes: usize| match row_bytes {
        0 => 0,
        bytes => base + (index * group.layer_bytes(bytes)) as u64,
    };
    Cache {
        k: at(group.k.values, group.k.value_bytes),
        k_scale: at(group.k.scales, group.k.scale_bytes),
        v: at(group.v.values, group.v.value_bytes),
        v_scale: at(group.v.scales, group.v.scale_bytes),
        page_table: context.state.page_table,
        max_pages: context.state.slots.pages,
    }
}

/// Where a delta layer's memory and vectors are.
pub(super) fn delta_layer(
    context: &PlanContext<'_>,
    group: &DeltaGroup,
    index: usize,
    weights: &DeltaWeights,
) -> Layer {
    let slots = |base: u64, layer_bytes: usize| Slots {
        at: base + (index * layer_bytes) as u64,
        stride: group.slot_bytes(layer_bytes) as u64,
    };
    Layer {
        state: slots(group.states, group.state_bytes),
        window: slots(group.windows, group.window_bytes),
        factors: slots(group.factors, group.factor_bytes),
        conv: weights.conv,
        a: weights.a,
        dt: weights.dt,
        norm: weights.norm,
        eps: context.spec.norm_eps,
    }
}

/// Where the projections of a delta layer stand, in the order of its input_projections: `qkv`, `z`,
/// `beta`, `alpha`.
pub(super) fn delta_inputs(w: &DeltaWeights, projected: &[u64]) -> gated_delta::GatedDeltaInputs {
    let input_projections = [w.qkv, w.z, w.beta, w.alpha];
    let rows = |i: usize| gated_delta::StridedRows {
        at: projected[i],
        stride: input_projections[i].rows,
    };
    gated_delta::GatedDeltaInputs {
        qkv: rows(0),
        z: rows(1),
        beta: rows(2),
        alpha: rows(3),
    }
}

/// A builder over the step header at `step` for `trees` trees in up to `rows` rows, which sums as
/// is fastest.
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
        eps,
        arena,
        peak: arena,
        plan: Plan::default(),
    }
}

/// The plan of a step of `trees` trees in up to `rows` rows that stand behind as many tokens as
/// `depth` says.
pub(super) fn step(
    context: &PlanContext<'_>,
    (rows, trees): (usize, usize),
    depth: Depth,
    arena: &mut BumpAllocator,
) -> Plan {
    let (at, eps) = (context.addresses, context.spec.norm_eps);
    let mut builder = builder(context, (rows, trees), at.step, eps, *arena);
    builder.numerics = context.numerics;
    builder.depth = depth;
    builder.embed();
    let layers = 0..context.spec.layers.len();
    let fused_layers = FusedLayerPlan::of_target(context);
    let fits = GemmFits {
        gemv: gemv::fits(context),
        fused_layer: fused_layers.is_some(),
    };
    let gemm = decode_gemm(rows, fits);
    builder.plan.note(gemm.kernel.file(), gemm.reason);
    match (gemm.kernel, fused_layers) {
        (DecodeGemm::Gemv, _) => layers.for_each(|i| builder.gemv_layer(i)),
        (DecodeGemm::FusedLayer, Some(fused_layers)) => {
            builder.push_fused_layers(
                &fused_layers,
                DecodeBuilder::mixer,
                DecodeBuilder::layer_end,
            );
        }
        _ => layers.for_each(|i| builder.layer(i)),
    }
    let asked = RowSource::LogitsRowsOfStep(at.step);
    let norm = (context.weights.final_norm, eps);
    builder.head(asked, norm, arena)
}

/// Puts a step together, layer by layer. Each block's buffers begin at the same place of the arena.
pub(super) struct DecodeBuilder<'a> {
    pub(super) context: &'a PlanContext<'a>,
    pub(super) rows: usize,
    trees: usize,
    /// Address of the step's header.
    pub(super) step: u64,
    /// In which order it sums.
    numerics: Numerics,
    /// Behind how many tokens its trees stand.
    depth: Depth,
    pub(super) source: RowSource,
    pub(super) eps: f32,
    /// Where a block's buffers begin.
    pub(super) arena: BumpAllocator,
    /// The furthest any block has come.
    peak: BumpAllocator,
    pub(super) plan: Plan,
}

impl DecodeBuilder<'_> {
    pub(super) fn push(&mut self, launch: Launch) {
        self.plan.launches.push(launch);
    }

    /// The tokens' embeddings into the residual stream.
    pub(super) fn embed(&mut self) {
        let (x, table) = (
            self.context.addresses.residual,
            self.context.weights.embedding,
        );
        let (hidden, rows, source) = (self.context.spec.hidden, self.rows, self.source);
        self.push(embedding::gather(
            table.ty,
            hidden,
            rows,
            source,
            (table.at, x),
        ));
    }

    /// The plan without a head, and where the furthest buffer ends.
    pub(super) fn finish(self) -> (Plan, BumpAllocator) {
        (self.plan, self.peak)
    }

    /// Ends the plan with the head; `arena` comes to stand where the furthest buffer ends.
    pub(super) fn head(
        self,
        asked: RowSource,
        norm: (u64, f32),
        arena: &mut BumpAllocator,
    ) -> Plan {
        let mut plan = self.plan;
        let mut tail = *arena;
        lm_head::append(self.context, self.rows, asked, norm, &mut tail, &mut plan);
        *arena = if tail.used() > self.peak.used() {
            tail
        } else {
            self.peak
        };
        plan
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

    fn layer(&mut self, i: usize) {
        let weights = &self.context.weights.layers[i];
        self.block(|b, arena| {
            let input_projections = weights.mixer.input_projections();
            let y = b.normed(weights.mixer_norm, &input_projections, arena);
            let projected = b.project(&y, &input_projections, arena);
            let mixed = b.mixer(i, &projected, arena);
            b.add(&mixed, weights.mixer.out());
        });
        self.block(|b, arena| b.ffn(&weights.ffn, arena));
        self.layer_end(i);
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
                let shape = shape(a, context.open, self.eps);
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
            self.push(logits::capture_hidden_states(
                hidden,
                self.rows,
                self.source,
                x,
                to,
            ));
        }
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
            frequencies: context.frequencies(a.rope),
        };
        let step = self.step;
        let size = StepSize {
            rows,
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
        let at = Positions::Step(step);
        self.push(attention::qk_norm_rope_append(
            &shape,
            rows,
            at,
            from,
            (cache, queries),
        ));
        let buffers = DecodeBuffers {
            step,
            projection: q,
            queries,
            cache,
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

    pub(super) fn ffn(&mut self, w: &FfnWeights, arena: &mut BumpAllocator) {
        let input_projections = [w.gate, w.up];
        let y = self.normed(w.norm, &input_projections, arena);
        let width = w.gate.rows;
        let projected = self.project(&y, &input_projections, arena);
        let out = ActivationFormats::of([w.down.kind]).allocate(arena, self.rows, width);
        let (gate, up) = (projected[0], projected[1]);
        let from = (gate, up, width);
        self.push(ffn::swiglu(width, self.rows, self.source, from, out));
        self.add(&out, w.down);
    }
}
