//! A chunk of a prompt: embedding and every layer, many rows at a time. Cached rows, states and
//! windows are committed on the way; the head is a plan of its own, over the rows that were asked
//! for.

use contract::{AttentionSpec, Mixer, ModelSpec};

use super::decode::{cache, delta_inputs, delta_layer, shape};
use super::gemm::segment;
use super::select::{gated_delta_scan, prefill_attention, prefill_gemm};
use super::{Plan, Site};
use crate::launch::attention::{self, Cache, Positions, Projections};
use crate::launch::gated_delta::{self, Layer};
use crate::launch::gemm::panels::{Out, Panels};
use crate::launch::gemm::prefill::{self as gemm, Inputs, PrefillGemm, Scratch};
use crate::launch::gemm::small_batch::{Segment, Write};
use crate::launch::logits::tap;
use crate::launch::norm::{self, Source, panels};
use crate::launch::{Launch, embedding};
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;
use crate::state::{DeltaGroup, LayerState};
use crate::weights::{
    AttentionWeights, DeltaWeights, DraftLayerWeights, DraftWeights, FfnWeights, MixerWeights,
    WeightMatrix, Weights,
};

/// Alignment of panels, in bytes.
const PANEL_ALIGN: u64 = 1024;
/// Weights that are expanded at once, in bytes; more than the widest layer of today's models needs.
const MOST_EXPANDED: usize = 512 << 20;

/// Room for expanded weights and the turns that products take on them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expanded {
    pub(super) bytes: usize,
    pub(super) turn_bytes: usize,
}

impl Expanded {
    /// For the matrices of a model and chunks of up to `rows` rows.
    pub(super) fn of(spec: &ModelSpec, weights: &Weights, rows: usize) -> Expanded {
        let hidden = spec.hidden;
        let mut bytes = 0;
        let mut fit = |matrices: &[WeightMatrix]| {
            let packed = matrices.iter().filter(|m| m.kind != WeightKind::F32);
            let cols = matrices.first().map_or(hidden, |m| m.cols);
            let all = gemm::bytes_to_expand(packed.map(|m| m.rows), cols);
            bytes = bytes.max(all.clamp(gemm::least_bytes(cols), MOST_EXPANDED));
        };
        for layer in &weights.layers {
            fit(&[layer.ffn.gate, layer.ffn.up]);
            fit(&[layer.ffn.down]);
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
        Expanded {
            bytes,
            turn_bytes: gemm::turn_bytes(rows, bytes),
        }
    }
}

/// The plan of a chunk of up to `rows` rows.
pub(super) fn build(
    site: &Site<'_>,
    rows: usize,
    reason: &'static str,
    arena: &mut BumpAllocator,
) -> Plan {
    let weights = arena.take_aligned(site.expanded.bytes, PANEL_ALIGN);
    let mut plan = Plan::default();
    plan.note("gemm/prefill_dequant.cu", reason);
    let mut builder = Builder {
        site,
        rows,
        scratch: Scratch {
            weights,
            weight_bytes: site.expanded.bytes,
            turns: site.addresses.turns,
        },
        features: None,
        arena: *arena,
        peak: *arena,
        plan,
    };
    if let Some(draft) = &site.state.draft {
        builder.features = Some(builder.arena.take(4 * rows * draft.width));
        builder.peak = builder.arena;
    }
    let (at, table) = (site.addresses, site.weights.embedding);
    let source = Source::Chunk(at.chunk);
    let hidden = site.spec.hidden;
    builder.push(embedding::gather(
        table.ty,
        hidden,
        rows,
        source,
        (table.at, at.residual),
    ));
    for i in 0..site.spec.layers.len() {
        builder.layer(i);
    }
    if let (Some(draft), Some(features)) = (&site.weights.draft, builder.features) {
        builder.block(|b, arena| b.context(draft, features, arena));
    }
    *arena = builder.peak;
    builder.plan
}

/// Puts a chunk together, layer by layer. Each block's buffers begin at the same place of the
/// arena.
struct Builder<'a> {
    site: &'a Site<'a>,
    rows: usize,
    scratch: Scratch,
    /// Features of the rows for a draft, f32 `[rows][taps * hidden]`.
    features: Option<u64>,
    /// Where a block's buffers begin.
    arena: BumpAllocator,
    /// The furthest any block has come.
    peak: BumpAllocator,
    plan: Plan,
}

impl Builder<'_> {
    fn push(&mut self, launch: Launch) {
        self.plan.launches.push(launch);
    }

    fn gemm(&mut self) -> PrefillGemm {
        let selected = prefill_gemm(self.site.gpu);
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
        let site = self.site;
        let weights = &site.weights.layers[i];
        match (
            &site.spec.layers[i].mixer,
            &weights.mixer,
            site.state.layer(i),
        ) {
            (Mixer::Attention(a), MixerWeights::Attention(w), LayerState::Kv(group, index)) => {
                let cache = cache(site, group, index);
                self.block(|b, arena| b.attention(a, w, weights.mixer_norm, cache, arena));
            }
            (Mixer::GatedDelta(_), MixerWeights::Delta(w), LayerState::Delta(group, index)) => {
                let layer = delta_layer(site, group, index, w);
                self.block(|b, arena| b.delta(group, w, weights.mixer_norm, layer, arena));
            }
            _ => unreachable!("weights and state were laid out from this spec"),
        }
        self.block(|b, arena| b.ffn(&weights.ffn, arena));
        if let Some(to) = self.features.and_then(|out| site.tap_of_chunk(i, out)) {
            let source = Source::Chunk(site.addresses.chunk);
            let x = site.addresses.residual;
            self.push(tap(site.spec.hidden, self.rows, source, x, to));
        }
        self.plan.layer_ends.push(self.plan.launches.len());
    }

    /// Buffers for rows of `width` values in the forms that `input_projections` want.
    fn out(
        &self,
        input_projections: &[WeightMatrix],
        width: usize,
        arena: &mut BumpAllocator,
    ) -> Out {
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
        Out { panels, f32 }
    }

    /// The draft's keys and values of the chunk's rows, from their features.
    fn context(&mut self, draft: &DraftWeights, features: u64, arena: &mut BumpAllocator) {
        let (site, rows, chunk) = (self.site, self.rows, self.site.addresses.chunk);
        let (width, hidden) = (draft.fc.cols, draft.fc.rows);
        let input = self.out(&[draft.fc], width, arena);
        self.push(panels::convert(width, width, rows, chunk, features, input));
        let raw = self.project(input, &[draft.fc], arena)[0];
        let input_projections = super::draft::context_readers(draft);
        let f = self.out(&input_projections, hidden, arena);
        let from = (raw, draft.hidden_norm);
        let eps = super::draft::eps(site);
        self.push(panels::norm(hidden, eps, rows, chunk, from, f));
        let projected = self.project(f, &input_projections, arena);
        let at = Positions::Chunk(chunk);
        let launches = super::draft::context(site, rows, at, &projected);
        self.plan.launches.extend(launches);
    }

    /// `rms(x)` for `input_projections`.
    fn normed(
        &mut self,
        weight: u64,
        input_projections: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Out {
        let (hidden, eps) = (self.site.spec.hidden, self.site.spec.norm_eps);
        let out = self.out(input_projections, hidden, arena);
        let at = self.site.addresses;
        let from = (at.residual, weight);
        self.push(panels::norm(hidden, eps, self.rows, at.chunk, from, out));
        out
    }

    /// Products of one input, each with f32 rows of its own.
    fn project(
        &mut self,
        input: Out,
        matrices: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Vec<u64> {
        let outs: Vec<u64> = matrices
            .iter()
            .map(|m| arena.take(4 * self.rows * m.rows))
            .collect();
        let segments: Vec<Segment> = matrices
            .iter()
            .zip(&outs)
            .map(|(matrix, out)| segment(matrix, *out, Write::Store))
            .collect();
        self.products(input, matrices[0].cols, &segments);
        outs
    }

    /// `x += matrix · input`.
    fn add(&mut self, input: Out, matrix: WeightMatrix) {
        let x = self.site.addresses.residual;
        self.products(input, matrix.cols, &[segment(&matrix, x, Write::Add)]);
    }

    fn products(&mut self, input: Out, cols: usize, segments: &[Segment]) {
        let inputs = Inputs {
            panels: input.panels,
            f32: input.f32,
        };
        let from = (self.site.addresses.chunk, inputs);
        let gemm = self.gemm();
        let launches = gemm::products(gemm, self.rows, cols, segments, from, self.scratch);
        self.plan.launches.extend(launches);
    }

    fn attention(
        &mut self,
        a: &AttentionSpec,
        w: &AttentionWeights,
        norm: u64,
        cache: Cache,
        arena: &mut BumpAllocator,
    ) {
        let (site, rows) = (self.site, self.rows);
        let shape = shape(a, site.open, site.spec.norm_eps);
        let input_projections = [w.q, w.k, w.v];
        let y = self.normed(norm, &input_projections, arena);
        let projected = self.project(y, &input_projections, arena);
        let (q, chunk) = (projected[0], site.addresses.chunk);
        let from = Projections {
            q,
            k: projected[1],
            v: projected[2],
            kv_stride: w.k.rows,
            q_norm: w.q_norm,
            k_norm: w.k_norm,
            frequencies: site.frequencies(a.rope),
        };
        let at = Positions::Chunk(chunk);
        self.push(attention::prepare(&shape, rows, at, from, (cache, 0)));
        let out = self.out(&[w.o], a.n_heads * a.head_dim, arena);
        let selected = prefill_attention(&shape, site.gpu);
        let kernel = selected.kernel;
        self.plan.note(kernel.file(), selected.reason);
        self.push(attention::prefill(
            kernel,
            &shape,
            rows,
            (chunk, q),
            cache,
            out,
        ));
        self.add(out, w.o);
    }

    fn delta(
        &mut self,
        group: &DeltaGroup,
        w: &DeltaWeights,
        norm: u64,
        layer: Layer,
        arena: &mut BumpAllocator,
    ) {
        let (site, rows) = (self.site, self.rows);
        let shape = gated_delta::Shape::of(&group.spec);
        let input_projections = [w.qkv, w.z, w.beta, w.alpha];
        let y = self.normed(norm, &input_projections, arena);
        let projected = self.project(y, &input_projections, arena);
        let inputs = delta_inputs(w, &projected);
        let scratch = arena.take(gated_delta::prefill_scratch_bytes(shape, rows));
        let to = self.out(&[w.out], shape.values(), arena);
        let out = gated_delta::Out {
            forms: norm::Out::f32(to.f32),
            panel: (to.panels, Panels::new(0, rows).rows),
        };
        let chunk = site.addresses.chunk;
        let scan = gated_delta_scan(site.gpu);
        self.plan.note(scan.kernel.file(), scan.reason);
        let products = scan.kernel;
        let launches =
            gated_delta::prefill_on(products, shape, rows, chunk, &layer, &inputs, scratch, &out);
        self.plan.launches.extend(launches);
        self.add(to, w.out);
    }

    fn ffn(&mut self, w: &FfnWeights, arena: &mut BumpAllocator) {
        let (rows, chunk) = (self.rows, self.site.addresses.chunk);
        let input_projections = [w.gate, w.up];
        let y = self.normed(w.norm, &input_projections, arena);
        let width = w.gate.rows;
        let out = self.out(&[w.down], width, arena);
        let pair = gemm::Pair {
            cols: w.gate.cols,
            ffn: width,
            gate: (w.gate.kind, w.gate.at),
            up: (w.up.kind, w.up.at),
        };
        if pair.fits() && out.f32 == 0 {
            let from = (chunk, y.panels);
            let launches = gemm::gated(self.gemm(), rows, pair, from, self.scratch, out.panels);
            self.plan.launches.extend(launches);
        } else {
            let projected = self.project(y, &input_projections, arena);
            let from = (projected[0], projected[1]);
            self.push(panels::swiglu(width, width, rows, chunk, from, out));
        }
        self.add(out, w.down);
    }
}
