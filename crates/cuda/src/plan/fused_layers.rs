//! Fused layers: one launch for all GEMMs from a mixer to the next.

use super::PlanContext;
use super::activations::ActivationFormats;
use super::decode_builder::DecodeBuilder;
use super::select::{GemmFits, decode_gemm};
use crate::launch::gemm::fused_layer::{
    self, FusedLayer, FusedLayerBuffers, FusedLayerConfig, FusedLayerForm, FusedLayerMatrices,
    FusedLayerNorms, FusedLayerWorkspace, MAX_ROWS,
};
use crate::launch::gemm::small_batch::GemmScratch;
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape};
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;
use crate::step::ROWS;
use crate::weights::{
    AttentionWeights, ExpertWeights, FeedForwardWeights, FfnWeights, WeightMatrix, Weights, fuses,
};

const _: () = assert!(ROWS <= MAX_ROWS, "a chain takes the rows of any step");

/// Bytes of the zeroed workspace that all fused layers share, for layers of `hidden` values.
pub(super) fn workspace_bytes(weights: &Weights, hidden: usize) -> usize {
    let of_target = weights.layers.iter().map(|layer| &layer.ffn);
    let of_draft = weights.draft.iter().flat_map(|draft| &draft.layers);
    let of_mtp = weights.mtp.iter().map(|mtp| &mtp.ffn);
    let all = of_target
        .chain(of_mtp)
        .filter_map(FeedForwardWeights::dense)
        .chain(of_draft.map(|layer| &layer.ffn));
    FusedLayerWorkspace::bytes(hidden, all.map(|ffn| ffn.gate.rows).max().unwrap_or(0))
}

/// The matrices of every layer, bottom to top, if all layers can be fused.
pub(super) struct FusedLayerPlan<'a> {
    layers: Vec<LayerMatrices<'a>>,
    config: FusedLayerConfig,
    /// Of a pipeline stage.
    stage: Option<FusedStage<'a>>,
}

/// The ends of the fused layers of a pipeline stage.
#[derive(Clone, Copy)]
struct FusedStage<'a> {
    /// Whether the stage below has made the scales and projections of the first layer.
    has_projections: bool,
    /// The norm and projections of the layer above the last.
    above: Option<&'a (u64, Vec<WeightMatrix>)>,
}

/// The norm and matrices of one layer.
struct LayerMatrices<'a> {
    norm: u64,
    /// The projections of the mixer's input.
    input_projections: Vec<WeightMatrix>,
    out: WeightMatrix,
    ffn: &'a FfnWeights,
}

fn fused_matrix(matrix: &WeightMatrix) -> fused_layer::FusedMatrix {
    fused_layer::FusedMatrix {
        kind: matrix.kind,
        rows: matrix.rows,
        cols: matrix.cols,
        weight: matrix.at,
    }
}

impl LayerMatrices<'_> {
    fn kinds(&self) -> impl Iterator<Item = WeightKind> {
        let own = [self.out, self.ffn.gate, self.ffn.up, self.ffn.down];
        self.input_projections
            .iter()
            .copied()
            .chain(own)
            .map(|m| m.kind)
    }

    /// The matrices of its fused layer; `next`: the projections of the layer above and their
    /// outputs.
    fn products<'n>(&self, next: &'n [(fused_layer::FusedMatrix, u64)]) -> FusedLayerMatrices<'n> {
        FusedLayerMatrices {
            out: fused_matrix(&self.out),
            gate: fused_matrix(&self.ffn.gate),
            up: fused_matrix(&self.ffn.up),
            down: fused_matrix(&self.ffn.down),
            next,
        }
    }
}

impl<'a> FusedLayerPlan<'a> {
    /// The source of the fused layers.
    pub(super) fn form(&self) -> FusedLayerForm {
        self.config.form()
    }

    /// The target's layers.
    pub(super) fn of_target(context: &PlanContext<'a>) -> Option<FusedLayerPlan<'a>> {
        let specs = context.spec.layers.iter();
        let layers = context
            .weights
            .layers
            .iter()
            .zip(specs)
            .map(|(layer, spec)| {
                fuses(spec).then_some(LayerMatrices {
                    norm: layer.mixer_norm,
                    input_projections: layer.mixer.input_projections(),
                    out: layer.mixer.out(),
                    ffn: layer.ffn.dense()?,
                })
            });
        let stage = (!context.stage.is_whole()).then_some(FusedStage {
            has_projections: !context.stage.is_first,
            above: context.weights.above.as_ref(),
        });
        FusedLayerPlan::new(context, layers.collect::<Option<_>>()?, stage, true)
    }

    /// Layers that draft.
    fn of_drafting(
        context: &PlanContext<'a>,
        layers: &[DraftingLayer<'a>],
    ) -> Option<FusedLayerPlan<'a>> {
        let layers = layers.iter().map(|layer| {
            Some(LayerMatrices {
                norm: layer.norm,
                input_projections: layer.attention.input_projections().to_vec(),
                out: layer.attention.o,
                ffn: layer.ffn.dense()?,
            })
        });
        FusedLayerPlan::new(context, layers.collect::<Option<_>>()?, None, false)
    }

    /// Selects fused layers where they may be used and fit. A fused layer and separate launches
    /// differ by rounding, so a model uses them at every number of rows of a step or at none. No
    /// step has more than [`MAX_ROWS`] rows, so the choice does not depend on them.
    fn new(
        context: &PlanContext<'a>,
        layers: Vec<LayerMatrices<'a>>,
        stage: Option<FusedStage<'a>>,
        is_target: bool,
    ) -> Option<FusedLayerPlan<'a>> {
        if !context.fused_layers {
            return None;
        }
        let above = stage.and_then(|stage| stage.above);
        let above = || above.into_iter().flat_map(|(_, matrices)| matrices);
        // All stages and shards of a model run the same kernels.
        let is_shard = is_target && context.exchange.is_some();
        let kinds: Vec<WeightKind> = if stage.is_some() || is_shard {
            context.stage.layer_kinds.clone()
        } else {
            layers.iter().flat_map(LayerMatrices::kinds).collect()
        };
        let config = FusedLayerConfig::new(context.gpu, MAX_ROWS, &kinds)?;
        let fits = |i: usize, layer: &LayerMatrices<'_>| {
            let next: Vec<_> = match layers.get(i + 1) {
                Some(next) => next.input_projections.iter().collect(),
                None => above().collect(),
            };
            let next: Vec<_> = next.into_iter().map(|m| (fused_matrix(m), 0)).collect();
            fused_layer::fits(&layer.products(&next))
        };
        let all = layers.iter().enumerate().all(|(i, layer)| fits(i, layer));
        all.then_some(FusedLayerPlan {
            layers,
            config,
            stage,
        })
    }
}

/// A layer of a draft or of a multi-token-prediction head: attention and a feed-forward, each
/// behind its norm and before the residual.
#[derive(Clone, Copy)]
pub(super) struct DraftingLayer<'a> {
    /// Before attention.
    pub(super) norm: u64,
    pub(super) attention: &'a AttentionWeights,
    pub(super) ffn: DraftingFfn<'a>,
}

/// The feed-forward of a layer that drafts.
#[derive(Clone, Copy)]
pub(super) enum DraftingFfn<'a> {
    Dense(&'a FfnWeights),
    Experts(&'a ExpertWeights),
}

impl<'a> DraftingFfn<'a> {
    /// That of a model's layer.
    pub(super) fn of(ffn: &'a FeedForwardWeights) -> DraftingFfn<'a> {
        match ffn {
            FeedForwardWeights::Dense(w) => DraftingFfn::Dense(w),
            FeedForwardWeights::Experts(w) => DraftingFfn::Experts(w),
        }
    }

    fn dense(self) -> Option<&'a FfnWeights> {
        match self {
            DraftingFfn::Dense(w) => Some(w),
            DraftingFfn::Experts(_) => None,
        }
    }
}

impl DecodeBuilder<'_> {
    /// Layers that draft, fused where the GPU and the matrices allow it. `mixer` makes the launches
    /// between the projections of a layer's attention and its output projection.
    pub(super) fn push_drafting_layers(
        &mut self,
        layers: &[DraftingLayer<'_>],
        mixer: impl Fn(&mut Self, usize, &[u64], &mut BumpAllocator) -> ActivationBuffers,
    ) {
        let fused_layers = FusedLayerPlan::of_drafting(self.context, layers);
        self.note_gemm(fused_layers.as_ref().map(FusedLayerPlan::form));
        if let Some(fused_layers) = fused_layers {
            self.push_fused_layers(&fused_layers, mixer, |_, _| {});
            return;
        }
        for (i, layer) in layers.iter().enumerate() {
            self.block(|b, arena| {
                let input_projections = layer.attention.input_projections();
                let y = b.normed(layer.norm, &input_projections, arena);
                let projected = b.project(&y, &input_projections, arena);
                let mixed = mixer(b, i, &projected, arena);
                b.add(&mixed, layer.attention.o);
            });
            self.block(|b, arena| match layer.ffn {
                DraftingFfn::Dense(w) => b.dense_ffn(w, 0, arena),
                DraftingFfn::Experts(w) => b.experts(w, arena),
            });
        }
    }

    /// Notes how the GEMMs of layers that draft run.
    pub(super) fn note_gemm(&mut self, fused_layer: Option<FusedLayerForm>) {
        let gemm = decode_gemm(
            self.rows,
            GemmFits {
                gemv: false,
                fused_layer,
            },
        );
        self.plan.note(gemm.kernel.file(), gemm.reason);
    }

    /// Every layer, the first's norm and projections as launches of their own unless the stage
    /// below has made them; the last ends with those of the stage above. `mixer` makes the launches
    /// of a layer's mixer from its projections, `end` what follows when its output stands in the
    /// residual stream.
    pub(super) fn push_fused_layers(
        &mut self,
        fused_layers: &FusedLayerPlan<'_>,
        mixer: impl Fn(&mut Self, usize, &[u64], &mut BumpAllocator) -> ActivationBuffers,
        end: impl Fn(&mut Self, usize),
    ) {
        let (context, rows) = (self.context, self.rows);
        let (hidden, gpu) = (context.spec.hidden, context.gpu);
        let Some(first) = fused_layers.layers.first() else {
            return;
        };
        let mut arena = self.arena;
        let stage = fused_layers.stage;
        let matrices_above = stage.and_then(|stage| stage.above);
        let input_projections = fused_layers
            .layers
            .iter()
            .flat_map(|layer| &layer.input_projections)
            .chain(
                matrices_above
                    .into_iter()
                    .flat_map(|(_, matrices)| matrices),
            );
        let memory = FusedLayerBuffers {
            residual: context.addresses.residual,
            workspace: FusedLayerWorkspace::at(context.addresses.fused_layer, hidden),
            next: ActivationFormats::of(input_projections.map(|m| m.kind))
                .allocate(&mut arena, rows, hidden),
            squares: [(); 2].map(|()| arena.take(fused_layer::square_sum_bytes(rows, hidden))),
            scales: match stage {
                Some(_) => context.boundary_scales(rows).unwrap_or_default(),
                None => arena.take(4 * rows),
            },
            scratch: GemmScratch(context.addresses.partials),
            exchange: self
                .exchange
                .map_or([0; 2], |shape| shape.fragments(context.addresses.exchange)),
        };
        // Projections of all layers have one place: those of a layer are written when the mixer
        // below has read its own. In a stage, that place is handed over.
        let in_block = stage.and_then(|_| context.boundary_projections(rows));
        let (start, mut above) = (in_block.unwrap_or(arena), arena);
        let outputs = |matrices: &[WeightMatrix]| {
            let mut arena = start;
            let mut take = |m: &WeightMatrix| arena.take(4 * rows * m.rows);
            let outs: Vec<u64> = matrices.iter().map(&mut take).collect();
            (outs, arena)
        };
        for layer in fused_layers.layers.iter().filter(|_| in_block.is_none()) {
            let (_, end) = outputs(&layer.input_projections);
            if end.used() > above.used() {
                above = end;
            }
        }
        let rms = RmsShape {
            width: hidden,
            eps: self.eps,
        };
        let x = Residual::of(memory.residual);
        let input = ActivationBuffers {
            f16: memory.next.f16,
            f32: if first
                .input_projections
                .iter()
                .any(|m| m.kind == WeightKind::F32)
            {
                memory.next.f32
            } else {
                0
            },
        };
        let buffers = norm::RmsNormBuffers {
            x,
            weight: first.norm,
            scales: memory.scales,
            out: input,
        };
        let (mut projected, _) = outputs(&first.input_projections);
        if !stage.is_some_and(|stage| stage.has_projections) {
            self.push(norm::rms_norm_and_scales(rms, rows, self.source, buffers));
            self.project_to(&input, &first.input_projections, &projected);
        }
        for (i, layer) in fused_layers.layers.iter().enumerate() {
            let mut arena = above;
            let mixed = mixer(self, i, &projected, &mut arena);
            self.note_peak(arena);
            let next: Option<(u64, &[WeightMatrix])> = match fused_layers.layers.get(i + 1) {
                Some(next) => Some((next.norm, &next.input_projections)),
                None => matrices_above.map(|(norm, matrices)| (*norm, &**matrices)),
            };
            let matrices = next.map_or(&[][..], |(_, matrices)| matrices);
            projected = outputs(matrices).0;
            let outs = matrices.iter().map(fused_matrix).zip(projected.clone());
            let outs: Vec<_> = outs.collect();
            let norms = FusedLayerNorms {
                ffn: layer.ffn.norm,
                next: next.map_or(0, |(norm, _)| norm),
                eps: self.eps,
            };
            let products = layer.products(&outs);
            let fused = FusedLayer {
                bucket: rows,
                matrices: &products,
                norms,
                buffers: &memory,
                mixed: mixed.f16,
            };
            for launch in fused_layer::launches(gpu, fused_layers.config, &fused) {
                self.push(launch);
            }
            end(self, i);
        }
    }
}
