//! The dynamic convolutions around a draft layer's sublayers.

use contract::DynamicConv;

use crate::layer_buffers::sized;
use crate::linear::Linear;
use crate::pass::ExecContext;
use crate::reference::draft::convolve_row;

/// Weights of one convolution.
pub(crate) struct ConvWeights {
    pub(crate) spec: DynamicConv,
    /// `[2, taps, hidden]`.
    pub(crate) base: Vec<f32>,
    pub(crate) projection: Linear,
}

/// Buffers of the convolutions of a pass.
#[derive(Default)]
pub(super) struct ConvBuffers {
    /// `[n, 2, taps, groups]`: dynamic weights of the current sublayer.
    dynamic: Vec<f32>,
    /// `[n, hidden]`: the convolved rows.
    pub(super) rows: Vec<f32>,
}

/// The side of a sublayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Input,
    Output,
}

impl ConvWeights {
    /// Computes the dynamic weights of a sublayer from its normalised input `y` `[n, hidden]`.
    pub(super) fn project(&self, compute: ExecContext<'_>, y: &[f32], buffers: &mut ConvBuffers) {
        let n = y.len() / self.projection.cols();
        let dynamic = sized(&mut buffers.dynamic, n * self.projection.rows());
        self.projection.apply(compute.pool, y, n, dynamic);
    }

    /// Convolves rows `[n, hidden]` in blocks of `block` rows into `buffers.rows`.
    pub(super) fn apply(
        &self,
        compute: ExecContext<'_>,
        (input, block): (&[f32], usize),
        side: Side,
        buffers: &mut ConvBuffers,
    ) {
        let (hidden, width) = (self.projection.cols(), self.projection.rows());
        let taps = self.spec.taps;
        let half = width / 2;
        let at = match side {
            Side::Input => 0,
            Side::Output => 1,
        };
        let base = &self.base[at * taps * hidden..][..taps * hidden];
        let ConvBuffers { dynamic, rows } = buffers;
        let dynamic = &dynamic[..];
        let out = sized(rows, input.len());
        let size = compute.light_grain(input.len() / hidden, hidden);
        let items = out.chunks_mut(size * hidden).enumerate();
        compute.pool.for_each_item(items, |(item, out)| {
            for (i, out) in out.chunks_exact_mut(hidden).enumerate() {
                let row = item * size + i;
                let before = (0..taps.min(row % block + 1))
                    .map(|tap| &input[(row - tap) * hidden..][..hidden]);
                let dynamic = &dynamic[row * width + at * half..][..half];
                convolve_row(&before.collect::<Vec<_>>(), base, dynamic, out);
            }
        });
    }
}

/// Floats of the buffers per row.
pub(crate) fn floats_per_row(conv: &DynamicConv) -> usize {
    conv.projection.rows + conv.projection.cols
}
