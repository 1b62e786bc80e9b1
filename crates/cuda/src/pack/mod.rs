//! Weights as the matmul kernels read them: the same values as in the file, in another order.
//!
//! [`WeightKind::of`] says which kernel kind serves a stored format, [`pack`] rewrites whole rows, and
//! [`activations`] is the host twin of the activation forms. Every layout is described once, in
//! `kernels/gemm/weight_layout.cuh` and `kernels/gemm/a16_layout.cuh`.

pub mod activations;
mod codes;
pub mod dequantize;
mod exponent;
mod kind;
mod rows;
mod tile;

pub use kind::{A16_TILE, ActivationFormat, BLOCK_ROWS, TILE_ROWS, WeightKind};
pub use rows::pack;

#[cfg(test)]
mod tests;
