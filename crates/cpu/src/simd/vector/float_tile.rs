//! Tiles of unquantised weights times f32 activations: a lane is a row of the weight.

use crate::matmul::layout::{Format, Packed, TILE_ROWS};
use crate::simd::lanes::Lanes;
use crate::simd::tiles::TileOut;

/// Activation rows that share one read of the weights.
const ROWS: usize = 4;

/// The bits of [`crate::simd::scalar::float_tile`].
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(in crate::simd) unsafe fn float_tile<L: Lanes>(
    packed: &Packed,
    tile: usize,
    x: &[f32],
    out: &mut TileOut<'_>,
) {
    let cols = x.len() / out.rows();
    assert!(cols.is_multiple_of(4) && x.len() == cols * out.rows());
    let bytes = packed.tile(tile);
    assert_eq!(bytes.len(), packed.format.tile_bytes(cols));
    for first in (0..out.rows()).step_by(ROWS) {
        let n = ROWS.min(out.rows() - first);
        let mut sums = [[0.0; TILE_ROWS]; ROWS];
        let x = &x[first * cols..];
        for lane in (0..TILE_ROWS).step_by(L::N) {
            // SAFETY: the caller's instruction set; the tile has `cols` columns of the named
            // format, and `x` has at least `n` rows.
            unsafe {
                match (packed.format, n) {
                    (Format::F32, ROWS) => strip::<L, F32, ROWS>(bytes, cols, x, lane, &mut sums),
                    (Format::F16, ROWS) => strip::<L, F16, ROWS>(bytes, cols, x, lane, &mut sums),
                    (_, ROWS) => strip::<L, BF16, ROWS>(bytes, cols, x, lane, &mut sums),
                    (format, n) => {
                        for c in 0..n {
                            let (x, sums) = (&x[c * cols..], &mut sums[c..]);
                            match format {
                                Format::F32 => strip::<L, F32, 1>(bytes, cols, x, lane, sums),
                                Format::F16 => strip::<L, F16, 1>(bytes, cols, x, lane, sums),
                                _ => strip::<L, BF16, 1>(bytes, cols, x, lane, sums),
                            }
                        }
                    }
                }
            }
        }
        for (c, sums) in sums[..n].iter().enumerate() {
            out.store(first + c, sums);
        }
    }
}

/// Conversion of weights to f32 lanes.
trait Widen {
    const BYTES: usize;

    /// # Safety
    /// The instruction set of `L`; `at` points at `L::N * BYTES` readable bytes.
    unsafe fn widen<L: Lanes>(at: *const u8) -> L;
}

struct F32;
struct F16;
struct BF16;

impl Widen for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn widen<L: Lanes>(at: *const u8) -> L {
        // SAFETY: the caller's; vectors are loaded in any alignment.
        unsafe { L::load(at.cast()) }
    }
}

impl Widen for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen<L: Lanes>(at: *const u8) -> L {
        // SAFETY: the caller's.
        unsafe { L::load_f16(at) }
    }
}

impl Widen for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen<L: Lanes>(at: *const u8) -> L {
        // SAFETY: the caller's.
        unsafe { L::load_bf16(at) }
    }
}

/// The first `R` rows of `x` against lanes `lane..` of the tile, in four running sums each.
///
/// # Safety
/// The instruction set of `L`; `bytes` is a tile of `cols` columns, a multiple of 4, of `W`'s
/// format; `x` has at least `R` rows and `out` room for them.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "the arrays are registers and every index is a number after unrolling"
)]
unsafe fn strip<L: Lanes, W: Widen, const R: usize>(
    bytes: &[u8],
    cols: usize,
    x: &[f32],
    lane: usize,
    out: &mut [[f32; TILE_ROWS]],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[L::splat(0.0); 4]; R];
        let (tile, x) = (bytes.as_ptr().add(W::BYTES * lane), x.as_ptr());
        for col in (0..cols).step_by(4) {
            for t in 0..4 {
                let w: L = W::widen(tile.add(TILE_ROWS * W::BYTES * (col + t)));
                for c in 0..R {
                    let x = L::splat(*x.add(c * cols + col + t));
                    sums[c][t] = w.mul_add(x, sums[c][t]);
                }
            }
        }
        for (out, [a, b, c, d]) in out.iter_mut().zip(sums) {
            a.add(b).add(c.add(d)).store(out.as_mut_ptr().add(lane));
        }
    }
}
