//! A decode step over trees: embedding, every layer, the hidden rows for a multi-token-prediction
//! head, the LM head. A pipeline stage has only its part of them.

use super::decode_builder::{DecodeBuilder, builder};
use super::fused_layers::FusedLayerPlan;
use super::lm_head::LmHead;
use super::mtp::Head;
use super::select::{DecodeGemm, Depth, GemmFits, decode_gemm};
use super::{Plan, PlanContext};
use crate::launch::mtp::KeptRows;
use crate::launch::norm::RowSource;
use crate::memory::BumpAllocator;

/// The plan of a decode step of `trees` trees in up to `rows` rows, of sequences as deep as `depth`
/// allows.
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
    builder.exchange = context.exchange;
    builder.input_rows(None);
    let layers = 0..context.spec.layers.len();
    let fused_layers = FusedLayerPlan::of_target(context);
    let fits = GemmFits {
        gemv: context.gemv,
        fused_layer: fused_layers.as_ref().map(FusedLayerPlan::form),
    };
    let gemm = decode_gemm(rows, fits);
    builder.plan.note(gemm.kernel.file(), gemm.reason);
    match (gemm.kernel, fused_layers) {
        (DecodeGemm::Gemv, _) => layers.for_each(|i| builder.gemv_layer(i)),
        (DecodeGemm::FusedLayer(_), Some(fused_layers)) => {
            builder.push_fused_layers(
                &fused_layers,
                DecodeBuilder::mixer,
                DecodeBuilder::layer_end,
            );
        }
        _ => layers.for_each(|i| builder.layer(i)),
    }
    builder.exchange = None;
    let asked = RowSource::LogitsRowsOfStep(at.step);
    if let Some(head) = Head::of(context) {
        builder.push(head.keep(context, rows, KeptRows::Nodes(at.step)));
    }
    if !context.stage.has_head {
        let (plan, peak) = builder.finish();
        *arena = peak;
        return plan;
    }
    builder.head(asked, LmHead::of_target(context, eps), arena)
}

impl DecodeBuilder<'_> {
    fn layer(&mut self, i: usize) {
        let weights = &self.context.weights.layers[i];
        self.block(|b, arena| {
            let input_projections = weights.mixer.input_projections();
            let y = b.normed(weights.mixer_norm, &input_projections, arena);
            let projected = b.project(&y, &input_projections, arena);
            let mixed = b.mixer(i, &projected, arena);
            b.add_normed(&mixed, weights.mixer.out(), weights.post_mixer_norm, arena);
        });
        self.block(|b, arena| b.ffn(&weights.ffn, weights.post_ffn_norm, arena));
        self.layer_end(i);
    }
}
