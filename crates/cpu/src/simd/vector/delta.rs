//! Vector versions of [`crate::reference::delta`].
//!
//! `read_out` reads the state once for both `S^T k` and `S^T q`, and adds the token's own part as
//! `o = e^g (S^T q) + (q . k) u`. `update_columns` and `update_read_out` also apply the pending
//! updates, so that a step reads and writes the state once.

use std::ptr::{null, null_mut};

use crate::reference::delta::{self, Columns, PendingUpdate, Token};
use crate::simd::lanes::{Lanes, put, take};

/// Vectors of columns per group if there are as many; half of them otherwise.
const WIDE: usize = 4;

/// # Safety
/// The instruction set of `L`; so for every function here.
#[inline(always)]
pub(in crate::simd) unsafe fn read_out<L: Lanes>(
    state: &[f32],
    token: Token<'_>,
    u: &mut [f32],
    o: &mut [f32],
) {
    let (k_dim, v_dim) = (token.k.len(), token.v.len());
    assert!(u.len() == v_dim && o.len() == v_dim && state.len() == k_dim * v_dim);
    assert_eq!(token.q.len(), k_dim);
    // SAFETY: the caller's instruction set; the lengths were just compared, and the columns are
    // whole groups.
    unsafe {
        if v_dim.is_multiple_of(WIDE * L::N) {
            look_at::<L, WIDE>(state, token, u, o);
        } else if v_dim.is_multiple_of(WIDE / 2 * L::N) {
            look_at::<L, { WIDE / 2 }>(state, token, u, o);
        } else {
            delta::read_out(state, token, u, o);
        }
    }
}

/// [`read_out`] in groups of `W` vectors of columns. A column's result does not depend on `W`.
///
/// # Safety
/// As [`read_out`], whose assertions hold; `v_dim` is a multiple of `W * L::N`.
#[inline(always)]
unsafe fn look_at<L: Lanes, const W: usize>(
    state: &[f32],
    token: Token<'_>,
    u: &mut [f32],
    o: &mut [f32],
) {
    let columns = ColumnPointers {
        from: (state.as_ptr(), token.v.len()),
        ..ColumnPointers::NULL
    };
    // SAFETY: the caller's; nothing is written but `u` and `o`.
    unsafe { pass::<L, W, 0, false>(columns, &[], token, u, o) }
}

/// # Safety
/// As [`read_out`].
#[inline(always)]
pub(in crate::simd) unsafe fn update_columns<L: Lanes>(
    state: Columns<'_>,
    updates: &[PendingUpdate<'_>],
    copy: &mut [f32],
    token: Token<'_>,
    [u, o]: [&mut [f32]; 2],
) {
    let (k_dim, v_dim) = (token.k.len(), token.v.len());
    let Columns { values, stride } = state;
    check(updates, token, u, o);
    assert!(v_dim <= stride && values.len() >= (k_dim - 1) * stride + v_dim);
    assert!(copy.is_empty() || copy.len() == k_dim * v_dim);
    // SAFETY: the caller's instruction set; the lengths were just compared, and the columns are
    // whole groups.
    unsafe {
        if !v_dim.is_multiple_of(WIDE / 2 * L::N) {
            let mut dense = delta::gather(&Columns { values, stride }, v_dim);
            for update in updates {
                update_state::<L>(&mut dense, update.k, update.u, update.decay);
            }
            let rows = values.chunks_mut(stride).zip(dense.chunks_exact(v_dim));
            rows.for_each(|(row, from)| row[..v_dim].copy_from_slice(from));
            if !copy.is_empty() {
                copy.copy_from_slice(&dense);
            }
            return delta::read_out(&dense, token, u, o);
        }
        let columns = ColumnPointers {
            from: (values.as_ptr(), stride),
            to: match updates {
                [] => (null_mut(), 0),
                _ => (values.as_mut_ptr(), stride),
            },
            copy: match copy {
                [] => (null_mut(), 0),
                copy => (copy.as_mut_ptr(), v_dim),
            },
        };
        let wide = v_dim.is_multiple_of(WIDE * L::N);
        match (updates, wide) {
            ([], true) => pass::<L, WIDE, 0, true>(columns, updates, token, u, o),
            ([], false) => pass::<L, { WIDE / 2 }, 0, true>(columns, updates, token, u, o),
            ([_], true) => pass::<L, WIDE, 1, true>(columns, updates, token, u, o),
            ([_], false) => pass::<L, { WIDE / 2 }, 1, true>(columns, updates, token, u, o),
            (_, true) => pass::<L, WIDE, 2, true>(columns, updates, token, u, o),
            (_, false) => pass::<L, { WIDE / 2 }, 2, true>(columns, updates, token, u, o),
        }
    }
}

/// # Safety
/// As [`read_out`].
#[inline(always)]
pub(in crate::simd) unsafe fn update_read_out<L: Lanes>(
    from: Option<&[f32]>,
    state: &mut [f32],
    update: PendingUpdate<'_>,
    token: Token<'_>,
    [u, o]: [&mut [f32]; 2],
) {
    let (k_dim, v_dim) = (token.k.len(), token.v.len());
    check(&[update], token, u, o);
    assert!(state.len() == k_dim * v_dim && from.is_none_or(|from| from.len() == state.len()));
    // SAFETY: the caller's instruction set; the lengths were just compared, and the columns are
    // whole groups.
    unsafe {
        if !v_dim.is_multiple_of(WIDE / 2 * L::N) {
            if let Some(from) = from {
                state.copy_from_slice(from);
            }
            update_state::<L>(state, update.k, update.u, update.decay);
            return delta::read_out(state, token, u, o);
        }
        let to = state.as_mut_ptr();
        let columns = ColumnPointers {
            from: (from.map_or(to.cast_const(), <[f32]>::as_ptr), v_dim),
            to: (to, v_dim),
            ..ColumnPointers::NULL
        };
        if v_dim.is_multiple_of(WIDE * L::N) {
            pass::<L, WIDE, 1, false>(columns, &[update], token, u, o);
        } else {
            pass::<L, { WIDE / 2 }, 1, false>(columns, &[update], token, u, o);
        }
    }
}

fn check(updates: &[PendingUpdate<'_>], token: Token<'_>, u: &[f32], o: &[f32]) {
    let (k_dim, v_dim) = (token.k.len(), token.v.len());
    assert!(token.q.len() == k_dim && k_dim > 0 && v_dim > 0);
    assert!(u.len() == v_dim && o.len() == v_dim);
    let fits = |w: &PendingUpdate<'_>| w.k.len() == k_dim && w.u.len() == v_dim;
    assert!(updates.iter().all(fits));
}

/// Prefetch distance in vectors, for states outside the L1 cache.
const AHEAD: usize = 32;
/// Floats of a cache line.
const LINE: usize = 16;

/// Source and destinations of a state's columns: a pointer and the row stride each; null if unused.
struct ColumnPointers {
    from: (*const f32, usize),
    to: (*mut f32, usize),
    copy: (*mut f32, usize),
}

impl ColumnPointers {
    const NULL: ColumnPointers = ColumnPointers {
        from: (null(), 0),
        to: (null_mut(), 0),
        copy: (null_mut(), 0),
    };
}

/// Applies the pending updates to columns and reads them out, in groups of `W` vectors of columns.
/// A column's result does not depend on `W`. `MANY` is the number of updates: none, one, or any.
/// With `FAR`, the state is not in the L1 cache: rows are prefetched, at the end of a group the
/// rows of the next group.
///
/// # Safety
/// The instruction set of `L`. `check` holds; the places of `columns` have `token.k.len()` rows of
/// `token.v.len()` values, a multiple of `W * L::N`, and `to` and `copy` may be written. `from` and
/// `to` may be one place, with one distance; else no two of the places, `u` and `o` overlap.
#[inline(always)]
unsafe fn pass<L: Lanes, const W: usize, const MANY: usize, const FAR: bool>(
    columns: ColumnPointers,
    updates: &[PendingUpdate<'_>],
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
            let mut one = [L::splat(0.0); W];
            if MANY == 1 {
                for (w, one) in one.iter_mut().enumerate() {
                    *one = L::load(updates[0].u.as_ptr().add(col + w * L::N));
                }
            }
            for i in 0..k_dim {
                if FAR {
                    let (row, col) = match i + AHEAD / W {
                        row if row < k_dim => (row, col),
                        row => (row - k_dim, col + W * L::N),
                    };
                    let at = columns.from.0.wrapping_add(row * columns.from.1 + col);
                    for line in (0..W * L::N).step_by(LINE) {
                        L::prefetch(at.wrapping_add(line));
                    }
                }
                let mut s = [L::splat(0.0); W];
                for (w, s) in s.iter_mut().enumerate() {
                    *s = L::load(columns.from.0.add(i * columns.from.1 + col + w * L::N));
                }
                if MANY == 1 {
                    let k = L::splat(*updates[0].k.as_ptr().add(i));
                    let decay = L::splat(updates[0].decay);
                    for w in 0..W {
                        s[w] = k.mul_add(one[w], decay.mul(s[w]));
                    }
                } else if MANY > 1 {
                    for update in updates {
                        let k = L::splat(*update.k.as_ptr().add(i));
                        let decay = L::splat(update.decay);
                        for (w, s) in s.iter_mut().enumerate() {
                            let u = L::load(update.u.as_ptr().add(col + w * L::N));
                            *s = k.mul_add(u, decay.mul(*s));
                        }
                    }
                }
                if !columns.to.0.is_null() {
                    for (w, s) in s.iter().enumerate() {
                        s.store(columns.to.0.add(i * columns.to.1 + col + w * L::N));
                    }
                }
                if !columns.copy.0.is_null() {
                    for (w, s) in s.iter().enumerate() {
                        s.store(columns.copy.0.add(i * columns.copy.1 + col + w * L::N));
                    }
                }
                let (k, q) = (L::splat(*k.add(i)), L::splat(*q.add(i)));
                for w in 0..W {
                    seen[w] = k.mul_add(s[w], seen[w]);
                    read[w] = q.mul_add(s[w], read[w]);
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
/// As [`read_out`].
#[inline(always)]
pub(in crate::simd) unsafe fn update_state<L: Lanes>(
    state: &mut [f32],
    k: &[f32],
    u: &[f32],
    decay: f32,
) {
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
