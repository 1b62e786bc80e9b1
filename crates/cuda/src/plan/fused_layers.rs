//! Layers as chains: one launch for all products from a mixer to the next.

use super::Site;
use super::activations::Forms;
use super::decode::Builder;
use super::select::may_use_fused_layer;
use crate::launch::gemm::fused_layer::{self, Form, MOST_ROWS, Memory, Norms, Own, Products};
use crate::launch::gemm::small_batch::Scratch;
use crate::launch::norm::{self, Out, Residual, Rms};
use crate::memory::BumpAllocator;
use crate::pack::WeightKind;
use crate::step::ROWS;
use crate::weights::{FfnWeights, WeightMatrix, Weights};

const _: () = assert!(ROWS <= MOST_ROWS, "a chain takes the rows of any step");

/// Bytes of zeros that all chains share, on layers of `hidden` values.
pub(super) fn own_bytes(weights: &Weights, hidden: usize) -> usize {
    let of_target = weights.layers.iter().map(|layer| &layer.ffn);
    let of_draft = weights.draft.iter().flat_map(|draft| &draft.layers);
    let all = of_target.chain(of_draft.map(|layer| &layer.ffn));
    Own::bytes(hidden, all.map(|ffn| ffn.gate.rows).max().unwrap_or(0))
}

/// The matrices of every layer, bottom to top, where all of them can go in chains.
pub(super) struct Links<'a> {
    layers: Vec<Link<'a>>,
    form: Form,
}

/// What chains know of one layer.
struct Link<'a> {
    norm: u64,
    /// The projections of the mixer's input.
    input_projections: Vec<WeightMatrix>,
    out: WeightMatrix,
    ffn: &'a FfnWeights,
}

fn of_chain(matrix: &WeightMatrix) -> fused_layer::Matrix {
    fused_layer::Matrix {
        kind: matrix.kind,
        rows: matrix.rows,
        cols: matrix.cols,
        weight: matrix.at,
    }
}

impl Link<'_> {
    fn kinds(&self) -> impl Iterator<Item = WeightKind> {
        let own = [self.out, self.ffn.gate, self.ffn.up, self.ffn.down];
        self.input_projections
            .iter()
            .copied()
            .chain(own)
            .map(|m| m.kind)
    }

    /// What its chain multiplies with; `next`: the projections of the layer above and where they
    /// go.
    fn products<'n>(&self, next: &'n [(fused_layer::Matrix, u64)]) -> Products<'n> {
        Products {
            out: of_chain(&self.out),
            gate: of_chain(&self.ffn.gate),
            up: of_chain(&self.ffn.up),
            down: of_chain(&self.ffn.down),
            next,
        }
    }
}

impl<'a> Links<'a> {
    /// The target's layers.
    pub(super) fn of_target(site: &Site<'a>) -> Option<Links<'a>> {
        let layers = site.weights.layers.iter().map(|layer| Link {
            norm: layer.mixer_norm,
            input_projections: layer.mixer.input_projections(),
            out: layer.mixer.out(),
            ffn: &layer.ffn,
        });
        Links::new(site, layers.collect())
    }

    /// The draft's layers.
    pub(super) fn of_draft(site: &Site<'a>) -> Option<Links<'a>> {
        let layers = site.weights.draft.iter().flat_map(|draft| &draft.layers);
        let layers = layers.map(|layer| Link {
            norm: layer.attention_norm,
            input_projections: layer.attention.input_projections().to_vec(),
            out: layer.attention.o,
            ffn: &layer.ffn,
        });
        Links::new(site, layers.collect())
    }

    /// Whether layers of steps go in chains: on the cards they were measured on, where they are
    /// faster at all the numbers of rows that they take (`kernels/gemm/NOTES.md`). A chain and the
    /// launches it stands for differ by rounding, so a model has them at every number of rows of a
    /// step or at none: nothing here looks at the rows, since no step has more than [`MOST_ROWS`].
    fn new(site: &Site<'a>, layers: Vec<Link<'a>>) -> Option<Links<'a>> {
        if !may_use_fused_layer(site.gpu) {
            return None;
        }
        let kinds: Vec<WeightKind> = layers.iter().flat_map(Link::kinds).collect();
        let form = Form::new(site.gpu, MOST_ROWS, &kinds)?;
        let fits = |i: usize, link: &Link<'_>| {
            let next = layers
                .get(i + 1)
                .into_iter()
                .flat_map(|link| &link.input_projections);
            let next: Vec<_> = next.map(|m| (of_chain(m), 0)).collect();
            fused_layer::fits(&link.products(&next))
        };
        let all = layers.iter().enumerate().all(|(i, link)| fits(i, link));
        all.then_some(Links { layers, form })
    }
}

impl Builder<'_> {
    /// Every layer, the first's norm and projections as launches of their own. `mixer` makes the
    /// launches of a layer's mixer from its projections, `end` what follows when its output stands
    /// in the residual stream.
    pub(super) fn chained(
        &mut self,
        links: &Links<'_>,
        mixer: impl Fn(&mut Self, usize, &[u64], &mut BumpAllocator) -> Out,
        end: impl Fn(&mut Self, usize),
    ) {
        let (site, rows) = (self.site, self.rows);
        let (hidden, gpu) = (site.spec.hidden, site.gpu);
        let Some(first) = links.layers.first() else {
            return;
        };
        let mut arena = self.arena;
        let input_projections = links.layers.iter().flat_map(|link| &link.input_projections);
        let memory = Memory {
            residual: site.addresses.residual,
            own: Own::at(site.addresses.chain, hidden),
            next: Forms::of(input_projections.map(|m| m.kind)).carve(&mut arena, rows, hidden),
            squares: [(); 2].map(|()| arena.take(fused_layer::squares_bytes(rows, hidden))),
            scales: arena.take(4 * rows),
            scratch: Scratch(site.addresses.partials),
        };
        // Projections of all layers have one place: those of a layer are written when the mixer
        // below has read its own.
        let (start, mut above) = (arena, arena);
        let outputs = |link: &Link<'_>| {
            let mut arena = start;
            let mut take = |m: &WeightMatrix| arena.take(4 * rows * m.rows);
            let outs: Vec<u64> = link.input_projections.iter().map(&mut take).collect();
            (outs, arena)
        };
        for link in &links.layers {
            let (_, end) = outputs(link);
            if end.used() > above.used() {
                above = end;
            }
        }
        let rms = Rms {
            width: hidden,
            eps: self.eps,
        };
        let x = Residual::of(memory.residual);
        let weight = (first.norm, memory.scales);
        let input = Out {
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
        self.push(norm::rms_and_scales(
            rms,
            rows,
            self.source,
            x,
            weight,
            input,
        ));
        let (mut projected, _) = outputs(first);
        self.project_to(&input, &first.input_projections, &projected);
        for (i, link) in links.layers.iter().enumerate() {
            let mut arena = above;
            let mixed = mixer(self, i, &projected, &mut arena);
            self.reach(arena);
            let next = links.layers.get(i + 1);
            projected = next.map(|next| outputs(next).0).unwrap_or_default();
            let matrices = next.into_iter().flat_map(|next| &next.input_projections);
            let outs: Vec<_> = matrices.map(of_chain).zip(projected.clone()).collect();
            let norms = Norms {
                ffn: link.ffn.norm,
                next: next.map_or(0, |next| next.norm),
                eps: self.eps,
            };
            let products = link.products(&outs);
            let place = (norms, &memory);
            self.push(fused_layer::launch(
                gpu, rows, links.form, &products, mixed.f16, place,
            ));
            end(self, i);
        }
    }
}
