//! Vector versions of [`crate::reference::matmul`].

use crate::simd::lanes::{Lanes, put, take};

/// Rows of a block, which share each loaded vector of `b`.
const ROWS: usize = 4;

/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(in crate::simd) unsafe fn accumulate<L: Lanes>(a: &[f32], b: &[f32], n: usize, c: &mut [f32]) {
    let k = b.len() / n;
    let m = c.len() / n;
    assert!(b.len() == k * n && c.len() == m * n && a.len() == m * k);
    let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
    let mut col = 0;
    // SAFETY: the caller's instruction set; `a` `[m, k]`, `b` `[k, n]` and `c` `[m, n]` were just
    // measured, and every block below lies inside them.
    unsafe {
        while col + L::WIDE * L::N <= n {
            let mut row = 0;
            while row + ROWS <= m {
                let (a, c) = (a.add(row * k), c.add(row * n + col));
                match L::WIDE {
                    4 => block::<L, ROWS, 4>(a, b.add(col), c, k, n),
                    _ => block::<L, ROWS, 2>(a, b.add(col), c, k, n),
                }
                row += ROWS;
            }
            while row < m {
                let (a, c) = (a.add(row * k), c.add(row * n + col));
                match L::WIDE {
                    4 => block::<L, 1, 4>(a, b.add(col), c, k, n),
                    _ => block::<L, 1, 2>(a, b.add(col), c, k, n),
                }
                row += 1;
            }
            col += L::WIDE * L::N;
        }
        while col + L::N <= n {
            let mut row = 0;
            while row + 2 * ROWS <= m {
                let (a, c) = (a.add(row * k), c.add(row * n + col));
                block::<L, { 2 * ROWS }, 1>(a, b.add(col), c, k, n);
                row += 2 * ROWS;
            }
            while row < m {
                let (a, c) = (a.add(row * k), c.add(row * n + col));
                block::<L, 1, 1>(a, b.add(col), c, k, n);
                row += 1;
            }
            col += L::N;
        }
        while col < n {
            for row in 0..m {
                let (a, b, c) = (a.add(row * k), b.add(col), c.add(row * n + col));
                let mut sum = take::<L>(c, 0, n - col);
                for i in 0..k {
                    sum = L::splat(*a.add(i)).mul_add(take(b.add(i * n), 0, n - col), sum);
                }
                put(sum, c, 0, n - col);
            }
            col += L::N;
        }
    }
}

/// `R` rows by `W` vectors of `c`, at `c`, with row length `n`.
///
/// # Safety
/// The instruction set of `L`; `a` has `R` rows of `k` values, `b` and `c` have `W * L::N` columns
/// from where they point, with row length `n`.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "the arrays are registers and every index is a number after unrolling; an iterator \
              that owns an array is in memory where the compiler does not inline its calls"
)]
unsafe fn block<L: Lanes, const R: usize, const W: usize>(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    k: usize,
    n: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[L::splat(0.0); W]; R];
        for row in 0..R {
            for w in 0..W {
                sums[row][w] = L::load(c.add(row * n + w * L::N));
            }
        }
        for i in 0..k {
            let mut columns = [L::splat(0.0); W];
            for w in 0..W {
                columns[w] = L::load(b.add(i * n + w * L::N));
            }
            for row in 0..R {
                let factor = L::splat(*a.add(row * k + i));
                for w in 0..W {
                    sums[row][w] = factor.mul_add(columns[w], sums[row][w]);
                }
            }
        }
        for row in 0..R {
            for w in 0..W {
                sums[row][w].store(c.add(row * n + w * L::N));
            }
        }
    }
}
