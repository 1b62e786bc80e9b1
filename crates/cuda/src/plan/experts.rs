//! Mixtures of experts of decode steps.

use contract::ModelSpec;

use super::activations::ActivationFormats;
use super::decode_builder::DecodeBuilder;
use crate::launch::moe::decode::{DecodeMoe, RouteInput};
use crate::launch::moe::{ExpertMatrices, ExpertMatrix, ExpertSum, ExpertTable, MoeShape, Router};
use crate::memory::BumpAllocator;
use crate::weights::{ExpertWeights, FeedForwardWeights, WeightMatrix};

impl ExpertWeights {
    /// Sizes, as launches take them.
    pub(super) fn shape(&self) -> MoeShape {
        MoeShape {
            width: self.router.cols,
            n_experts: self.n_experts,
            n_used: self.n_used,
            ffn: self.down.cols,
            shared_ffn: self.shared.as_ref().map(|shared| shared.down.cols),
        }
    }

    /// What routes a row.
    pub(super) fn router(&self) -> Router {
        Router {
            weight: self.router.at,
            shared_gate: self.shared.as_ref().map_or(0, |shared| shared.factor),
            scale: self.scale,
        }
    }

    /// The stacks.
    pub(super) fn matrices(&self) -> ExpertMatrices {
        expert_matrices(
            [self.gate, self.up, self.down],
            self.placed.map(|p| p.table),
        )
    }
}

fn expert_matrices(matrices: [WeightMatrix; 3], table: Option<ExpertTable>) -> ExpertMatrices {
    let [gate, up, down] = matrices.map(|matrix| ExpertMatrix {
        kind: matrix.kind,
        weight: matrix.at,
    });
    ExpertMatrices {
        gate,
        up,
        down,
        table,
    }
}

/// Whether all layers have dense feed-forwards.
pub(super) fn all_dense(whole: &ModelSpec) -> bool {
    let mut layers = whole.layers.iter();
    layers.all(|layer| layer.ffn.experts().is_none())
}

impl DecodeBuilder<'_> {
    /// The feed-forward of a layer with the norm before it, and that behind it if `post_norm` is
    /// not 0. Mixtures of experts have none behind.
    pub(super) fn ffn(
        &mut self,
        w: &FeedForwardWeights,
        post_norm: u64,
        arena: &mut BumpAllocator,
    ) {
        match w {
            FeedForwardWeights::Dense(w) => self.dense_ffn(w, post_norm, arena),
            FeedForwardWeights::Experts(w) => self.experts(w, arena),
        }
    }

    /// A mixture of experts with the norm before it.
    pub(super) fn experts(&mut self, w: &ExpertWeights, arena: &mut BumpAllocator) {
        let (context, x) = (self.context, self.context.addresses.residual);
        let shape = w.shape();
        let moe = DecodeMoe {
            shape,
            rows: self.rows,
            source: self.source,
            scratch: arena.take(DecodeMoe::scratch_bytes(shape, self.rows)),
        };
        let (input, f16) = if moe.takes_norm() {
            let normed = ActivationFormats::of([w.gate.kind]).allocate(arena, 1, shape.width);
            let residual = RouteInput::Residual {
                x,
                weight: w.norm,
                eps: self.eps,
                normed: normed.f16,
            };
            (residual, normed.f16)
        } else {
            let y = self.normed(w.norm, &[w.router, w.gate], arena);
            (RouteInput::Normed(y.f32), y.f16)
        };
        let (experts, shared) = (w.matrices(), w.shared.as_ref());
        let shared = shared.map(|w| expert_matrices([w.gate, w.up, w.down], None));
        self.push(moe.route(input, w.router(), context.addresses.moe_counter));
        self.push(moe.gate_up((f16, w.scale), experts, shared));
        let Some(shape) = self.exchange else {
            let to = ExpertSum::AddTo(x);
            return self.push(moe.down(context.gpu, experts, shared, (to, w.scale)));
        };
        let update = arena.take(4 * self.rows * shape.width);
        let to = ExpertSum::Store(update);
        self.push(moe.down(context.gpu, experts, shared, (to, w.scale)));
        self.add_shards(shape, update, 0);
    }
}
