//! Twins of [`crate::reference::delta`].
//!
//! `look` reads the state once, for `S^T k` and `S^T q` together, and adds the token's own part as
//! `o = e^g (S^T q) + (q . k) u`.

use crate::reference::delta::{self, Token};
use crate::simd::lanes::{Lanes, put, take};

/// Vectors of columns handled together, where there are as many; half of them else.
const WIDE: usize = 4;

/// # Safety
/// The instruction set of `L`; so for every function here.
#[inline(always)]
pub(in crate::simd) unsafe fn look<L: Lanes>(
    state: &[f32],
    token: Token<'_>,
    u: &mut [f32],
    o: &mut [f32],
) {
    let (k_dim, v_dim) = (token.k.len(), token.v.len());
    assert!(u.len() == v_dim && o.len() == v_dim && state.len() == k_dim * v_dim);
    assert_eq!(token.q.len(), k_dim);
    // SAFETY: the caller's instruction set; the lengths were just compared, and the columns are whole groups.
    unsafe {
        if v_dim.is_multiple_of(WIDE * L::N) {
            look_at::<L, WIDE>(state, token, u, o);
        } else if v_dim.is_multiple_of(WIDE / 2 * L::N) {
            look_at::<L, { WIDE / 2 }>(state, token, u, o);
        } else {
            delta::look(state, token, u, o);
        }
    }
}

/// [`look`] by groups of `W` vectors of columns; what a column gives does not depend on `W`.
///
/// # Safety
/// As [`look`], whose assertions hold; `v_dim` is a multiple of `W * L::N`.
#[inline(always)]
unsafe fn look_at<L: Lanes, const W: usize>(
    state: &[f32],
    token: Token<'_>,
    u: &mut [f32],
    o: &mut [f32],
) {
    let (k_dim, v_dim) = (token.k.len(), token.v.len());
    // SAFETY: the caller's.
    unsafe {
        let (k, q, v) = (token.k.as_ptr(), token.q.as_ptr(), token.v.as_ptr());
        let own = L::splat(dot::<L>(q, k, k_dim));
        let (decay, beta) = (L::splat(token.decay), L::splat(token.beta));
        for col in (0..v_dim).step_by(W * L::N) {
            let mut seen = [L::splat(0.0); W];
            let mut read = [L::splat(0.0); W];
            for i in 0..k_dim {
                let (k, q) = (L::splat(*k.add(i)), L::splat(*q.add(i)));
                for w in 0..W {
                    let s = L::load(state.as_ptr().add(i * v_dim + col + w * L::N));
                    seen[w] = k.mul_add(s, seen[w]);
                    read[w] = q.mul_add(s, read[w]);
                }
            }
            for w in 0..W {
                let at = col + w * L::N;
                let change = beta.mul(L::load(v.add(at)).sub(decay.mul(seen[w])));
                change.store(u.as_mut_ptr().add(at));
                let out = own.mul_add(change, decay.mul(read[w]));
                out.store(o.as_mut_ptr().add(at));
            }
        }
    }
}

/// # Safety
/// The instruction set of `L`; `a` and `b` point at `n` readable values.
#[inline(always)]
unsafe fn dot<L: Lanes>(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let mut sum = L::splat(0.0);
        for at in (0..n).step_by(L::N) {
            sum = take::<L>(a, at, n).mul_add(take(b, at, n), sum);
        }
        sum.sum()
    }
}

/// # Safety
/// As [`look`].
#[inline(always)]
pub(in crate::simd) unsafe fn fold<L: Lanes>(state: &mut [f32], k: &[f32], u: &[f32], decay: f32) {
    let v_dim = u.len();
    assert_eq!(state.len(), k.len() * v_dim);
    // SAFETY: the caller's instruction set; rows of `v_dim` values, as many as `k` has.
    unsafe {
        let decay = L::splat(decay);
        for (i, &k) in k.iter().enumerate() {
            let (k, row) = (L::splat(k), state.as_mut_ptr().add(i * v_dim));
            for at in (0..v_dim).step_by(L::N) {
                let kept = decay.mul(take(row, at, v_dim));
                put(k.mul_add(take(u.as_ptr(), at, v_dim), kept), row, at, v_dim);
            }
        }
    }
}
