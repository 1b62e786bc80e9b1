//! Mixtures of experts of a prompt's chunk.

use contract::GateActivation;

use super::PrefillBuilder;
use crate::launch::gemm::small_batch::GemmEpilogue;
use crate::launch::moe::ExpertSum;
use crate::launch::moe::prefill::PrefillMoe;
use crate::memory::BumpAllocator;
use crate::plan::gemm::gemm_matrix;
use crate::weights::{ExpertWeights, FeedForwardWeights};

impl PrefillBuilder<'_> {
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

    fn experts(&mut self, w: &ExpertWeights, arena: &mut BumpAllocator) {
        let (context, chunk, shape) = (self.context, self.chunk(), w.shape());
        let y = self.normed(w.norm, &[w.router, w.gate], arena);
        let logits = self.project(y, &[w.router], arena)[0];
        let shared = w.shared.as_ref().map_or(0, |shared| {
            let matrices = [shared.gate, shared.up];
            let matrices = (matrices, GateActivation::Silu, shared.down);
            let h = self.gated_unit(y, matrices, arena);
            let out = arena.take(4 * self.rows * shape.width);
            let product = gemm_matrix(&shared.down, out, GemmEpilogue::Store);
            self.products(h, shared.down.cols, &[product]);
            out
        });
        let moe = PrefillMoe {
            shape,
            chunk,
            scratch: arena.take(PrefillMoe::scratch_bytes(shape, self.rows)),
        };
        let launches = moe.choose(logits, y.f32, w.router());
        self.plan.launches.extend(launches);
        let launches = moe.experts(context.gpu, y.panels, w.matrices());
        self.plan.launches.extend(launches);
        let Some(exchange) = context.exchange else {
            let to = ExpertSum::AddTo(context.addresses.residual);
            return self.push(moe.combine(shared, to));
        };
        let update = arena.take(4 * self.rows * shape.width);
        self.push(moe.combine(shared, ExpertSum::Store(update)));
        self.add_shards(exchange, update, 0);
    }
}
