//! A short chunk of a prompt: the layers of a chunk with the products of a step.
//!
//! A long chunk expands every matrix once and multiplies thousands of rows with it; of 64 rows the
//! expanding is nearly all there is. The end of a prompt whose beginning came from a saved state is
//! that short, and so is every short prompt. A chunk's attention gives a block some rows and all
//! keys, so few rows keep few blocks busy; a step's shares the keys out. It takes the rows as a
//! single-branch tree, whose header is uploaded beside the chunk's. States, windows and rows are
//! committed on the way, as in any chunk.

use super::activations::ActivationFormats;
use super::decode_builder::{DecodeBuilder, builder};
use super::fused_layers::FusedLayerPlan;
use super::layer_arguments::delta_inputs;
use super::mtp::Head;
use super::select::{GemmFits, PrefillPath, Selected, decode_gemm, prefill_path};
use super::{Plan, PlanContext, draft};
use crate::launch::attention::Positions;
use crate::launch::draft::capture_hidden_states;
use crate::launch::gated_delta::{self, ChunkLaunch, Layer};
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape, RowSource};
use crate::memory::BumpAllocator;
use crate::state::DeltaGroup;
use crate::step::ROWS;
use crate::weights::{DeltaWeights, DraftWeights};

/// Padded lengths that short plans are built for.
pub(super) const BUCKETS: [usize; 3] = [16, 32, ROWS];

/// How chunks of up to `rows` rows are prefilled.
pub(super) fn path(context: &PlanContext<'_>, rows: usize) -> Selected<PrefillPath> {
    prefill_path(
        rows,
        context.load_config.batch_invariant,
        context.gemv && context.dense,
    )
}

/// The lengths of the passes that `rows` tokens after `committed` ones are read in. They end where
/// the chunks of the delta rule do, which go by absolute multiples.
pub(super) fn pieces(committed: usize, rows: usize) -> Vec<usize> {
    let mut pieces = Vec::new();
    let (mut left, mut room) = (rows, ROWS - committed % ROWS);
    while left > room {
        pieces.push(room);
        left -= room;
        room = ROWS;
    }
    pieces.push(left);
    pieces
}

/// The plan of a chunk of up to `rows` rows.
pub(super) fn build(
    context: &PlanContext<'_>,
    rows: usize,
    reason: &'static str,
    arena: &mut BumpAllocator,
) -> Plan {
    let chunk = context.addresses.chunk;
    let mut start = *arena;
    let features = context.state.draft.as_ref();
    let features = features.map(|draft| start.take(4 * rows * draft.width));
    let step = context.addresses.step;
    let mut builder = builder(context, (rows, 1), step, context.spec.norm_eps, start);
    builder.source = RowSource::Chunk(chunk);
    builder.exchange = context.exchange;
    builder.input_rows(features);
    let mixer = |b: &mut DecodeBuilder<'_>,
                 i: usize,
                 projected: &[u64],
                 arena: &mut BumpAllocator| { b.chunk_mixer(i, projected, arena) };
    let end = |b: &mut DecodeBuilder<'_>, i: usize| b.chunk_layer_end(i, features);
    let fused_layers = FusedLayerPlan::of_target(context);
    let gemm = decode_gemm(
        rows,
        GemmFits {
            gemv: false,
            fused_layer: fused_layers.as_ref().map(FusedLayerPlan::form),
        },
    );
    builder.plan.note(gemm.kernel.file(), reason);
    match fused_layers {
        Some(fused_layers) => builder.push_fused_layers(&fused_layers, mixer, end),
        None => {
            for i in 0..context.spec.layers.len() {
                let weights = &context.weights.layers[i];
                builder.block(|b, arena| {
                    let input_projections = weights.mixer.input_projections();
                    let y = b.normed(weights.mixer_norm, &input_projections, arena);
                    let projected = b.project(&y, &input_projections, arena);
                    let mixed = b.chunk_mixer(i, &projected, arena);
                    let out = weights.mixer.out();
                    b.add_normed(&mixed, out, weights.post_mixer_norm, arena);
                });
                builder.block(|b, arena| b.ffn(&weights.ffn, weights.post_ffn_norm, arena));
                end(&mut builder, i);
            }
        }
    }
    builder.exchange = None;
    if let (Some(draft), Some(features)) = (&context.weights.draft, features) {
        builder.block(|b, arena| b.chunk_draft_context(draft, features, arena));
    }
    if let Some(head) = Head::of(context) {
        builder.block(|b, arena| b.chunk_mtp(&head, arena));
    }
    let (plan, peak) = builder.finish();
    *arena = peak;
    plan
}

impl DecodeBuilder<'_> {
    /// As [`DecodeBuilder::mixer`], with the chunked delta rule.
    fn chunk_mixer(
        &mut self,
        i: usize,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        self.mixer_with(i, projected, arena, |b, group, w, layer, arena| {
            b.chunked_delta(group, w, layer, projected, arena)
        })
    }

    fn chunked_delta(
        &mut self,
        group: &DeltaGroup,
        w: &DeltaWeights,
        layer: Layer,
        projected: &[u64],
        arena: &mut BumpAllocator,
    ) -> ActivationBuffers {
        let (context, rows) = (self.context, self.rows);
        let shape = gated_delta::Shape::of(&group.spec);
        let inputs = delta_inputs(w, projected);
        let scratch = arena.take(gated_delta::prefill_scratch_bytes(shape, rows));
        let forms = ActivationFormats::of([w.out.kind]).allocate(arena, rows, shape.values());
        let (chunk, out) = (
            context.addresses.chunk,
            gated_delta::GatedNormOutput::of(forms),
        );
        let launch = ChunkLaunch {
            shape,
            rows,
            chunk,
            layer: &layer,
            inputs: &inputs,
        };
        self.plan
            .push_chunked_delta(context.gpu, &launch, scratch, &out);
        forms
    }

    /// The output of layer `i` stands in the residual stream.
    fn chunk_layer_end(&mut self, i: usize, features: Option<u64>) {
        let context = self.context;
        if let Some(to) = features.and_then(|out| context.chunk_capture(i, out)) {
            let x = context.addresses.residual;
            self.push(capture_hidden_states(
                context.spec.hidden,
                self.rows,
                self.source,
                x,
                to,
            ));
        }
        self.hand_over_layer(i);
        self.plan.layer_ends.push(self.plan.launches.len());
    }

    /// The draft's keys and values of the chunk's rows, from their features.
    fn chunk_draft_context(
        &mut self,
        weights: &DraftWeights,
        features: u64,
        arena: &mut BumpAllocator,
    ) {
        let (context, rows, source) = (self.context, self.rows, self.source);
        let (width, hidden) = (weights.fc.cols, weights.fc.rows);
        let input = ActivationFormats::of([weights.fc.kind]).allocate(arena, rows, width);
        self.push(norm::convert(width, rows, source, features, input));
        let raw = self.project(&input, &[weights.fc], arena)[0];
        let input_projections = draft::context_readers(weights);
        let f = ActivationFormats::of(input_projections.iter().map(|m| m.kind))
            .allocate(arena, rows, hidden);
        let rms = RmsShape {
            width: hidden,
            eps: draft::eps(context),
        };
        let x = Residual::of(raw);
        self.push(norm::rms_norm(rms, rows, source, x, weights.hidden_norm, f));
        let projected = self.project(&f, &input_projections, arena);
        let at = Positions::Chunk(context.addresses.chunk);
        let launches = draft::write_draft_context(context, rows, at, &projected);
        self.plan.launches.extend(launches);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_passes_end_at_multiples_of_their_length() {
        for (committed, rows, expected) in [
            (0, 5, &[5][..]),
            (0, 64, &[64]),
            (32_000, 132, &[64, 64, 4]),
            (100, 64, &[28, 36]),
            (63, 66, &[1, 64, 1]),
            (64, 256, &[64; 4]),
        ] {
            assert_eq!(
                pieces(committed, rows),
                expected,
                "{rows} after {committed}"
            );
        }
    }
}
