//! Products of signed bytes: sixteen columns of four rows.
//!
//! Byte `4 * row + t` of line `i` is column `4 * i + t`, as [`crate::matmul::layout`] has it. All
//! kinds give the exact sums. `std::arch` has no stable form of `sdot` and `smmla`.

use std::arch::aarch64::*;
use std::arch::asm;

/// A kind of products.
pub(super) trait Dots {
    /// The sums of four rows with the sixteen activations of one row.
    ///
    /// # Safety
    /// Inlined into a function that has the kind's instructions.
    unsafe fn one(lines: [int8x16_t; 4], acts: int8x16_t) -> int32x4_t;

    /// [`Dots::one`] for two rows of activations.
    ///
    /// # Safety
    /// As [`Dots::one`].
    #[inline(always)]
    unsafe fn two(lines: [int8x16_t; 4], acts: [int8x16_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's.
        unsafe { [Self::one(lines, acts[0]), Self::one(lines, acts[1])] }
    }
}

/// `smull`, `addp` and `sadalp`.
pub(super) struct Widening;

impl Dots for Widening {
    #[inline(always)]
    unsafe fn one(lines: [int8x16_t; 4], acts: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's. Two products of at most 128 * 127 fit 16 bits.
        unsafe {
            let quads = vreinterpretq_s32_s8(acts);
            let quads = [
                vdup_laneq_s32::<0>(quads),
                vdup_laneq_s32::<1>(quads),
                vdup_laneq_s32::<2>(quads),
                vdup_laneq_s32::<3>(quads),
            ];
            let mut sum = vdupq_n_s32(0);
            for (line, quad) in lines.into_iter().zip(quads) {
                let quad = vreinterpret_s8_s32(quad);
                let low = vmull_s8(vget_low_s8(line), quad);
                let high = vmull_s8(vget_high_s8(line), quad);
                sum = vpadalq_s16(sum, vpaddq_s16(low, high));
            }
            sum
        }
    }
}

/// `sdot`.
pub(super) struct Dot;

/// Adds the products of a line with activations `4 * LANE..`.
///
/// # Safety
/// Inlined into a function that has dot products.
#[inline(always)]
unsafe fn sdot<const LANE: i32>(sum: int32x4_t, line: int8x16_t, acts: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the caller's; the instruction changes `sum` only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {line:v}.16b, {acts:v}.4b[{lane}]",
            sum = inout(vreg) sum,
            line = in(vreg) line,
            acts = in(vreg) acts,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl Dots for Dot {
    #[inline(always)]
    unsafe fn one([a, b, c, d]: [int8x16_t; 4], acts: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe {
            let sum = sdot::<0>(vdupq_n_s32(0), a, acts);
            let sum = sdot::<1>(sum, b, acts);
            let sum = sdot::<2>(sum, c, acts);
            sdot::<3>(sum, d, acts)
        }
    }
}

/// `smmla`, for two rows of activations at once.
pub(super) struct Matrix;

/// Adds the products of two rows of eight weights with two rows of eight activations: lanes 0 and 1
/// are those of the first row of weights, lanes 0 and 2 those of the first row of activations.
///
/// # Safety
/// Inlined into a function that has matrix products of bytes.
#[inline(always)]
unsafe fn smmla(sum: int32x4_t, weights: int8x16_t, acts: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the caller's; the instruction changes `sum` only.
    unsafe {
        asm!(
            "smmla {sum:v}.4s, {weights:v}.16b, {acts:v}.16b",
            sum = inout(vreg) sum,
            weights = in(vreg) weights,
            acts = in(vreg) acts,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl Dots for Matrix {
    #[inline(always)]
    unsafe fn one(lines: [int8x16_t; 4], acts: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's; processors with matrix products have dot products.
        unsafe { Dot::one(lines, acts) }
    }

    #[inline(always)]
    unsafe fn two(lines: [int8x16_t; 4], acts: [int8x16_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's.
        unsafe {
            let [first, second] = acts.map(|acts| vreinterpretq_s64_s8(acts));
            // Eight columns of both rows of activations.
            let acts = [
                vreinterpretq_s8_s64(vzip1q_s64(first, second)),
                vreinterpretq_s8_s64(vzip2q_s64(first, second)),
            ];
            let lines = lines.map(|line| vreinterpretq_s32_s8(line));
            let mut sums = [vdupq_n_s32(0); 2];
            for (columns, acts) in acts.into_iter().enumerate() {
                let (a, b) = (lines[2 * columns], lines[2 * columns + 1]);
                // Eight columns of rows 0 and 1, and of rows 2 and 3.
                let rows = [vzip1q_s32(a, b), vzip2q_s32(a, b)];
                for (sum, rows) in sums.iter_mut().zip(rows) {
                    *sum = smmla(*sum, vreinterpretq_s8_s32(rows), acts);
                }
            }
            [vuzp1q_s32(sums[0], sums[1]), vuzp2q_s32(sums[0], sums[1])]
        }
    }
}
