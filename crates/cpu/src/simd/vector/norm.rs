//! Vector versions of [`crate::reference::norm`].

use crate::simd::lanes::{Lanes, put, silu, take};

/// # Safety
/// The instruction set of `L`; `x` points at `n` readable values.
#[inline(always)]
unsafe fn square_sum<L: Lanes>(x: *const f32, n: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [L::splat(0.0); 4];
        let mut at = 0;
        while at + 4 * L::N <= n {
            for (i, sum) in sums.iter_mut().enumerate() {
                let lanes = L::load(x.add(at + i * L::N));
                *sum = lanes.mul_add(lanes, *sum);
            }
            at += 4 * L::N;
        }
        while at < n {
            let lanes = take::<L>(x, at, n);
            sums[0] = lanes.mul_add(lanes, sums[0]);
            at += L::N;
        }
        let [a, b, c, d] = sums;
        a.add(b).add(c.add(d)).sum()
    }
}

/// # Safety
/// The instruction set of `L`; so for every function here.
#[inline(always)]
pub(in crate::simd) unsafe fn rms<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = out.len();
    assert_eq!((x.len(), weight.len()), (n, n));
    // SAFETY: the caller's instruction set; three slices of `n` values.
    unsafe { scaled::<L>(x.as_ptr(), weight.as_ptr(), eps, out.as_mut_ptr(), n) }
}

/// # Safety
/// As [`rms`].
#[inline(always)]
pub(in crate::simd) unsafe fn rms_in_place<L: Lanes>(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let (at, n) = (x.as_mut_ptr(), x.len());
    // SAFETY: the caller's instruction set; two slices of `n` values, one written where it was
    // read.
    unsafe { scaled::<L>(at, weight.as_ptr(), eps, at, n) }
}

/// # Safety
/// The instruction set of `L`; `x`, `weight` readable and `out` writable for `n` values; `out` may
/// be `x`.
#[inline(always)]
unsafe fn scaled<L: Lanes>(x: *const f32, weight: *const f32, eps: f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's.
    unsafe {
        let scale = 1.0 / (square_sum::<L>(x, n) / n as f32 + eps).sqrt();
        let scale = L::splat(scale);
        for at in (0..n).step_by(L::N) {
            let lanes = take::<L>(x, at, n).mul(scale);
            put(lanes.mul(take(weight, at, n)), out, at, n);
        }
    }
}

/// # Safety
/// As [`rms`].
#[inline(always)]
pub(in crate::simd) unsafe fn gated_rms<L: Lanes>(
    x: &mut [f32],
    weight: &[f32],
    z: &[f32],
    eps: f32,
) {
    let n = x.len();
    assert_eq!((z.len(), weight.len()), (n, n));
    let out = x.as_mut_ptr();
    // SAFETY: the caller's instruction set; three slices of `n` values, one written where it was
    // read.
    unsafe {
        scaled::<L>(out, weight.as_ptr(), eps, out, n);
        for at in (0..n).step_by(L::N) {
            let gate = silu(take::<L>(z.as_ptr(), at, n));
            put(gate.mul(take(out, at, n)), out, at, n);
        }
    }
}

/// # Safety
/// As [`rms`].
#[inline(always)]
pub(in crate::simd) unsafe fn l2<L: Lanes>(x: &mut [f32], eps: f32, scale: f32) {
    let n = x.len();
    let out = x.as_mut_ptr();
    // SAFETY: the caller's instruction set; one slice, written where it was read.
    unsafe {
        let factor = 1.0 / (square_sum::<L>(out, n) + eps).sqrt() * scale;
        let factor = L::splat(factor);
        for at in (0..n).step_by(L::N) {
            put(take::<L>(out, at, n).mul(factor), out, at, n);
        }
    }
}
