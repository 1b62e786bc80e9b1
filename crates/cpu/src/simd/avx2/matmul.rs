//! Tiles of a repacked matrix times rows of activations, 256 bits wide: half a tile at a time.

use std::arch::x86_64::*;

use super::Avx2;
use super::unpack::{Unpack, UnpackQ4, UnpackQ4K, UnpackQ4M, UnpackQ5, UnpackQ5K, UnpackQ5M};
use super::unpack::{UnpackQ6K, UnpackS8, UnpackS8H, UnpackS8W, UnpackedBlock};
use crate::matmul::activations::ActivationRows;
use crate::matmul::layout::{BLOCK, Format, Packed, TILE_ROWS};
use crate::simd::offset::Offset;
use crate::simd::tiles::TileOut;

/// Rows of a half tile: the lanes of a vector.
const HALF: usize = TILE_ROWS / 2;

/// Prefetch distance of the first strip of rows, in bytes of weights.
const AHEAD: usize = 2048;

impl Avx2 {
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
        let bytes = packed.tile(tile);
        // SAFETY: the token proves the instructions; `bytes` is a whole tile of the named format
        // with as many columns as `acts`, whose arrays were just measured.
        unsafe {
            match packed.format {
                Format::Q4K => sweep::<UnpackQ4K>(bytes, acts, out),
                Format::Q5K => sweep::<UnpackQ5K>(bytes, acts, out),
                Format::Q6K => sweep::<UnpackQ6K>(bytes, acts, out),
                Format::Q4 => sweep::<UnpackQ4>(bytes, acts, out),
                Format::Q4M => sweep::<UnpackQ4M>(bytes, acts, out),
                Format::Q5 => sweep::<UnpackQ5>(bytes, acts, out),
                Format::Q5M => sweep::<UnpackQ5M>(bytes, acts, out),
                Format::S8 => sweep::<UnpackS8>(bytes, acts, out),
                Format::S8W => sweep::<UnpackS8W>(bytes, acts, out),
                Format::S8H => sweep::<UnpackS8H>(bytes, acts, out),
                Format::F32 | Format::F16 | Format::BF16 => {
                    unreachable!("float formats take f32 activations")
                }
            }
        }
    }
}

/// Cuts the activation rows into strips that fit the registers.
///
/// # Safety
/// AVX2, FMA and F16C; `bytes` is a tile of `U`'s format with `acts.cols` columns.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sweep<U: Unpack>(bytes: &[u8], acts: ActivationRows<'_>, out: &mut TileOut<'_>) {
    let mut first = 0;
    while first < acts.n {
        let n = match acts.n - first {
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
        let mut sums = [[0.0; TILE_ROWS]; 4];
        // SAFETY: the caller's, and `first + n` never passes `acts.n`.
        unsafe {
            match n {
                4 => {
                    strip::<U, 4, 1>(bytes, 0, acts, first, &mut sums);
                    strip::<U, 4, 1>(bytes, 1, acts, first, &mut sums);
                }
                2 => strip::<U, 2, 2>(bytes, 0, acts, first, &mut sums),
                _ => strip::<U, 1, 2>(bytes, 0, acts, first, &mut sums),
            }
        }
        for (c, sums) in sums[..n].iter().enumerate() {
            out.store(first + c, sums);
        }
        first += n;
    }
}

/// Prefetches the lines [`AHEAD`] bytes after those of block `j` of the group.
#[inline(always)]
fn prefetch<U: Unpack>(group: *const u8, j: usize) {
    let block_bytes = U::BYTES / U::BLOCKS;
    let mut at = j * block_bytes / 64 * 64;
    while at < (j + 1) * block_bytes {
        // SAFETY: a prefetch never faults, and `wrapping_add` makes no claim about the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(AHEAD + at).cast()) };
        at += 64;
    }
}

/// Sums of neighbouring pairs of products, 16 bits each.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn products(line: __m256i, a: __m256i, signed: bool) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if signed {
            // The instruction requires one unsigned operand: the weight's sign moves to the
            // activation.
            _mm256_maddubs_epi16(_mm256_abs_epi8(line), _mm256_sign_epi8(a, line))
        } else {
            _mm256_maddubs_epi16(line, a)
        }
    }
}

/// Rows `first..first + N` of the activations against `HALVES` halves of the tile from
/// `first_half` on.
///
/// Both halves at once read each cache line once, so that a few rows of activations read weights
/// from memory at an even rate; four rows need the registers for one half.
///
/// # Safety
/// As [`sweep`], `first + N <= acts.n`, and `first_half + HALVES <= 2`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn strip<U: Unpack, const N: usize, const HALVES: usize>(
    bytes: &[u8],
    first_half: usize,
    acts: ActivationRows<'_>,
    first: usize,
    out: &mut [[f32; TILE_ROWS]; 4],
) {
    let blocks = acts.cols / BLOCK;
    let mut sums = [[_mm256_setzero_ps(); N]; HALVES];
    let ones = _mm256_set1_epi16(1);
    let signed = matches!(U::OFFSET, Offset::Minus128 | Offset::Minus128Halves);
    // SAFETY: every pointer below stays inside the arrays that `Avx2::tile` measured: rows
    // `first..first + N` of `[n, cols]`, `[n, blocks]` and `[n, 2 * blocks]`; `U` reads inside the
    // tile.
    unsafe {
        let values = acts.values.as_ptr().add(first * acts.cols);
        let scales = acts.scales.as_ptr().add(first * blocks);
        let act_sums = acts.sums.as_ptr().add(first * blocks);
        let minus_8 = acts.minus_8.as_ptr().add(first * blocks);
        let minus_32 = acts.minus_32.as_ptr().add(2 * first * blocks);
        for block in 0..blocks {
            let group = bytes.as_ptr().add(block / U::BLOCKS * U::BYTES);
            if first == 0 && first_half == 0 {
                prefetch::<U>(group, block % U::BLOCKS);
            }
            for (half, sums) in sums.iter_mut().enumerate() {
                let half = first_half + half;
                let UnpackedBlock {
                    lines,
                    scale,
                    extra,
                } = U::block(group, half, block % U::BLOCKS);
                for (c, sum) in sums.iter_mut().enumerate() {
                    let at = c * blocks + block;
                    let a = values.add(at * BLOCK).cast::<i32>();
                    let mut dots = match U::OFFSET {
                        Offset::None | Offset::Minus128 | Offset::Minus128Halves => {
                            [_mm256_setzero_si256(); 2]
                        }
                        Offset::Minus8 => {
                            [_mm256_set1_epi32(*minus_8.add(at)), _mm256_setzero_si256()]
                        }
                        Offset::Minus16 => [
                            _mm256_set1_epi32(2 * *minus_8.add(at)),
                            _mm256_setzero_si256(),
                        ],
                        Offset::Minus32Halves => [
                            _mm256_set1_epi32(*minus_32.add(2 * at)),
                            _mm256_set1_epi32(*minus_32.add(2 * at + 1)),
                        ],
                    };
                    for pair in 0..4 {
                        let i = 2 * pair;
                        let a0 = _mm256_set1_epi32(a.add(i).read_unaligned());
                        let a1 = _mm256_set1_epi32(a.add(i + 1).read_unaligned());
                        let p0 = products(lines[i], a0, signed);
                        let p1 = products(lines[i + 1], a1, signed);
                        let dot = if signed {
                            // 128 * 127 twice fills 16 bits: widen before adding.
                            _mm256_add_epi32(
                                _mm256_madd_epi16(p0, ones),
                                _mm256_madd_epi16(p1, ones),
                            )
                        } else {
                            // Codes below 64 leave room for two pairs: 63 * 127 * 4 < 2^15.
                            _mm256_madd_epi16(_mm256_add_epi16(p0, p1), ones)
                        };
                        let total = &mut dots[pair / 2];
                        *total = _mm256_add_epi32(*total, dot);
                    }
                    let [low, high] = dots;
                    let mut m;
                    if U::TWO_SCALES {
                        m = _mm256_mul_ps(_mm256_cvtepi32_ps(low), scale);
                        m = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), extra, m);
                    } else {
                        let dot = _mm256_add_epi32(low, high);
                        m = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
                        if U::MINIMUM {
                            m = _mm256_fnmadd_ps(extra, _mm256_set1_ps(*act_sums.add(at)), m);
                        }
                    }
                    *sum = _mm256_fmadd_ps(m, _mm256_set1_ps(*scales.add(at)), *sum);
                }
            }
        }
        for (half, sums) in sums.into_iter().enumerate() {
            for (out, sum) in out.iter_mut().zip(sums) {
                _mm256_storeu_ps(out.as_mut_ptr().add(HALF * (first_half + half)), sum);
            }
        }
    }
}
