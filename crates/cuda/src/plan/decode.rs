//! A step of trees: embedding, every layer, the head.

use contract::{AttentionSpec, Mixer, OpenPlan, OutputGate};

use super::activations::Forms;
use super::fused_layers::Links;
use super::gemm::{self, Product};
use super::select::{
    DecodeGemm, Depth, GemmFits, StepSize, TreeStep, decode_attention, decode_gemm,
    gated_delta_decode,
};
use super::{Plan, Site, attention_config, gemv, lm_head};
use crate::launch::attention::{self, Cache, DecodeBuffers, Mask, Positions, Projections, Shape};
use crate::launch::gated_delta::{self, Layer, Slots};
use crate::launch::gemm::small_batch::Write;
use crate::launch::logits::{self, Tap};
use crate::launch::norm::{self, Out, Residual, Rms, Source};
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
        turned: true,
        eps,
        scale: a.scale,
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    }
}

/// Where a layer's cached rows are.
pub(super) fn cache(site: &Site<'_>, group: &KvGroup, index: usize) -> Cache {
    let at = |base: u64, row_bytes: usize| match row_bytes {
        0 => 0,
        bytes => base + (index * group.layer_bytes(bytes)) as u64,
    };
    Cache {
        k: at(group.k.values, group.k.value_bytes),
        k_scale: at(group.k.scales, group.k.scale_bytes),
        v: at(group.v.values, group.v.value_bytes),
        v_scale: at(group.v.scales, group.v.scale_bytes),
        page_table: site.state.page_table,
        max_pages: site.state.slots.pages,
    }
}

/// Where a delta layer's memory and vectors are.
pub(super) fn delta_layer(
    site: &Site<'_>,
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
        eps: site.spec.norm_eps,
    }
}

/// Where the projections of a delta layer stand, in the order of its input_projections: `qkv`, `z`,
/// `beta`, `alpha`.
pub(super) fn delta_inputs(w: &DeltaWeights, projected: &[u64]) -> gated_delta::Inputs {
    let input_projections = [w.qkv, w.z, w.beta, w.alpha];
    let rows = |i: usize| gated_delta::Rows {
        at: projected[i],
        stride: input_projections[i].rows,
    };
    gated_delta::Inputs {
        qkv: rows(0),
        z: rows(1),
        beta: rows(2),
        alpha: rows(3),
    }
}

/// A builder over the step header at `step` for `trees` trees in up to `rows` rows, which sums as
/// is fastest.
pub(super) fn builder<'a>(
    site: &'a Site<'a>,
    (rows, trees): (usize, usize),
    step: u64,
    eps: f32,
    arena: BumpAllocator,
) -> Builder<'a> {
    Builder {
        site,
        rows,
        trees,
        step,
        numerics: Numerics::Fastest,
        depth: Depth::Any,
        source: Source::Step(step),
        eps,
        arena,
        peak: arena,
        plan: Plan::default(),
    }
}

/// The plan of a step of `trees` trees in up to `rows` rows that stand behind as many tokens as
/// `depth` says.
pub(super) fn step(
    site: &Site<'_>,
    (rows, trees): (usize, usize),
    depth: Depth,
    arena: &mut BumpAllocator,
) -> Plan {
    let (at, eps) = (site.addresses, site.spec.norm_eps);
    let mut builder = builder(site, (rows, trees), at.step, eps, *arena);
    builder.numerics = site.numerics;
    builder.depth = depth;
    builder.embed();
    let layers = 0..site.spec.layers.len();
    let links = Links::of_target(site);
    let fits = GemmFits {
        gemv: gemv::suits(site),
        fused_layer: links.is_some(),
    };
    let gemm = decode_gemm(rows, fits);
    builder.plan.note(gemm.kernel.file(), gemm.reason);
    match (gemm.kernel, links) {
        (DecodeGemm::Gemv, _) => layers.for_each(|i| builder.layer_of_one(i)),
        (DecodeGemm::FusedLayer, Some(links)) => {
            builder.chained(&links, Builder::mixer, Builder::layer_end);
        }
        _ => layers.for_each(|i| builder.layer(i)),
    }
    let asked = Source::AskedOfStep(at.step);
    let norm = (site.weights.final_norm, eps);
    builder.head(asked, norm, arena)
}

/// Puts a step together, layer by layer. Each block's buffers begin at the same place of the arena.
pub(super) struct Builder<'a> {
    pub(super) site: &'a Site<'a>,
    pub(super) rows: usize,
    trees: usize,
    /// Address of the step's header.
    pub(super) step: u64,
    /// In which order it sums.
    numerics: Numerics,
    /// Behind how many tokens its trees stand.
    depth: Depth,
    pub(super) source: Source,
    pub(super) eps: f32,
    /// Where a block's buffers begin.
    pub(super) arena: BumpAllocator,
    /// The furthest any block has come.
    peak: BumpAllocator,
    pub(super) plan: Plan,
}

impl Builder<'_> {
    pub(super) fn push(&mut self, launch: Launch) {
        self.plan.launches.push(launch);
    }

    /// The tokens' embeddings into the residual stream.
    pub(super) fn embed(&mut self) {
        let (x, table) = (self.site.addresses.residual, self.site.weights.embedding);
        let (hidden, rows, source) = (self.site.spec.hidden, self.rows, self.source);
        self.push(embedding::gather(
            table.ty,
            hidden,
            rows,
            source,
            (table.at, x),
        ));
    }

    /// The plan without a head, and where the furthest buffer ends.
    pub(super) fn ended(self) -> (Plan, BumpAllocator) {
        (self.plan, self.peak)
    }

    /// Ends the plan with the head; `arena` comes to stand where the furthest buffer ends.
    pub(super) fn head(self, asked: Source, norm: (u64, f32), arena: &mut BumpAllocator) -> Plan {
        let mut plan = self.plan;
        let mut tail = *arena;
        lm_head::append(self.site, self.rows, asked, norm, &mut tail, &mut plan);
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
        self.reach(arena);
    }

    /// Notes how far buffers have come.
    pub(super) fn reach(&mut self, arena: BumpAllocator) {
        if arena.used() > self.peak.used() {
            self.peak = arena;
        }
    }

    fn layer(&mut self, i: usize) {
        let weights = &self.site.weights.layers[i];
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
    pub(super) fn mixer(&mut self, i: usize, projected: &[u64], arena: &mut BumpAllocator) -> Out {
        self.mixer_with(i, projected, arena, |b, group, w, layer, arena| {
            b.delta(group, w, layer, projected, arena)
        })
    }

    /// As [`Builder::mixer`], where `delta` makes the launches of a delta layer.
    pub(super) fn mixer_with(
        &mut self,
        i: usize,
        projected: &[u64],
        arena: &mut BumpAllocator,
        delta: impl FnOnce(&mut Self, &DeltaGroup, &DeltaWeights, Layer, &mut BumpAllocator) -> Out,
    ) -> Out {
        let site = self.site;
        match (
            &site.spec.layers[i].mixer,
            &site.weights.layers[i].mixer,
            site.state.layer(i),
        ) {
            (Mixer::Attention(a), MixerWeights::Attention(w), LayerState::Kv(group, index)) => {
                let cache = cache(site, group, index);
                let shape = shape(a, site.open, self.eps);
                self.attention((a, shape), w, cache, projected, arena)
            }
            (Mixer::GatedDelta(_), MixerWeights::Delta(w), LayerState::Delta(group, index)) => {
                let layer = delta_layer(site, group, index, w);
                delta(self, group, w, layer, arena)
            }
            _ => unreachable!("weights and state were laid out from this spec"),
        }
    }

    /// The output of layer `i` stands in the residual stream.
    pub(super) fn layer_end(&mut self, i: usize) {
        let site = self.site;
        if let Some((column, draft)) = site.tap(i) {
            let hidden = site.spec.hidden;
            let to = Tap {
                out: draft.features,
                stride: draft.width,
                offset: column * hidden,
                placed: true,
            };
            let x = site.addresses.residual;
            self.push(logits::tap(hidden, self.rows, self.source, x, to));
        }
        self.plan.layer_ends.push(self.plan.launches.len());
    }

    /// `rms(x)` in the forms that `input_projections` want.
    pub(super) fn normed(
        &mut self,
        weight: u64,
        input_projections: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Out {
        let hidden = self.site.spec.hidden;
        let forms = Forms::of(input_projections.iter().map(|m| m.kind));
        let out = forms.carve(arena, self.rows, hidden);
        let rms = Rms {
            width: hidden,
            eps: self.eps,
        };
        let x = Residual::of(self.site.addresses.residual);
        self.push(norm::rms(rms, self.rows, self.source, x, weight, out));
        out
    }

    /// Products of one input, each with f32 rows of its own.
    pub(super) fn project(
        &mut self,
        input: &Out,
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
    pub(super) fn project_to(&mut self, input: &Out, matrices: &[WeightMatrix], outs: &[u64]) {
        let products: Vec<Product> = matrices
            .iter()
            .zip(outs)
            .map(|(matrix, out)| Product {
                matrix: *matrix,
                out: *out,
                write: Write::Store,
            })
            .collect();
        self.products(input, &products);
    }

    /// `x += matrix · input`.
    pub(super) fn add(&mut self, input: &Out, matrix: WeightMatrix) {
        let product = Product {
            matrix,
            out: self.site.addresses.residual,
            write: Write::Add,
        };
        self.products(input, &[product]);
    }

    fn products(&mut self, input: &Out, products: &[Product]) {
        let launches = gemm::launches(self.site, self.rows, input, products);
        self.plan.launches.extend(launches);
    }

    pub(super) fn attention(
        &mut self,
        (a, shape): (&AttentionSpec, Shape),
        w: &AttentionWeights,
        cache: Cache,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> Out {
        let (site, rows) = (self.site, self.rows);
        let config = attention_config(site.gpu, self.numerics, site.tree_windows);
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
            frequencies: site.frequencies(a.rope),
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
        let out = Forms::of([w.o.kind]).carve(arena, rows, a.n_heads * a.head_dim);
        let queries = if attention.f16_queries() {
            arena.take(2 * rows * a.n_heads * a.head_dim)
        } else {
            0
        };
        let at = Positions::Step(step);
        self.push(attention::prepare(&shape, rows, at, from, (cache, queries)));
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
    ) -> Out {
        let (site, rows, trees) = (self.site, self.rows, self.trees);
        let shape = gated_delta::Shape::of(&group.spec);
        let inputs = delta_inputs(w, projected);
        let gpu = site.gpu;
        let step = TreeStep { rows, trees };
        let selected = gated_delta_decode(gpu, shape, self.numerics, step);
        let kernel = selected.kernel;
        self.plan.note(kernel.file(), selected.reason);
        let bytes = gated_delta::verify_scratch_bytes(gpu, shape, rows, trees, kernel);
        let scratch = arena.take(bytes);
        let forms = Forms::of([w.out.kind]).carve(arena, rows, shape.values());
        let out = gated_delta::Out::of(forms);
        let launches = gated_delta::verify(
            gpu, shape, rows, trees, kernel, self.step, &layer, &inputs, scratch, &out,
        );
        self.plan.launches.extend(launches);
        forms
    }

    pub(super) fn ffn(&mut self, w: &FfnWeights, arena: &mut BumpAllocator) {
        let input_projections = [w.gate, w.up];
        let y = self.normed(w.norm, &input_projections, arena);
        let width = w.gate.rows;
        let projected = self.project(&y, &input_projections, arena);
        let out = Forms::of([w.down.kind]).carve(arena, self.rows, width);
        let (gate, up) = (projected[0], projected[1]);
        let from = (gate, up, width);
        self.push(ffn::swiglu(width, self.rows, self.source, from, out));
        self.add(&out, w.down);
    }
}
