//! Layers of a draft whose sublayers are convolved, or normed before the residual.
//!
//! The norm before a sublayer is a part of the launch that ends the sublayer below. A convolution
//! needs the whole normed row and two GEMMs in sequence, so these layers are not fused.

use super::super::activations::ActivationFormats;
use super::super::decode_builder::DecodeBuilder;
use crate::launch::draft::{BlockConv, FinishBuffers, convolve_input, finish};
use crate::launch::norm::{self, ActivationBuffers, Residual, RmsShape};
use crate::memory::BumpAllocator;
use crate::weights::{ConvWeights, DraftLayerWeights, WeightMatrix};

/// One sublayer: attention or the feed-forward of a layer.
struct Sublayer<'a> {
    norm: u64,
    conv: Option<&'a ConvWeights>,
    /// The matrices that read its input.
    inputs: Vec<WeightMatrix>,
    /// The matrix that gives its output.
    out: WeightMatrix,
    post_norm: u64,
}

/// The sublayers of a layer, bottom to top.
fn sublayers(layer: &DraftLayerWeights) -> [Sublayer<'_>; 2] {
    let (attention, ffn) = (&layer.attention, &layer.ffn);
    [
        Sublayer {
            norm: layer.attention_norm,
            conv: layer.attention_conv.as_ref(),
            inputs: attention.input_projections().to_vec(),
            out: attention.o,
            post_norm: layer.post_attention_norm,
        },
        Sublayer {
            norm: ffn.norm,
            conv: layer.ffn_conv.as_ref(),
            inputs: vec![ffn.gate, ffn.up],
            out: ffn.down,
            post_norm: layer.post_ffn_norm,
        },
    ]
}

/// Whether a sublayer of the layer is more than its norm, its matrices and the residual.
pub(super) fn has_ends(layer: &DraftLayerWeights) -> bool {
    let ends = |sublayer: &Sublayer<'_>| sublayer.conv.is_some() || sublayer.post_norm != 0;
    sublayers(layer).iter().any(ends)
}

impl Sublayer<'_> {
    /// The formats that its normed input is read in.
    fn formats(&self) -> ActivationFormats {
        match self.conv {
            Some(conv) => ActivationFormats::of([conv.projection.kind]).with_f32(),
            None => self.input_formats(),
        }
    }

    /// The formats that its matrices read.
    fn input_formats(&self) -> ActivationFormats {
        ActivationFormats::of(self.inputs.iter().map(|matrix| matrix.kind))
    }
}

/// Every layer. `mixer` makes the launches between the projections of a layer's attention and its
/// output projection.
pub(super) fn push(
    b: &mut DecodeBuilder<'_>,
    layers: &[DraftLayerWeights],
    mixer: impl Fn(&mut DecodeBuilder<'_>, usize, &[u64], &mut BumpAllocator) -> ActivationBuffers,
) {
    let (rows, hidden, eps) = (b.rows, b.context.spec.hidden, b.eps);
    let (x, step) = (b.context.addresses.residual, b.step);
    let all: Vec<Sublayer<'_>> = layers.iter().flat_map(sublayers).collect();
    let Some(first) = all.first() else { return };
    b.note_gemm(None);
    // One place for the normed input of every sublayer: the end of a sublayer writes it when the
    // sublayer's own input has been read.
    let mut arena = b.arena;
    let place = ActivationFormats::ALL.allocate(&mut arena, rows, hidden);
    b.arena = arena;
    let mut y = first.formats().of_buffers(place);
    let rms = RmsShape { width: hidden, eps };
    let residual = Residual::of(x);
    b.push(norm::rms_norm(rms, rows, b.source, residual, first.norm, y));
    for (at, sublayer) in all.iter().enumerate() {
        let next = all.get(at + 1);
        let normed = next.map_or(ActivationBuffers::default(), |next| {
            next.formats().of_buffers(place)
        });
        b.block(|b, arena| {
            let (input, conv) = match sublayer.conv {
                None => (y, None),
                Some(weights) => {
                    let dynamic = b.project(&y, &[weights.projection], arena)[0];
                    let conv = BlockConv {
                        base: weights.base,
                        dynamic,
                        taps: weights.taps,
                        group: weights.group,
                    };
                    let input = sublayer.input_formats().allocate(arena, rows, hidden);
                    b.push(convolve_input((hidden, rows), step, y.f32, conv, input));
                    (input, Some(conv))
                }
            };
            let projected = b.project(&input, &sublayer.inputs, arena);
            let layer = at / 2;
            let inner = if at.is_multiple_of(2) {
                mixer(b, layer, &projected, arena)
            } else {
                b.gated_unit(&layers[layer].ffn, &projected, arena)
            };
            let update = b.project(&inner, &[sublayer.out], arena)[0];
            let buffers = FinishBuffers {
                x,
                update,
                conv,
                post_norm: sublayer.post_norm,
                next_norm: next.map_or(0, |next| next.norm),
                out: normed,
            };
            b.push(finish((hidden, rows), step, eps, buffers));
        });
        y = normed;
    }
}
