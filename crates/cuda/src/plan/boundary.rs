//! The boundary between two pipeline stages: a block of rows at the residual stream, which a stage
//! receives, works on and hands over.
//!
//! ```text
//! residual stream    f32 [rows][hidden]
//! scales             f32 [rows]; the last norm's, where layers are fused
//! projections        of the next layer's input, one matrix after the other, where layers are fused
//! captured layers    f32 [rows][hidden] each, those that a draft reads, bottom to top
//! ```
//!
//! Every part begins at a multiple of 256 bytes. `rows` are those of the plan, padding included; in
//! a draft's own stage, whose device may run other kernels, those of the longest pass. A fused
//! layer ends with the projections of the layer above it, with other bits than a launch of their
//! own. So the stage below has a copy of these matrices, and a split model gives the bits of one
//! device. Passes of more than [`ROWS`] rows have neither scales nor projections.

use contract::{FeedForward, LoadConfig, Mixer, ModelSpec, StageConfig};

use super::PlanContext;
use super::decode_builder::DecodeBuilder;
use crate::launch::draft::{CaptureTarget, capture_hidden_states};
use crate::launch::gemm::fused_layer::FusedLayerForm;
use crate::memory::{ALIGN, BumpAllocator};
use crate::pack::WeightKind;
use crate::step::ROWS;
use crate::weights::mixer_inputs;

/// What a stage receives and hands over. A whole model receives and hands over nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StageBoundary {
    /// The stage's first layer in the whole model.
    pub(crate) first_layer: usize,
    pub(crate) is_first: bool,
    /// Whether the stage has the LM head.
    pub(crate) has_head: bool,
    /// Whether nothing is handed over.
    pub(crate) is_last: bool,
    /// Layers whose captured hidden states come with the input.
    pub(crate) received: Vec<usize>,
    /// Layers whose captured hidden states go with the output. Those received come first.
    pub(crate) handed_over: Vec<usize>,
    /// Rows of the longest pass, in a draft's own stage.
    draft_rows: Option<usize>,
    pub(crate) block: BlockLayout,
    /// Kinds of the matrices of all layers of the whole model that may be fused.
    pub(super) layer_kinds: Vec<WeightKind>,
}

/// Sizes of the block, alike in all stages of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct BlockLayout {
    /// Values of a row.
    pub(crate) hidden: usize,
    /// The most input projections of a layer: values of a row, and matrices.
    pub(crate) projections: (usize, usize),
    /// Whether layers may be fused on this device.
    pub(crate) fused: bool,
}

/// A part of a block, as offsets in the stage that leaves it and in the one that receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockPart {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: usize,
}

/// Kernels whose results a stage above goes on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StageKernels {
    /// Short chunks run with the decode kernels.
    pub(super) short_prefill: bool,
    /// The fused layers of steps, if layers are fused.
    pub(super) fused_layers: Option<FusedLayerForm>,
    /// Steps of one row run with few launches.
    pub(super) gemv: bool,
}

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN as usize)
}

/// Kinds of the matrices of all layers, each once; experts are not fused.
fn layer_kinds(spec: &ModelSpec) -> Vec<WeightKind> {
    let matrices = spec.layers.iter().flat_map(|layer| {
        let out = match &layer.mixer {
            Mixer::Attention(a) => &a.o,
            Mixer::GatedDelta(d) => &d.out,
        };
        let dense = match &layer.ffn {
            FeedForward::Dense(dense) => dense.matrices().to_vec(),
            FeedForward::Experts(_) => Vec::new(),
        };
        mixer_inputs(&layer.mixer)
            .into_iter()
            .chain([out])
            .chain(dense)
    });
    let mut kinds: Vec<WeightKind> = Vec::new();
    for kind in matrices.map(|matrix| WeightKind::of(matrix.ty)) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

impl BlockLayout {
    fn of(spec: &ModelSpec, fused: bool) -> BlockLayout {
        let inputs = || spec.layers.iter().map(|layer| mixer_inputs(&layer.mixer));
        let values = inputs().map(|all| all.iter().map(|matrix| matrix.rows).sum());
        let matrices = inputs().map(|all| all.len());
        BlockLayout {
            hidden: spec.hidden,
            projections: (values.max().unwrap_or(0), matrices.max().unwrap_or(0)),
            fused,
        }
    }

    /// Bytes of rows of the residual stream, or of a captured layer.
    pub(crate) fn part_bytes(&self, rows: usize) -> usize {
        aligned(4 * rows * self.hidden)
    }

    /// Offset of the scales.
    pub(super) fn scales(&self, rows: usize) -> usize {
        self.part_bytes(rows)
    }

    /// Offset of the projections.
    pub(super) fn projections(&self, rows: usize) -> usize {
        self.scales(rows) + aligned(4 * rows)
    }

    /// Offset of captured layer `index`.
    fn captured(&self, rows: usize, index: usize) -> usize {
        let (values, matrices) = self.projections;
        let before = if self.fused && rows <= ROWS {
            // Each matrix begins at a multiple of 256 bytes.
            self.projections(rows) + aligned(4 * rows * values) + matrices * ALIGN as usize
        } else {
            self.part_bytes(rows)
        };
        before + index * self.part_bytes(rows)
    }
}

impl StageBoundary {
    /// Of a stage; `fused`: whether layers may be fused on its device.
    pub(crate) fn of(stage: &StageConfig, fused: bool) -> StageBoundary {
        StageBoundary {
            first_layer: stage.layers.start,
            is_first: stage.is_first(),
            has_head: stage.has_head(),
            is_last: stage.is_last(),
            received: stage.received_layers(),
            handed_over: stage.handed_over_layers(),
            draft_rows: stage
                .layers
                .is_empty()
                .then(|| ROWS.max(stage.model.limits.prefill_chunk)),
            block: BlockLayout::of(&stage.model.target, fused),
            layer_kinds: layer_kinds(&stage.model.target),
        }
    }

    /// Of a whole model.
    pub(super) fn whole(load_config: &LoadConfig, fused: bool) -> StageBoundary {
        StageBoundary::of(&StageConfig::whole(load_config.clone()), fused)
    }

    /// Whether it is a draft's own stage, which receives captured hidden states of any device.
    pub(crate) fn is_draft(&self) -> bool {
        self.draft_rows.is_some()
    }

    /// Offset of captured layer `index` in the block of a pass of `rows` rows.
    pub(crate) fn captured(&self, rows: usize, index: usize) -> usize {
        match self.draft_rows {
            Some(longest) => (1 + index) * self.block.part_bytes(longest),
            None => self.block.captured(rows, index),
        }
    }

    /// Whether it is a whole model.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_first && self.is_last
    }

    /// Bytes of the block of up to `rows` rows.
    pub(super) fn block_bytes(&self, rows: usize) -> usize {
        if self.is_whole() {
            return 4 * rows * self.block.hidden;
        }
        let n_captured = self.received.len().max(self.handed_over.len());
        let of = |rows| self.captured(rows, n_captured);
        of(rows).max(of(ROWS))
    }

    /// The parts of the block that a pass of `rows` rows hands over to a stage `above`; `bucket`
    /// are the rows of its plan.
    pub(crate) fn handed_over_parts(
        &self,
        above: &StageBoundary,
        bucket: usize,
        rows: usize,
    ) -> Vec<BlockPart> {
        let n = self.handed_over.len();
        if bucket <= ROWS && !above.is_draft() {
            return vec![BlockPart {
                from: 0,
                to: 0,
                bytes: self.captured(bucket, n),
            }];
        }
        let part = |from, to| BlockPart {
            from,
            to,
            bytes: 4 * rows * self.block.hidden,
        };
        let captured = (0..n).map(|i| part(self.captured(bucket, i), above.captured(bucket, i)));
        std::iter::once(part(0, 0)).chain(captured).collect()
    }
}

impl PlanContext<'_> {
    /// Where the rows of a pass hand over layer `layer` of this stage, if they do.
    pub(super) fn capture_handed_over(&self, rows: usize, layer: usize) -> Option<CaptureTarget> {
        let stage = &self.stage;
        let layer = stage.first_layer + layer;
        let index = stage.handed_over.iter().position(|kept| *kept == layer)?;
        Some(CaptureTarget {
            out: self.addresses.residual + stage.captured(rows, index) as u64,
            stride: self.spec.hidden,
            offset: 0,
            to_feature_pool: false,
        })
    }

    /// Addresses of the received layers of a pass, each with its column among the features of the
    /// draft.
    pub(super) fn received_columns(&self, rows: usize) -> Vec<(u64, usize)> {
        let stage = &self.stage;
        let Some(draft) = &self.load_config.draft else {
            return Vec::new();
        };
        let received = stage.received.iter().enumerate();
        let column = received.filter_map(|(i, layer)| {
            let mut captured = draft.spec.capture_layers.iter();
            let column = captured.position(|captured| captured == layer)?;
            let at = self.addresses.residual + stage.captured(rows, i) as u64;
            Some((at, column))
        });
        column.collect()
    }

    /// Where the projections of fused layers of a pass stand, in a stage.
    pub(super) fn boundary_projections(&self, rows: usize) -> Option<BumpAllocator> {
        if self.stage.is_whole() {
            return None;
        }
        let at = self.addresses.residual + self.stage.block.projections(rows) as u64;
        Some(BumpAllocator::new(at))
    }

    /// Where the scales of fused layers of a pass stand, in a stage.
    pub(super) fn boundary_scales(&self, rows: usize) -> Option<u64> {
        let at = self.addresses.residual + self.stage.block.scales(rows) as u64;
        (!self.stage.is_whole()).then_some(at)
    }
}

impl DecodeBuilder<'_> {
    /// The rows of a pass in the residual stream: their embeddings, or what the stage below has
    /// handed over. `features` are those of a chunk's rows for a draft; a step has a pool.
    pub(super) fn input_rows(&mut self, features: Option<u64>) {
        let (context, rows) = (self.context, self.rows);
        if context.stage.is_first {
            self.embed();
            return;
        }
        let Some(draft) = &context.state.draft else {
            return;
        };
        let hidden = context.spec.hidden;
        for (x, column) in context.received_columns(rows) {
            let to = CaptureTarget {
                out: features.unwrap_or(draft.features),
                stride: draft.width,
                offset: column * hidden,
                to_feature_pool: features.is_none(),
            };
            self.push(capture_hidden_states(hidden, rows, self.source, x, to));
        }
    }

    /// Layer `i` stands in the residual stream: a copy of it for the stage above, if that reads it.
    pub(super) fn hand_over_layer(&mut self, i: usize) {
        let context = self.context;
        if let Some(to) = context.capture_handed_over(self.rows, i) {
            let (hidden, x) = (context.spec.hidden, context.addresses.residual);
            self.push(capture_hidden_states(hidden, self.rows, self.source, x, to));
        }
    }
}
