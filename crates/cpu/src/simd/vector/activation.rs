//! Vector versions of [`crate::reference::activation`].

use crate::simd::lanes::{Lanes, exp, gelu, put, sigmoid, silu, take};

/// # Safety
/// The instruction set of `L`; so for every function here.
#[inline(always)]
pub(in crate::simd) unsafe fn swiglu<L: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let n = out.len();
    assert_eq!((gate.len(), up.len()), (n, n));
    for at in (0..n).step_by(L::N) {
        // SAFETY: the caller's instruction set; three slices of `n` values.
        unsafe {
            let gated = silu(take::<L>(gate.as_ptr(), at, n));
            put(gated.mul(take(up.as_ptr(), at, n)), out.as_mut_ptr(), at, n);
        }
    }
}

/// # Safety
/// As [`swiglu`].
#[inline(always)]
pub(in crate::simd) unsafe fn geglu<L: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let n = out.len();
    assert_eq!((gate.len(), up.len()), (n, n));
    for at in (0..n).step_by(L::N) {
        // SAFETY: the caller's instruction set; three slices of `n` values.
        unsafe {
            let gated = gelu(take::<L>(gate.as_ptr(), at, n));
            put(gated.mul(take(up.as_ptr(), at, n)), out.as_mut_ptr(), at, n);
        }
    }
}

/// # Safety
/// As [`swiglu`].
#[inline(always)]
pub(in crate::simd) unsafe fn sigmoid_gate<L: Lanes>(x: &mut [f32], gate: &[f32]) {
    let n = x.len();
    assert_eq!(gate.len(), n);
    for at in (0..n).step_by(L::N) {
        // SAFETY: the caller's instruction set; two slices of `n` values.
        unsafe {
            let open = sigmoid(take::<L>(gate.as_ptr(), at, n));
            put(open.mul(take(x.as_ptr(), at, n)), x.as_mut_ptr(), at, n);
        }
    }
}

/// # Safety
/// As [`swiglu`].
#[inline(always)]
pub(in crate::simd) unsafe fn add<L: Lanes>(x: &mut [f32], y: &[f32]) {
    let n = x.len();
    assert_eq!(y.len(), n);
    for at in (0..n).step_by(L::N) {
        // SAFETY: the caller's instruction set; two slices of `n` values.
        unsafe {
            let sum = take::<L>(x.as_ptr(), at, n).add(take(y.as_ptr(), at, n));
            put(sum, x.as_mut_ptr(), at, n);
        }
    }
}

/// # Safety
/// As [`swiglu`].
#[inline(always)]
pub(in crate::simd) unsafe fn exp_sum<L: Lanes>(x: &mut [f32], shift: f32) -> f32 {
    let n = x.len();
    // SAFETY: the caller's instruction set; a slice of `n` values, written where it was read.
    unsafe {
        let shift = L::splat(shift);
        let mut sum = L::splat(0.0);
        let whole = n / L::N * L::N;
        for at in (0..whole).step_by(L::N) {
            let weight = exp(L::load(x.as_ptr().add(at)).sub(shift));
            weight.store(x.as_mut_ptr().add(at));
            sum = sum.add(weight);
        }
        if whole < n {
            let weight = exp(L::load_part(x.as_ptr().add(whole), n - whole).sub(shift));
            let tail = x.as_mut_ptr().add(whole);
            weight.store_part(tail, n - whole);
            // Read back, so that lanes beyond the end count as zero.
            sum = sum.add(L::load_part(tail, n - whole));
        }
        sum.sum()
    }
}
