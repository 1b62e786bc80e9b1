//! The dispatch table for 128-bit vectors.

use super::Neon;
use super::lanes::F32x8;
use crate::kernels::Kernels;
use crate::simd::table::table;

table!(F32x8, "neon");

impl Neon {
    /// The vector functions, two registers wide.
    pub fn kernels(self) -> Kernels {
        table()
    }
}
