//! Rounding activations to bytes, 256 bits wide.

use std::arch::x86_64::*;

use super::Avx2;
use crate::matmul::activations::{RowMut, factor};
use crate::matmul::layout::BLOCK;

impl Avx2 {
    /// The bits of [`crate::matmul::activations::quantize`].
    pub fn quantize(self, x: &[f32], row: &mut RowMut<'_>) {
        assert_eq!((x.len() % BLOCK, x.len()), (0, row.values.len()));
        // SAFETY: the token proves the instructions; the lengths were just compared.
        unsafe { quantize(x, row) }
    }
}

/// # Safety
/// AVX2; `x` and `row.values` have one length, a multiple of 32.
#[target_feature(enable = "avx2")]
unsafe fn quantize(x: &[f32], row: &mut RowMut<'_>) {
    for (block, x) in x.chunks_exact(BLOCK).enumerate() {
        let mut parts = [_mm256_setzero_ps(); 4];
        let mut bits = _mm256_setzero_si256();
        for (part, x) in parts.iter_mut().zip(x.chunks_exact(8)) {
            // SAFETY: `x` holds eight values.
            *part = unsafe { _mm256_loadu_ps(x.as_ptr()) };
            let magnitude = _mm256_castps_si256(*part);
            let magnitude = _mm256_and_si256(magnitude, _mm256_set1_epi32(0x7fff_ffff));
            bits = _mm256_max_epi32(bits, magnitude);
        }
        let pair = _mm_max_epi32(
            _mm256_castsi256_si128(bits),
            _mm256_extracti128_si256::<1>(bits),
        );
        let pair = _mm_max_epi32(pair, _mm_shuffle_epi32::<0b01_00_11_10>(pair));
        let pair = _mm_max_epi32(pair, _mm_shuffle_epi32::<0b10_11_00_01>(pair));
        let max = f32::from_bits(_mm_cvtsi128_si32(pair).cast_unsigned());
        if !max.is_finite() {
            row.set_poisoned(block);
            continue;
        }
        row.scales[block] = max / 127.0;
        let factor = _mm256_set1_ps(factor(max));
        let [a, b, c, d] = parts.map(|part| _mm256_cvtps_epi32(_mm256_mul_ps(part, factor)));
        // Packing works within 128-bit halves; the permutation brings the values back in order.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let packed = _mm256_permutevar8x32_epi32(packed, order);
        let values = &mut row.values[block * BLOCK..][..BLOCK];
        // SAFETY: 32 bytes from the start of the block are the block.
        unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), packed) };
        let half = |values: &[i8]| values.iter().map(|&q| i32::from(q)).sum();
        let (low, high) = (half(&values[..BLOCK / 2]), half(&values[BLOCK / 2..]));
        row.set_sums(block, low, high);
    }
}
