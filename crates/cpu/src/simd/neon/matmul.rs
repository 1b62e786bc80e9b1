//! Tiles of a repacked matrix times rows of activations: half a tile at a time.

use std::arch::aarch64::*;

use super::dots::{Dot, Dots, Matrix, Widening};
use super::unpack::{SignedBlock, SignedQ4, SignedQ4K, SignedQ4M, SignedQ5, SignedQ5K, SignedQ5M};
use super::unpack::{SignedQ6K, SignedS8, SignedS8H, SignedS8W, UnpackSigned};
use super::{ByteProducts, Neon};
use crate::matmul::activations::ActivationRows;
use crate::matmul::layout::{BLOCK, Format, Packed, TILE_ROWS};
use crate::simd::tiles::TileOut;

/// Rows of a half tile.
const HALF: usize = TILE_ROWS / 2;

impl Neon {
    /// All rows of `acts` against tile `tile` of `packed`, which must be of an integer format.
    pub fn tile(
        self,
        packed: &Packed,
        tile: usize,
        acts: ActivationRows<'_>,
        out: &mut TileOut<'_>,
    ) {
        assert_eq!(packed.cols, acts.cols);
        acts.check();
        let (format, bytes) = (packed.format, packed.tile(tile));
        // SAFETY: the token proves the instructions; `bytes` is a whole tile of the named format
        // with as many columns as `acts`, whose arrays were just measured.
        unsafe {
            match self.0 {
                ByteProducts::Widening => widening(format, bytes, acts, out),
                ByteProducts::Dot => dot(format, bytes, acts, out),
                ByteProducts::Matrix => matrix(format, bytes, acts, out),
            }
        }
    }
}

/// A function that is compiled for one kind of products.
macro_rules! compiled {
    ($name:ident, $features:literal, $dots:ty) => {
        /// # Safety
        /// The instructions; `bytes` is a tile of the format with `acts.cols` columns.
        #[target_feature(enable = $features)]
        unsafe fn $name(
            format: Format,
            bytes: &[u8],
            acts: ActivationRows<'_>,
            out: &mut TileOut<'_>,
        ) {
            // SAFETY: the caller's.
            unsafe {
                match format {
                    Format::Q4K => sweep::<SignedQ4K, $dots>(bytes, acts, out),
                    Format::Q5K => sweep::<SignedQ5K, $dots>(bytes, acts, out),
                    Format::Q6K => sweep::<SignedQ6K, $dots>(bytes, acts, out),
                    Format::Q4 => sweep::<SignedQ4, $dots>(bytes, acts, out),
                    Format::Q4M => sweep::<SignedQ4M, $dots>(bytes, acts, out),
                    Format::Q5 => sweep::<SignedQ5, $dots>(bytes, acts, out),
                    Format::Q5M => sweep::<SignedQ5M, $dots>(bytes, acts, out),
                    Format::S8 => sweep::<SignedS8, $dots>(bytes, acts, out),
                    Format::S8W => sweep::<SignedS8W, $dots>(bytes, acts, out),
                    Format::S8H => sweep::<SignedS8H, $dots>(bytes, acts, out),
                    Format::F32 | Format::F16 | Format::BF16 => {
                        unreachable!("float formats take f32 activations")
                    }
                }
            }
        }
    };
}

compiled!(widening, "neon", Widening);
compiled!(dot, "neon,dotprod", Dot);
compiled!(matrix, "neon,dotprod,i8mm", Matrix);

/// Cuts the activation rows into strips that fit the registers.
///
/// # Safety
/// The instructions of `D`; `bytes` is a tile of `U`'s format with `acts.cols` columns.
#[inline(always)]
unsafe fn sweep<U: UnpackSigned, D: Dots>(
    bytes: &[u8],
    acts: ActivationRows<'_>,
    out: &mut TileOut<'_>,
) {
    let mut first = 0;
    while first < acts.n {
        let n = match acts.n - first {
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
        let mut sums = [[0.0; TILE_ROWS]; 4];
        for half in 0..2 {
            // SAFETY: the caller's, and `first + n` never passes `acts.n`.
            unsafe {
                match n {
                    4 => strip::<U, D, 4>(bytes, half, acts, first, &mut sums),
                    2 => strip::<U, D, 2>(bytes, half, acts, first, &mut sums),
                    _ => strip::<U, D, 1>(bytes, half, acts, first, &mut sums),
                }
            }
        }
        for (c, sums) in sums[..n].iter().enumerate() {
            out.store(first + c, sums);
        }
        first += n;
    }
}

/// The sums of eight rows with a block of `N` rows of activations, by half block and by four rows.
///
/// # Safety
/// The instructions of `D`; `values` points at the first row's block, rows are `cols` apart.
#[inline(always)]
unsafe fn dots<D: Dots, const N: usize>(
    lines: &[[int8x16_t; 2]; 8],
    values: *const i8,
    cols: usize,
) -> [[[int32x4_t; 2]; 2]; N] {
    // SAFETY: the caller's.
    unsafe {
        let mut all = [[[vdupq_n_s32(0); 2]; 2]; N];
        for part in 0..2 {
            for rows in 0..2 {
                let lines = [0, 1, 2, 3].map(|i| lines[4 * part + i][rows]);
                let acts = |c: usize| vld1q_s8(values.add(c * cols + BLOCK / 2 * part));
                for c in (0..N).step_by(2) {
                    if c + 1 < N {
                        let [first, second] = D::two(lines, [acts(c), acts(c + 1)]);
                        all[c][part][rows] = first;
                        all[c + 1][part][rows] = second;
                    } else {
                        all[c][part][rows] = D::one(lines, acts(c));
                    }
                }
            }
        }
        all
    }
}

/// Rows `first..first + N` of the activations against rows `8 * half..` of the tile.
///
/// # Safety
/// As [`sweep`], and `first + N <= acts.n`.
#[inline(always)]
unsafe fn strip<U: UnpackSigned, D: Dots, const N: usize>(
    bytes: &[u8],
    half: usize,
    acts: ActivationRows<'_>,
    first: usize,
    out: &mut [[f32; TILE_ROWS]; 4],
) {
    let blocks = acts.cols / BLOCK;
    // SAFETY: every pointer below stays inside the arrays that `Neon::tile` measured: rows
    // `first..first + N` of `[n, cols]` and `[n, blocks]`; `U` reads inside the tile.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); 2]; N];
        let values = acts.values.as_ptr().add(first * acts.cols);
        let scales = acts.scales.as_ptr().add(first * blocks);
        let act_sums = acts.sums.as_ptr().add(first * blocks);
        for block in 0..blocks {
            let group = bytes.as_ptr().add(block / U::BLOCKS * U::BYTES);
            let SignedBlock {
                lines,
                scale,
                extra,
            } = U::block(group, half, block % U::BLOCKS);
            let dots = dots::<D, N>(&lines, values.add(block * BLOCK), acts.cols);
            for (c, ([low, high], sums)) in dots.into_iter().zip(&mut sums).enumerate() {
                let at = c * blocks + block;
                for (rows, sum) in sums.iter_mut().enumerate() {
                    let mut m;
                    if U::TWO_SCALES {
                        m = vmulq_f32(vcvtq_f32_s32(low[rows]), scale[rows]);
                        m = vfmaq_f32(m, vcvtq_f32_s32(high[rows]), extra[rows]);
                    } else {
                        let dot = vaddq_s32(low[rows], high[rows]);
                        m = vmulq_f32(vcvtq_f32_s32(dot), scale[rows]);
                        if U::MINIMUM {
                            m = vfmsq_f32(m, extra[rows], vdupq_n_f32(*act_sums.add(at)));
                        }
                    }
                    *sum = vfmaq_f32(*sum, m, vdupq_n_f32(*scales.add(at)));
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            let to = out.as_mut_ptr().add(HALF * half);
            vst1q_f32(to, sums[0]);
            vst1q_f32(to.add(4), sums[1]);
        }
    }
}
