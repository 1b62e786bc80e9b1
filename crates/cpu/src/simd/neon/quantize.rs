//! Rounding activations to bytes, 128 bits wide.

use std::arch::aarch64::*;

use super::Neon;
use crate::matmul::activations::{RowMut, factor};
use crate::matmul::layout::BLOCK;

impl Neon {
    /// The bits of [`crate::matmul::activations::quantize`].
    pub fn quantize(self, x: &[f32], row: &mut RowMut<'_>) {
        assert_eq!((x.len() % BLOCK, x.len()), (0, row.values.len()));
        // SAFETY: the token proves the instructions; the lengths were just compared.
        unsafe { quantize(x, row) }
    }
}

/// # Safety
/// NEON; `x` and `row.values` have one length, a multiple of 32.
#[target_feature(enable = "neon")]
unsafe fn quantize(x: &[f32], row: &mut RowMut<'_>) {
    for (block, x) in x.chunks_exact(BLOCK).enumerate() {
        let mut parts = [vdupq_n_f32(0.0); 8];
        let mut bits = vdupq_n_u32(0);
        for (part, x) in parts.iter_mut().zip(x.chunks_exact(4)) {
            // SAFETY: `x` holds four values.
            *part = unsafe { vld1q_f32(x.as_ptr()) };
            // Magnitudes have the order of their bits.
            bits = vmaxq_u32(bits, vreinterpretq_u32_f32(vabsq_f32(*part)));
        }
        let max = f32::from_bits(vmaxvq_u32(bits));
        if !max.is_finite() {
            row.set_poisoned(block);
            continue;
        }
        row.scales[block] = max / 127.0;
        let factor = factor(max);
        let rounded = parts.map(|part| vcvtnq_s32_f32(vmulq_n_f32(part, factor)));
        let values = &mut row.values[block * BLOCK..][..BLOCK];
        let mut sums = [0; 2];
        for (half, sum) in sums.iter_mut().enumerate() {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| vqmovn_s32(rounded[4 * half + i]));
            let low = vqmovn_s16(vcombine_s16(a, b));
            let high = vqmovn_s16(vcombine_s16(c, d));
            let bytes = vcombine_s8(low, high);
            *sum = i32::from(vaddlvq_s8(bytes));
            let to = &mut values[half * BLOCK / 2..][..BLOCK / 2];
            // SAFETY: 16 bytes from the start of the half block are the half block.
            unsafe { vst1q_s8(to.as_mut_ptr(), bytes) };
        }
        row.set_sums(block, sums[0], sums[1]);
    }
}
