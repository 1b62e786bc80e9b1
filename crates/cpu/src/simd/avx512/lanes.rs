//! Sixteen f32 lanes.

use std::arch::x86_64::*;

use crate::simd::lanes::Lanes;

/// A 512-bit register.
#[derive(Clone, Copy)]
pub(super) struct F32x16(__m512);

#[inline(always)]
fn first(n: usize) -> u16 {
    (1_u16 << n) - 1
}

// SAFETY of the blocks below: each method's caller has AVX-512 F, BW, VL and DQ and vouches for the
// pointer.
impl Lanes for F32x16 {
    const N: usize = 16;
    const WIDE: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_loadu_ps(at) })
    }
    #[inline(always)]
    unsafe fn load_part(at: *const f32, n: usize) -> Self {
        // SAFETY: see above; masked lanes are not read.
        F32x16(unsafe { _mm512_maskz_loadu_ps(first(n), at) })
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(at, self.0) }
    }
    #[inline(always)]
    unsafe fn store_part(self, at: *mut f32, n: usize) {
        // SAFETY: see above; masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(at, first(n), self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: see above.
        F32x16(unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) })
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    unsafe fn max_or(self, other: Self) -> Self {
        // SAFETY: see above; the instruction gives its second operand for NaN.
        F32x16(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn min_or(self, other: Self) -> Self {
        // SAFETY: see above; the instruction gives its second operand for NaN.
        F32x16(unsafe { _mm512_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_roundscale_ps::<0>(self.0) })
    }
    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        // SAFETY: see above.
        F32x16(unsafe { _mm512_scalef_ps(self.0, n.0) })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
}
