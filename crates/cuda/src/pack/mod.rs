//! Weight packing for the GEMM kernels: the file's values in another order.
//!
//! [`WeightKind::of`] maps a stored format to a kernel kind, [`pack()`] rewrites rows, and
//! [`activations`] builds activation formats on the host. `kernels/gemm/weight_layout.cuh` and
//! `kernels/gemm/a16_layout.cuh` define the layouts.

pub mod activations;
mod codes;
pub mod dequantize;
mod exponent;
mod kind;
mod rows;
mod table;
mod tile;

pub use kind::{A16_TILE, ActivationFormat, BLOCK_ROWS, M16_ROWS, WeightKind};
pub use rows::{pack, pack_halves};
pub use table::{table_rows, table_type};

#[cfg(test)]
mod tests;
