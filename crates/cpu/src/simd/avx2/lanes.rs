//! Eight f32 lanes.

use std::arch::x86_64::*;

use crate::simd::lanes::Lanes;

/// A 256-bit register.
#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

/// All ones in the first `n` lanes.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn first(n: usize) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane)
    }
}

/// `2^n` for whole `n` in -126 to 127.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn power(n: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let biased = _mm256_add_epi32(n, _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
}

// SAFETY of the blocks below: each method's caller has AVX2, FMA and F16C and vouches for the
// pointer.
impl Lanes for F32x8 {
    const N: usize = 8;
    const WIDE: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_loadu_ps(at) })
    }
    #[inline(always)]
    unsafe fn load_part(at: *const f32, n: usize) -> Self {
        // SAFETY: see above; masked lanes are not read.
        F32x8(unsafe { _mm256_maskload_ps(at, first(n)) })
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(at, self.0) }
    }
    #[inline(always)]
    unsafe fn store_part(self, at: *mut f32, n: usize) {
        // SAFETY: see above; masked lanes are not written.
        unsafe { _mm256_maskstore_ps(at, first(n), self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: see above.
        F32x8(unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()))) })
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: see above.
        F32x8(unsafe { _mm256_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    unsafe fn max_or(self, other: Self) -> Self {
        // SAFETY: see above; the instruction gives its second operand for NaN.
        F32x8(unsafe { _mm256_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn min_or(self, other: Self) -> Self {
        // SAFETY: see above; the instruction gives its second operand for NaN.
        F32x8(unsafe { _mm256_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        F32x8(unsafe {
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)
        })
    }
    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        // SAFETY: see above. Two factors, because one power of two does not reach subnormals.
        unsafe {
            let n = _mm256_cvtps_epi32(n.0);
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            F32x8(_mm256_mul_ps(
                _mm256_mul_ps(self.0, power(half)),
                power(rest),
            ))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let pair = _mm_add_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let pair = _mm_add_ps(pair, _mm_movehl_ps(pair, pair));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let pair = _mm_max_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let pair = _mm_max_ps(pair, _mm_movehl_ps(pair, pair));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
}
