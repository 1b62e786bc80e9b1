//! Forward pass of token rows through the layers.

use crate::blocks::{attention, delta, ffn};
use crate::exchange::ExchangeEnd;
use crate::pass::{ExecContext, LayerSegment, PassBuffers, Segment};
use crate::state::LayerState;
use crate::weights::{LayerMixer, ModelWeights};

impl ExecContext<'_> {
    /// Runs rows with embeddings in `buffers.x` through all layers and leaves the residual stream
    /// there. Calls `on_layer` with the residual stream `[n, hidden]` after each layer. Of a shard,
    /// what each block adds is summed over all shards through `exchange`.
    ///
    /// Segments must cover the rows in order. Sequences receive their new rows and states but keep
    /// their position.
    pub(crate) fn forward(
        &self,
        weights: &ModelWeights,
        buffers: &mut PassBuffers,
        segments: &mut [Segment<'_>],
        exchange: Option<&ExchangeEnd>,
        on_layer: &mut dyn FnMut(usize, &[f32]),
    ) {
        let n_rows = segments.iter().map(|s| s.n_rows).sum();
        let hidden = weights.spec.hidden;
        buffers.fill_rope_tables(weights, segments, n_rows);
        // A stage without layers has the rows of the last layer as its input.
        let first = weights.layers.first();
        let norm = first.map_or(&weights.final_norm, |first| &first.mixer_norm);
        let all_reduce = |rows: &mut [f32]| {
            if let Some(exchange) = exchange {
                exchange.all_reduce(rows);
            }
        };
        let PassBuffers { x, y, .. } = &mut *buffers;
        self.norm(&x[..n_rows * hidden], norm, y);
        for (i, layer) in weights.layers.iter().enumerate() {
            match &layer.mixer {
                LayerMixer::Attention(a) => {
                    let mut segments = layer_segments(segments, i, LayerState::attention);
                    attention::mix(*self, a, buffers, &mut segments);
                }
                LayerMixer::Delta(d) => {
                    let mut segments = layer_segments(segments, i, LayerState::delta);
                    delta::mix(*self, d, buffers, &mut segments);
                }
            }
            let all = n_rows * hidden;
            all_reduce(&mut buffers.update[..all]);
            self.post_norm(&mut buffers.update[..all], layer.post_mixer_norm.as_deref());
            self.add_norm_of(buffers, n_rows, &layer.ffn_norm);
            ffn::apply(*self, layer, buffers, n_rows);
            all_reduce(&mut buffers.update[..all]);
            self.post_norm(&mut buffers.update[..all], layer.post_ffn_norm.as_deref());
            let next = weights.layers.get(i + 1);
            let norm = next.map_or(&weights.final_norm, |next| &next.mixer_norm);
            self.add_norm_of(buffers, n_rows, norm);
            on_layer(i, &buffers.x[..n_rows * hidden]);
        }
    }
}

/// The segments of layer `layer`; `pick` selects the state.
fn layer_segments<'s, S>(
    segments: &'s mut [Segment<'_>],
    layer: usize,
    pick: impl Fn(&mut LayerState) -> Option<&mut S>,
) -> Vec<LayerSegment<'s, S>> {
    let segment = |segment: &'s mut Segment<'_>| {
        Some(LayerSegment {
            work: segment.work,
            first_row: segment.first_row,
            n_rows: segment.n_rows,
            position: segment.seq.position,
            state: pick(segment.seq.layers.get_mut(layer)?)?,
        })
    };
    segments.iter_mut().filter_map(segment).collect()
}
