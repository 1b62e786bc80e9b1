//! The dispatch table for 256-bit vectors.

use super::Avx2;
use super::lanes::F32x8;
use crate::kernels::Kernels;
use crate::simd::table::table;

table!(F32x8, "avx2,fma,f16c");

impl Avx2 {
    /// The vector functions, 256 bits wide.
    pub fn kernels(self) -> Kernels {
        table()
    }
}
