//! Products of stored weights with rows of activations, in integers inside a block and in f32
//! across blocks.
//!
//! # Arithmetic
//!
//! Activations are rounded to signed bytes once per row, in blocks of 32 with one f32 scale each
//! ([`activations`]). Weights are repacked at load to tiles of 16 rows ([`layout`], [`pack`]), so
//! that one vector load serves 16 rows. Each output adds its blocks in ascending order, in f32 with
//! one rounding per fused step:
//!
//! ```text
//! one scale per block       m = f32(dot) * w
//! a scale and a minimum     m = f32(dot) * w;  m = m - min * sum
//! two scales per block      m = f32(dot_lo) * w_lo;  m = f32(dot_hi) * w_hi + m
//!                           out = m * a + out
//! ```
//!
//! Here, `dot` is the exact integer product, `w` and `min` belong to the weight's block, `a` is the
//! scale and `sum` the integer sum of the activation's block. Weights kept as f32, f16 or bf16 are
//! multiplied with the f32 activations. Four running sums over columns of equal remainder are added
//! at the end.
//!
//! The steps and their order are the same for every number of activation rows, for every thread
//! count, and for the scalar, 256-bit and 512-bit kernels: all give the same bits.

pub mod activations;
pub mod layout;
pub mod pack;

#[cfg(test)]
mod tests;
