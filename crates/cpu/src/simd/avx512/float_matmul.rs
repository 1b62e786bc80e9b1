//! Tiles of unquantised weights times f32 activations, 512 bits wide: a lane is a row of the weight.

use std::arch::x86_64::*;

use super::Avx512;
use crate::matmul::layout::{Format, Packed};
use crate::simd::tiles::TileOut;

impl Avx512 {
    /// The bits of [`crate::matmul::scalar::float_tile`].
    pub fn float_tile(self, packed: &Packed, tile: usize, x: &[f32], out: &mut TileOut<'_>) {
        let cols = packed.cols;
        assert!(cols.is_multiple_of(4) && x.len().is_multiple_of(cols));
        let bytes = packed.tile(tile);
        let n = x.len() / cols;
        let mut first = 0;
        while first < n {
            let rest = &x[first * cols..];
            // SAFETY: the token proves the instructions; `bytes` is a tile of the named format with `cols`
            // columns, and `rest` has at least as many rows as each strip takes.
            first += unsafe {
                match (packed.format, n - first) {
                    (Format::F32, 4..) => strip::<F32, 4>(bytes, cols, rest, first, out),
                    (Format::F32, _) => strip::<F32, 1>(bytes, cols, rest, first, out),
                    (Format::F16, 4..) => strip::<F16, 4>(bytes, cols, rest, first, out),
                    (Format::F16, _) => strip::<F16, 1>(bytes, cols, rest, first, out),
                    (_, 4..) => strip::<BF16, 4>(bytes, cols, rest, first, out),
                    (_, _) => strip::<BF16, 1>(bytes, cols, rest, first, out),
                }
            };
        }
    }
}

/// How a weight becomes f32.
trait Widen {
    const BYTES: usize;

    /// Sixteen weights.
    ///
    /// # Safety
    /// AVX-512 F; `at` points at `16 * BYTES` readable bytes.
    unsafe fn widen(at: *const u8) -> __m512;
}

struct F32;
struct F16;
struct BF16;

impl Widen for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn widen(at: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
}

impl Widen for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen(at: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }
}

impl Widen for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen(at: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
}

/// The first `N` rows of `x`, which are rows `first..` of the output; gives `N`.
///
/// # Safety
/// AVX-512 F; `bytes` is a tile of `cols` columns, a multiple of 4; `x` has at least `N` rows.
#[target_feature(enable = "avx512f")]
unsafe fn strip<W: Widen, const N: usize>(
    bytes: &[u8],
    cols: usize,
    x: &[f32],
    first: usize,
    out: &mut TileOut<'_>,
) -> usize {
    let mut sums = [[_mm512_setzero_ps(); 4]; N];
    // SAFETY: column `col < cols` of the tile, and value `col` of row `c < N` of `x`, exist; each row of the
    // output part takes `width` values.
    unsafe {
        let (tile, x) = (bytes.as_ptr(), x.as_ptr());
        for col in (0..cols).step_by(4) {
            for t in 0..4 {
                let w = W::widen(tile.add(16 * W::BYTES * (col + t)));
                for (c, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*x.add(c * cols + col + t));
                    sums[t] = _mm512_fmadd_ps(w, x, sums[t]);
                }
            }
        }
        let mask = (0xffff_u32 >> (16 - out.width())) as u16;
        for (c, [a, b, d, e]) in sums.into_iter().enumerate() {
            let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(d, e));
            _mm512_mask_storeu_ps(out.row(first + c), mask, sum);
        }
    }
    N
}
