//! Layers of a step of one row in few launches: norms in the products behind them, gated units in
//! those before.

use super::Site;
use super::activations::Forms;
use super::decode::Builder;
use super::gemm::{Product, segment};
use crate::launch::Launch;
use crate::launch::gemm::gemv::{self, Input, Results};
use crate::launch::gemm::small_batch::{Segment, Write};
use crate::launch::norm::Out;
use crate::memory::BumpAllocator;
use crate::weights::{FfnWeights, WeightMatrix};

/// Whether layers of steps of one row go in few launches: where the norms fold into products.
pub(super) fn suits(site: &Site<'_>) -> bool {
    if site.as_large {
        return false;
    }
    let segments = |matrices: &[WeightMatrix]| -> Vec<Segment> {
        let all = matrices.iter().map(|m| segment(m, 0, Write::Store));
        all.collect()
    };
    let fits = |matrices: &[WeightMatrix], results| {
        let input = residual_normed(site, (0, site.spec.norm_eps));
        let segments = segments(matrices);
        launch(site, site.spec.hidden, &segments, input, results).is_some()
    };
    site.weights.layers.iter().all(|layer| {
        let ffn = [layer.ffn.gate, layer.ffn.up];
        fits(&layer.mixer.input_projections(), Results::Each) && fits(&ffn, Results::Gated(0))
    })
}

/// The head of a step of one row, with the final norm before it.
pub(super) fn head(site: &Site<'_>, logits: &Product, norm: (u64, f32)) -> Option<Launch> {
    if !suits(site) {
        return None;
    }
    let segments = [segment(&logits.matrix, logits.out, logits.write)];
    let input = residual_normed(site, norm);
    launch(site, site.spec.hidden, &segments, input, Results::Each)
}

fn launch(
    site: &Site<'_>,
    cols: usize,
    segments: &[Segment],
    input: Input,
    results: Results,
) -> Option<Launch> {
    gemv::launch(site.gpu, cols, segments, input, results)
}

fn residual_normed(site: &Site<'_>, (weight, eps): (u64, f32)) -> Input {
    Input::Normed {
        row: site.addresses.residual,
        weight,
        eps,
    }
}

impl Builder<'_> {
    /// Layer `i` of a step of one row. What cannot be one launch is the launches of any other step.
    pub(super) fn layer_of_one(&mut self, i: usize) {
        let weights = &self.site.weights.layers[i];
        self.block(|b, arena| {
            let input_projections = weights.mixer.input_projections();
            let projected = b.normed_products(weights.mixer_norm, &input_projections, arena);
            let mixed = b.mixer(i, &projected, arena);
            b.add_product(&mixed, weights.mixer.out());
        });
        self.block(|b, arena| b.gated_unit(&weights.ffn, arena));
        self.layer_end(i);
    }

    /// The norm of the residual stream, multiplied by each of `input_projections`.
    fn normed_products(
        &mut self,
        norm: u64,
        input_projections: &[WeightMatrix],
        arena: &mut BumpAllocator,
    ) -> Vec<u64> {
        let mut take = |m: &WeightMatrix| arena.take(4 * m.rows);
        let outs: Vec<u64> = input_projections.iter().map(&mut take).collect();
        let segments = input_projections.iter().zip(&outs);
        let segments: Vec<Segment> = segments
            .map(|(m, out)| segment(m, *out, Write::Store))
            .collect();
        let input = residual_normed(self.site, (norm, self.eps));
        match launch(
            self.site,
            self.site.spec.hidden,
            &segments,
            input,
            Results::Each,
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
    fn add_product(&mut self, input: &Out, matrix: WeightMatrix) {
        let segments = [segment(&matrix, self.site.addresses.residual, Write::Add)];
        let halves = Input::Halves(input.f16);
        match launch(self.site, matrix.cols, &segments, halves, Results::Each) {
            Some(launch) => self.push(launch),
            None => self.add(input, matrix),
        }
    }

    fn gated_unit(&mut self, w: &FfnWeights, arena: &mut BumpAllocator) {
        let out = Forms::of([w.down.kind]).carve(arena, 1, w.gate.rows);
        let segments = [&w.gate, &w.up].map(|m| segment(m, 0, Write::Store));
        let input = residual_normed(self.site, (w.norm, self.eps));
        let gated = Results::Gated(out.f16);
        let launch = match out.f32 {
            0 => launch(self.site, self.site.spec.hidden, &segments, input, gated),
            _ => None,
        };
        match launch {
            Some(launch) => {
                self.push(launch);
                self.add_product(&out, w.down);
            }
            None => self.ffn(w, arena),
        }
    }
}
