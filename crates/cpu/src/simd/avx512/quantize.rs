//! Rounding activations to bytes, 512 bits wide.

use std::arch::x86_64::*;

use super::Avx512;
use crate::matmul::activations::{RowMut, factor};
use crate::matmul::layout::BLOCK;

impl Avx512 {
    /// The bits of [`crate::matmul::activations::quantize`].
    pub fn quantize(self, x: &[f32], row: &mut RowMut<'_>) {
        assert_eq!((x.len() % BLOCK, x.len()), (0, row.values.len()));
        // SAFETY: the token proves the instructions; the lengths were just compared.
        unsafe { quantize(x, row) }
    }
}

/// # Safety
/// AVX-512 F, BW, VL and DQ; `x` and `row.values` have one length, a multiple of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn quantize(x: &[f32], row: &mut RowMut<'_>) {
    for (block, x) in x.chunks_exact(BLOCK).enumerate() {
        // SAFETY: `x` holds 32 values, and so does block `block` of `row.values`.
        let (low, high) = unsafe {
            (
                _mm512_loadu_ps(x.as_ptr()),
                _mm512_loadu_ps(x.as_ptr().add(16)),
            )
        };
        let magnitude = _mm512_set1_epi32(0x7fff_ffff);
        let bits = _mm512_max_epi32(
            _mm512_and_si512(_mm512_castps_si512(low), magnitude),
            _mm512_and_si512(_mm512_castps_si512(high), magnitude),
        );
        let max = f32::from_bits(_mm512_reduce_max_epi32(bits).cast_unsigned());
        if !max.is_finite() {
            row.set_poisoned(block);
            continue;
        }
        row.scales[block] = max / 127.0;
        let factor = _mm512_set1_ps(factor(max));
        let low = _mm512_cvtps_epi32(_mm512_mul_ps(low, factor));
        let high = _mm512_cvtps_epi32(_mm512_mul_ps(high, factor));
        // SAFETY: 32 bytes from the start of the block are the block.
        unsafe {
            let at = row.values.as_mut_ptr().add(block * BLOCK);
            _mm_storeu_si128(at.cast(), _mm512_cvtepi32_epi8(low));
            _mm_storeu_si128(at.add(16).cast(), _mm512_cvtepi32_epi8(high));
        }
        row.set_sums(
            block,
            _mm512_reduce_add_epi32(low),
            _mm512_reduce_add_epi32(high),
        );
    }
}
