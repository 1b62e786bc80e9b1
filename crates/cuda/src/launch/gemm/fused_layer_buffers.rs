//! The matrices and the device memory of a fused layer.

use super::small_batch::GemmScratch;
use crate::launch::norm::ActivationBuffers;
use crate::pack::{ActivationFormat, WeightKind};

/// Maximum rows of a fused layer.
pub const MAX_ROWS: usize = 64;
/// Bytes of the grid barrier and of the row scales that blocks publish behind it.
const BARRIER_BYTES: usize = 256 + 512;

/// One matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedMatrix {
    /// Its layout on the GPU.
    pub kind: WeightKind,
    /// Values of a row of the output.
    pub rows: usize,
    /// Values of a row of the input.
    pub cols: usize,
    /// Weights, 256-byte aligned.
    pub weight: u64,
}

impl FusedMatrix {
    /// Units along K (`kernels/gemm/weight_layout.cuh`).
    pub(super) fn units(&self) -> usize {
        self.kind.units(self.cols)
    }
}

/// The matrices of a fused layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedLayerMatrices<'a> {
    /// The mixer's output projection, `[hidden][..]`.
    pub out: FusedMatrix,
    /// `[ffn][hidden]`.
    pub gate: FusedMatrix,
    /// As `gate`, of the same kind.
    pub up: FusedMatrix,
    /// `[hidden][ffn]`.
    pub down: FusedMatrix,
    /// The projections of the next layer's mixer, each with its output, f32
    /// `[bucket][matrix.rows]`; none behind the last layer.
    pub next: &'a [(FusedMatrix, u64)],
}

/// The norms of a fused layer: addresses of f32 `[hidden]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedLayerNorms {
    /// Before gate and up.
    pub ffn: u64,
    /// Before the next layer's projections; 0 without.
    pub next: u64,
    /// Added to mean squares.
    pub eps: f32,
}

/// Device memory of a fused layer. All fused layers of a step may share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedLayerBuffers {
    /// f32 `[bucket][hidden]`.
    pub residual: u64,
    /// The grid barrier and the activations of two phases.
    pub workspace: FusedLayerWorkspace,
    /// Input of the next layer's projections, in the formats they read.
    pub next: ActivationBuffers,
    /// Two of [`square_sum_bytes`].
    pub squares: [u64; 2],
    /// f32 `[bucket]`: the scales of the last norm
    /// ([`crate::launch::norm::rms_norm_and_scales`]); kept.
    pub scales: u64,
    /// As separate GEMMs have it, for twice as many rows.
    pub scratch: GemmScratch,
    /// Where the two sums of a layer are exchanged with the other shard of a tensor split
    /// ([`crate::launch::all_reduce::ExchangeShape::fragments`]); zeros without one.
    pub exchange: [u64; 2],
}

/// One fused layer of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedLayer<'a> {
    /// Rows, padding included.
    pub bucket: usize,
    /// Its matrices and those of the next projections.
    pub matrices: &'a FusedLayerMatrices<'a>,
    /// Its norms.
    pub norms: FusedLayerNorms,
    /// Device memory.
    pub buffers: &'a FusedLayerBuffers,
    /// The mixer's output, f16 `[bucket][out.cols]`.
    pub mixed: u64,
}

/// Memory of fused layers alone, whatever their rows: [`FusedLayerWorkspace::bytes`] bytes, zero
/// before and after each launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedLayerWorkspace {
    pub(super) barrier: u64,
    /// Input of gate and up, f16.
    pub(super) normed: u64,
    /// Input of down, f16.
    pub(super) gated: u64,
}

impl FusedLayerWorkspace {
    /// For layers of `hidden` values, at 256-byte aligned memory.
    pub fn at(address: u64, hidden: usize) -> FusedLayerWorkspace {
        let normed = address + BARRIER_BYTES as u64;
        FusedLayerWorkspace {
            barrier: address,
            normed,
            gated: normed + ActivationFormat::F16.bytes(MAX_ROWS, hidden) as u64,
        }
    }

    /// Bytes for layers of `hidden` values and feed-forwards of at most `ffn`.
    pub fn bytes(hidden: usize, ffn: usize) -> usize {
        let halves = [hidden, ffn].map(|width| ActivationFormat::F16.bytes(MAX_ROWS, width));
        BARRIER_BYTES + halves.iter().sum::<usize>()
    }
}

/// Bytes of sums of squares for rows of `hidden` values.
pub fn square_sum_bytes(bucket: usize, hidden: usize) -> usize {
    4 * bucket * square_parts(hidden)
}

/// Parts that the squares of a row are summed in: 16 columns each, whole groups of 256.
fn square_parts(hidden: usize) -> usize {
    hidden.div_ceil(256) * 16
}
