//! Unquantised weights, two registers wide.

use super::Neon;
use super::lanes::F32x8;
use crate::matmul::layout::Packed;
use crate::simd::tiles::TileOut;
use crate::simd::vector::float_tile;

impl Neon {
    /// The bits of [`crate::simd::scalar::float_tile`].
    pub fn float_tile(self, packed: &Packed, tile: usize, x: &[f32], out: &mut TileOut<'_>) {
        // SAFETY: the token proves the instructions.
        unsafe { compiled(packed, tile, x, out) }
    }
}

#[target_feature(enable = "neon")]
fn compiled(packed: &Packed, tile: usize, x: &[f32], out: &mut TileOut<'_>) {
    // SAFETY: this function is compiled for the instruction set of the lanes.
    unsafe { float_tile::float_tile::<F32x8>(packed, tile, x, out) }
}
