//! Eight f32 lanes.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::simd::lanes::Lanes;

/// Two 128-bit registers. As many lanes as a 256-bit register, so that sums over lanes have its
/// order and give its bits.
#[derive(Clone, Copy)]
pub(super) struct F32x8(float32x4_t, float32x4_t);

/// `2^n` for whole `n` in -126 to 127.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn power(n: int32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) }
}

/// `x * 2^n` in two factors, because one power of two does not reach subnormals.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn scaled(x: float32x4_t, n: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let n = vcvtnq_s32_f32(n);
        let half = vshrq_n_s32::<1>(n);
        vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
    }
}

/// `a` where it is greater than `b`, else `b`, also where either is NaN.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// `a` where it is less than `b`, else `b`, also where either is NaN.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

// SAFETY of the blocks below: each method's caller has NEON and vouches for the pointer.
impl Lanes for F32x8 {
    const N: usize = 8;
    const WIDE: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vld1q_f32(at), vld1q_f32(at.add(4))) }
    }
    #[inline(always)]
    unsafe fn load_part(at: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; Self::N];
        // SAFETY: see above; `n` is less than the number of lanes.
        unsafe {
            std::ptr::copy_nonoverlapping(at, lanes.as_mut_ptr(), n);
            Self::load(lanes.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see above.
        unsafe {
            vst1q_f32(at, self.0);
            vst1q_f32(at.add(4), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_part(self, at: *mut f32, n: usize) {
        let mut lanes = [0.0; Self::N];
        // SAFETY: see above; `n` is less than the number of lanes.
        unsafe {
            self.store(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), at, n);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let halves = vreinterpretq_u16_u8(vld1q_u8(at));
            let widen = |half| vcvt_f32_f16(vreinterpret_f16_u16(half));
            F32x8(widen(vget_low_u16(halves)), widen(vget_high_u16(halves)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let halves = vreinterpretq_u16_u8(vld1q_u8(at));
            let widen = |half| vreinterpretq_f32_u32(vshll_n_u16::<16>(half));
            F32x8(widen(vget_low_u16(halves)), widen(vget_high_u16(halves)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let values = vmovl_s8(vld1_s8(at.cast()));
            let widen = |half| vcvtq_f32_s32(vmovl_s16(half));
            F32x8(widen(vget_low_s16(values)), widen(vget_high_s16(values)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        // SAFETY: a prefetch never faults and changes no register.
        unsafe {
            asm!(
                "prfm pldl1keep, [{at}]",
                at = in(reg) at,
                options(nostack, readonly, preserves_flags),
            );
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vaddq_f32(self.0, other.0), vaddq_f32(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vsubq_f32(self.0, other.0), vsubq_f32(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vmulq_f32(self.0, other.0), vmulq_f32(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vdivq_f32(self.0, other.0), vdivq_f32(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            F32x8(
                vfmaq_f32(term.0, self.0, factor.0),
                vfmaq_f32(term.1, self.1, factor.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn max_or(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(larger(self.0, other.0), larger(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn min_or(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(smaller(self.0, other.0), smaller(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(vrndnq_f32(self.0), vrndnq_f32(self.1)) }
    }
    #[inline(always)]
    unsafe fn scale(self, n: Self) -> Self {
        // SAFETY: see above.
        unsafe { F32x8(scaled(self.0, n.0), scaled(self.1, n.1)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = vaddq_f32(self.0, self.1);
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe { vmaxvq_f32(vmaxq_f32(self.0, self.1)) }
    }
}
