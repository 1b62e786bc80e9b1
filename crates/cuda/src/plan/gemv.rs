//! Layers of a step of one row in few launches: norms in the products behind them, gated units in
//! those before.

use contract::{FeedForward, ModelSpec, WeightRef};

use super::PlanContext;
use super::activations::ActivationFormats;
use super::decode_builder::DecodeBuilder;
use super::gemm::{GemmOperation, gemm_matrix};
use crate::gpu_props::GpuProps;
use crate::launch::Launch;
use crate::launch::gemm::gemv::{self, GemvEpilogue, GemvInput};
use crate::launch::gemm::small_batch::{GemmEpilogue, GemmMatrix};
use crate::launch::norm::ActivationBuffers;
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;
use crate::weights::{FeedForwardWeights, FfnWeights, WeightMatrix, fuses, mixer_inputs};

/// Whether layers of steps of one row go in few launches: where the norms fold into products. Asked
/// of the whole model, so that all of its pipeline stages answer alike.
pub(super) fn fits(gpu: GpuProps, whole: &ModelSpec) -> bool {
    let fits = |matrices: &[&WeightRef], results| {
        let operand = |weight: &&WeightRef| {
            let matrix = WeightMatrix {
                kind: WeightKind::of(weight.ty),
                rows: weight.rows,
                cols: weight.cols,
                at: 0,
            };
            gemm_matrix(&matrix, 0, GemmEpilogue::Store)
        };
        let matrices: Vec<GemmMatrix> = matrices.iter().map(operand).collect();
        let input = GemvInput::RmsNorm {
            row: 0,
            weight: 0,
            eps: whole.norm_eps,
        };
        gemv::launch(gpu, whole.hidden, &matrices, input, results).is_some()
    };
    whole.layers.iter().all(|layer| {
        let gate_and_up = match &layer.ffn {
            FeedForward::Dense(w) => Some([&w.gate, &w.up]),
            FeedForward::Experts(_) => None,
        };
        fuses(layer)
            && fits(&mixer_inputs(&layer.mixer), GemvEpilogue::Store)
            && gate_and_up.is_none_or(|both| fits(&both, GemvEpilogue::SwiGlu(0)))
    })
}

/// The head of a step of one row, with the final norm before it.
pub(super) fn head(
    context: &PlanContext<'_>,
    logits: &GemmOperation,
    norm: (u64, f32),
) -> Option<Launch> {
    if !context.gemv {
        return None;
    }
    let matrices = [gemm_matrix(&logits.matrix, logits.out, logits.write)];
    let input = residual_normed(context, norm);
    launch(
        context,
        context.spec.hidden,
        &matrices,
        input,
        GemvEpilogue::Store,
    )
}

fn launch(
    context: &PlanContext<'_>,
    cols: usize,
    matrices: &[GemmMatrix],
    input: GemvInput,
    results: GemvEpilogue,
) -> Option<Launch> {
    gemv::launch(context.gpu, cols, matrices, input, results)
}

fn residual_normed(context: &PlanContext<'_>, (weight, eps): (u64, f32)) -> GemvInput {
    GemvInput::RmsNorm {
        row: context.addresses.residual,
        weight,
        eps,
    }
}

impl DecodeBuilder<'_> {
    /// Layer `i` of a step of one row. What cannot be one launch is the launches of any other step.
    pub(super) fn gemv_layer(&mut self, i: usize) {
        let weights = &self.context.weights.layers[i];
        self.block(|b, arena| {
            let input_projections = weights.mixer.input_projections();
            let projected = b.norm_and_project(weights.mixer_norm, &input_projections, arena);
            let mixed = b.mixer(i, &projected, arena);
            b.project_and_add(&mixed, weights.mixer.out());
        });
        self.block(|b, arena| match &weights.ffn {
            FeedForwardWeights::Dense(w) => b.swiglu_ffn(w, arena),
            FeedForwardWeights::Experts(w) => b.experts(w, arena),
        });
        self.layer_end(i);
    }

    /// The norm of the residual stream, multiplied by each of `input_projections`.
    fn norm_and_project(
        &mut self,
        norm: u64,
        input_projections: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Vec<u64> {
        let mut take = |m: &WeightMatrix| arena.take(4 * m.rows);
        let outs: Vec<u64> = input_projections.iter().map(&mut take).collect();
        let matrices = input_projections.iter().zip(&outs);
        let matrices: Vec<GemmMatrix> = matrices
            .map(|(m, out)| gemm_matrix(m, *out, GemmEpilogue::Store))
            .collect();
        let input = residual_normed(self.context, (norm, self.eps));
        match launch(
            self.context,
            self.context.spec.hidden,
            &matrices,
            input,
            GemvEpilogue::Store,
        ) {
            Some(launch) => self.push(launch),
            None => {
                let y = self.normed(norm, input_projections, arena);
                self.project_to(&y, input_projections, &outs);
            }
        }
        outs
    }

    /// `x += matrix · input`.
    fn project_and_add(&mut self, input: &ActivationBuffers, matrix: WeightMatrix) {
        let matrices = [gemm_matrix(
            &matrix,
            self.context.addresses.residual,
            GemmEpilogue::Add,
        )];
        let halves = GemvInput::F16(input.f16);
        match launch(
            self.context,
            matrix.cols,
            &matrices,
            halves,
            GemvEpilogue::Store,
        ) {
            Some(launch) => self.push(launch),
            None => self.add(input, matrix),
        }
    }

    fn swiglu_ffn(&mut self, w: &FfnWeights, arena: &mut BumpAllocator) {
        let out = ActivationFormats::of([w.down.kind]).allocate(arena, 1, w.gate.rows);
        let matrices = [&w.gate, &w.up].map(|m| gemm_matrix(m, 0, GemmEpilogue::Store));
        let input = residual_normed(self.context, (w.norm, self.eps));
        let gated = GemvEpilogue::SwiGlu(out.f16);
        let launch = match out.f32 {
            0 => launch(
                self.context,
                self.context.spec.hidden,
                &matrices,
                input,
                gated,
            ),
            _ => None,
        };
        match launch {
            Some(launch) => {
                self.push(launch);
                self.project_and_add(&out, w.down);
            }
            None => self.dense_ffn(w, 0, arena),
        }
    }
}
