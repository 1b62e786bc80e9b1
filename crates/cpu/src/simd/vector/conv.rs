//! Vector versions of [`crate::reference::conv`].

use crate::simd::lanes::{Lanes, put, silu, take};

/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(in crate::simd) unsafe fn row<L: Lanes>(inputs: &[&[f32]], weights: &[f32], out: &mut [f32]) {
    let n = out.len();
    assert_eq!(weights.len(), inputs.len() * n);
    assert!(inputs.iter().all(|input| input.len() == n));
    for at in (0..n).step_by(L::N) {
        // SAFETY: the caller's instruction set; every input and `out` have `n` values, the weights
        // `n` a tap.
        unsafe {
            let mut sum = L::splat(0.0);
            for (tap, input) in inputs.iter().enumerate() {
                let weight = take::<L>(weights.as_ptr().add(tap * n), at, n);
                sum = weight.mul_add(take(input.as_ptr(), at, n), sum);
            }
            put(silu(sum), out.as_mut_ptr(), at, n);
        }
    }
}
