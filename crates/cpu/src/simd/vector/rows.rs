//! Vector versions of [`crate::reference::rows`].

use crate::simd::lanes::{Lanes, exp};

/// # Safety
/// The instruction set of `L`; so for every function here.
#[inline(always)]
pub(in crate::simd) unsafe fn max<L: Lanes>(row: &[f32]) -> f32 {
    let whole = row.len() / L::N * L::N;
    // SAFETY: the caller's instruction set; at least `whole` values.
    let lanes = unsafe {
        let mut largest = L::splat(f32::NEG_INFINITY);
        for at in (0..whole).step_by(L::N) {
            largest = L::load(row.as_ptr().add(at)).max_or(largest);
        }
        largest.largest()
    };
    row[whole..].iter().copied().fold(lanes, f32::max)
}

/// # Safety
/// As [`max`].
#[inline(always)]
pub(in crate::simd) unsafe fn sum_exp<L: Lanes>(row: &[f32], shift: f32) -> f32 {
    let whole = row.len() / L::N * L::N;
    // SAFETY: the caller's instruction set; at least `whole` values.
    unsafe {
        let shift = L::splat(shift);
        let mut sum = L::splat(0.0);
        for at in (0..whole).step_by(L::N) {
            sum = sum.add(exp(L::load(row.as_ptr().add(at)).sub(shift)));
        }
        let mut total = sum.sum();
        for &x in &row[whole..] {
            // One lane of a vector, so that a value's contribution does not depend on its position.
            total += exp(L::splat(x).sub(shift)).largest();
        }
        total
    }
}
