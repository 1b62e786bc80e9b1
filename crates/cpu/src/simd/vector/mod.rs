//! The vector functions of [`crate::kernels`], written once for any width of
//! [`super::lanes::Lanes`].
//!
//! Each twin of a function in [`crate::reference`] has its name and its shapes, checks the same
//! lengths, and is inlined into one function per instruction set. Sums run lane by lane and end in
//! a fixed tree, so a result depends on its own inputs alone.

pub(super) mod activation;
pub(super) mod conv;
pub(super) mod delta;
pub(super) mod float_tile;
pub(super) mod kv;
pub(super) mod matmul;
pub(super) mod norm;
pub(super) mod rows;
