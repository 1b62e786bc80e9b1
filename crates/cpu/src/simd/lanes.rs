//! A vector of f32 lanes with the operations that [`super::vector`] needs.

/// One vector register of an instruction set.
///
/// Every method is inlined into a function compiled for that instruction set; the only other
/// obligation is on the pointers.
pub(super) trait Lanes: Copy {
    /// Number of lanes.
    const N: usize;
    /// Vectors per row in a block of a matrix product, so that four rows fit the registers.
    const WIDE: usize;

    /// # Safety
    /// The instruction set; this holds for all methods.
    unsafe fn splat(x: f32) -> Self;
    /// # Safety
    /// `at` points at `N` readable values.
    unsafe fn load(at: *const f32) -> Self;
    /// The first `n < N` lanes; the others are zero.
    ///
    /// # Safety
    /// `at` points at `n` readable values.
    unsafe fn load_part(at: *const f32, n: usize) -> Self;
    /// # Safety
    /// `at` points at `N` writable values.
    unsafe fn store(self, at: *mut f32);
    /// The first `n < N` lanes.
    ///
    /// # Safety
    /// `at` points at `n` writable values.
    unsafe fn store_part(self, at: *mut f32, n: usize);
    /// # Safety
    /// `at` points at `N` readable halves, in any alignment.
    unsafe fn load_f16(at: *const u8) -> Self;
    /// # Safety
    /// `at` points at `N` readable upper halves of f32, in any alignment.
    unsafe fn load_bf16(at: *const u8) -> Self;
    /// # Safety
    /// `at` points at `N` readable signed bytes.
    unsafe fn load_i8(at: *const u8) -> Self;
    /// Prefetches a cache line; the address need not be readable.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn prefetch(at: *const f32);
    /// # Safety
    /// The instruction set.
    unsafe fn add(self, other: Self) -> Self;
    /// # Safety
    /// The instruction set.
    unsafe fn sub(self, other: Self) -> Self;
    /// # Safety
    /// The instruction set.
    unsafe fn mul(self, other: Self) -> Self;
    /// # Safety
    /// The instruction set.
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The larger value; `other` if `self` is NaN.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn max_or(self, other: Self) -> Self;
    /// The smaller value; `other` if `self` is NaN.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn min_or(self, other: Self) -> Self;
    /// Rounded to the nearest whole number.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for whole `n` in -160 to 160, rounded once if the result is subnormal.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn scale(self, n: Self) -> Self;
    /// The sum of all lanes in a fixed tree, halves first.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn sum(self) -> f32;
    /// The largest lane.
    ///
    /// # Safety
    /// The instruction set.
    unsafe fn largest(self) -> f32;
}

/// Below this the exponential is zero in f32, subnormals included.
const LOWEST: f32 = -104.0;

/// Above this it is infinite.
const HIGHEST: f32 = 89.0;

/// `e^x` within two units in the last place; zero for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and a polynomial of degree six in `r` (Cephes, `expf`).
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn exp<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let x = x.max_or(L::splat(LOWEST)).min_or(L::splat(HIGHEST));
        let n = x.mul(L::splat(std::f32::consts::LOG2_E)).round();
        // ln 2 in two parts, the first exact in few bits.
        let r = n.mul_add(L::splat(-0.693_359_4), x);
        let r = n.mul_add(L::splat(2.121_944_4e-4), r);
        let mut p = L::splat(1.987_569_1e-4);
        for c in [
            1.398_2e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            1.666_666_5e-1,
            0.5,
        ] {
            p = p.mul_add(r, L::splat(c));
        }
        p = p.mul_add(r.mul(r), r);
        p.add(L::splat(1.0)).scale(n)
    }
}

/// `x / (1 + e^-x)`, within four units in the last place.
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn silu<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let below = exp(L::splat(0.0).sub(x));
        x.div(below.add(L::splat(1.0)))
    }
}

/// `gelu(x)` by its tanh formula, as `x * sigmoid(2 z)` with the argument `z` of the tanh.
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn gelu<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let cubed = x.mul(x).mul(x);
        let z = cubed.mul_add(L::splat(0.044_715), x);
        let below = exp(z.mul(L::splat(-2.0 * 0.797_884_6)));
        x.div(below.add(L::splat(1.0)))
    }
}

/// `1 / (1 + e^-x)`, within four units in the last place.
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let below = exp(L::splat(0.0).sub(x));
        L::splat(1.0).div(below.add(L::splat(1.0)))
    }
}

/// Lanes `at..` of a slice of `n` values: a whole vector or the rest.
///
/// # Safety
/// The instruction set of `L`; `from` points at `n` readable values and `at < n`.
#[inline(always)]
pub(super) unsafe fn take<L: Lanes>(from: *const f32, at: usize, n: usize) -> L {
    // SAFETY: the caller's.
    unsafe {
        if at + L::N <= n {
            L::load(from.add(at))
        } else {
            L::load_part(from.add(at), n - at)
        }
    }
}

/// Writes lanes `at..` of a slice of `n` values: a whole vector or the rest.
///
/// # Safety
/// The instruction set of `L`; `to` points at `n` writable values and `at < n`.
#[inline(always)]
pub(super) unsafe fn put<L: Lanes>(lanes: L, to: *mut f32, at: usize, n: usize) {
    // SAFETY: the caller's.
    unsafe {
        if at + L::N <= n {
            lanes.store(to.add(at));
        } else {
            lanes.store_part(to.add(at), n - at);
        }
    }
}
