//! The dispatch table for 512-bit vectors.

use super::Avx512;
use super::lanes::F32x16;
use crate::kernels::Kernels;
use crate::simd::table::table;

table!(F32x16, "avx512f,avx512bw,avx512vl,avx512dq");

impl Avx512 {
    /// The vector functions, 512 bits wide.
    pub fn kernels(self) -> Kernels {
        table()
    }
}
