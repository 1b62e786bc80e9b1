//! The vector functions of [`crate::kernels`], written once for any [`super::lanes::Lanes`].
//!
//! Each function has the name, shapes and length checks of its version in [`crate::reference`], and
//! is inlined into one function per instruction set. Sums run per lane and end in a fixed tree, so
//! a result depends only on its own inputs.

pub(super) mod activation;
pub(super) mod conv;
pub(super) mod delta;
pub(super) mod float_tile;
pub(super) mod kv;
pub(super) mod matmul;
pub(super) mod norm;
pub(super) mod rows;
