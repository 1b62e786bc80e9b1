//! Tiles of a repacked matrix times rows of activations, 512 bits wide: a lane is a row of the
//! weight.

use std::arch::x86_64::*;

use super::Avx512;
use super::unpack::{Unpack, UnpackQ4, UnpackQ4K, UnpackQ4M, UnpackQ5, UnpackQ5K, UnpackQ5M};
use super::unpack::{UnpackQ6K, UnpackS8, UnpackS8H, UnpackS8W, UnpackedBlock};
use crate::matmul::activations::ActivationRows;
use crate::matmul::layout::{BLOCK, Format, Packed};
use crate::simd::offset::Offset;
use crate::simd::tiles::TileOut;

/// Prefetch distance of the first strip of rows, in bytes of weights; later strips find them in
/// cache.
const AHEAD: usize = 4096;

impl Avx512 {
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
/// AVX-512 F, BW, VL, DQ and VNNI; `bytes` is a tile of `U`'s format with `acts.cols` columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn sweep<U: Unpack>(bytes: &[u8], acts: ActivationRows<'_>, out: &mut TileOut<'_>) {
    let mut first = 0;
    while first < acts.n {
        // SAFETY: the caller's, and `first` plus the strip's width never passes `acts.n`.
        first += unsafe {
            match acts.n - first {
                12.. if !U::TWO_SCALES => strip::<U, 12>(bytes, acts, first, out),
                8.. => strip::<U, 8>(bytes, acts, first, out),
                4.. => strip::<U, 4>(bytes, acts, first, out),
                2.. => strip::<U, 2>(bytes, acts, first, out),
                _ => strip::<U, 1>(bytes, acts, first, out),
            }
        };
    }
}

/// Rows `first..first + N` of the activations; gives `N`.
///
/// # Safety
/// As [`sweep`], and `first + N <= acts.n`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[expect(
    clippy::needless_range_loop,
    reason = "the arrays are registers and every index is a number after unrolling"
)]
unsafe fn strip<U: Unpack, const N: usize>(
    bytes: &[u8],
    acts: ActivationRows<'_>,
    first: usize,
    out: &mut TileOut<'_>,
) -> usize {
    let blocks = acts.cols / BLOCK;
    let mut sums = [_mm512_setzero_ps(); N];
    // SAFETY: every pointer below stays inside the arrays that `Avx512::tile` measured: rows
    // `first..first + N` of `[n, cols]`, `[n, blocks]` and `[n, 2 * blocks]`; `U` reads inside the
    // tile. Prefetching beyond it is harmless.
    unsafe {
        let values = acts.values.as_ptr().add(first * acts.cols);
        let scales = acts.scales.as_ptr().add(first * blocks);
        let act_sums = acts.sums.as_ptr().add(first * blocks);
        let whole = match U::OFFSET {
            Offset::Minus8 | Offset::Minus16 => acts.minus_8.as_ptr(),
            _ => acts.minus_128.as_ptr(),
        }
        .add(first * blocks);
        let halves = acts.minus_32.as_ptr().add(2 * first * blocks);
        let mut block = 0;
        let mut group = bytes.as_ptr();
        while block < blocks {
            let unpack = U::open(group);
            let in_group = U::BLOCKS.min(blocks - block);
            for j in 0..in_group {
                let UnpackedBlock {
                    lines,
                    scale,
                    extra,
                } = unpack.block(group, j);
                if first == 0 {
                    U::prefetch(group, j, AHEAD);
                }
                let at = block + j;
                // The products of the first and second half block. One accumulator serves both if
                // the format allows it and enough rows hide its latency. Rows are interleaved for
                // the same reason.
                let mut low = [_mm512_setzero_si512(); N];
                let mut high = [_mm512_setzero_si512(); N];
                for c in 0..N {
                    let at = c * blocks + at;
                    match U::OFFSET {
                        Offset::None => {}
                        Offset::Minus8 | Offset::Minus128 => {
                            low[c] = _mm512_set1_epi32(*whole.add(at));
                        }
                        Offset::Minus16 => low[c] = _mm512_set1_epi32(2 * *whole.add(at)),
                        Offset::Minus128Halves => {
                            low[c] = _mm512_set1_epi32(4 * *halves.add(2 * at));
                            high[c] = _mm512_set1_epi32(4 * *halves.add(2 * at + 1));
                        }
                        Offset::Minus32Halves => {
                            low[c] = _mm512_set1_epi32(*halves.add(2 * at));
                            high[c] = _mm512_set1_epi32(*halves.add(2 * at + 1));
                        }
                    }
                }
                let two_chains = N < 4 || U::TWO_SCALES;
                for i in 0..4 {
                    for c in 0..N {
                        let a = values.add((c * blocks + at) * BLOCK + 4 * i);
                        let a = _mm512_set1_epi32(a.cast::<i32>().read_unaligned());
                        low[c] = _mm512_dpbusd_epi32(low[c], lines[i], a);
                    }
                }
                for i in 4..8 {
                    for c in 0..N {
                        let a = values.add((c * blocks + at) * BLOCK + 4 * i);
                        let a = _mm512_set1_epi32(a.cast::<i32>().read_unaligned());
                        if two_chains {
                            high[c] = _mm512_dpbusd_epi32(high[c], lines[i], a);
                        } else {
                            low[c] = _mm512_dpbusd_epi32(low[c], lines[i], a);
                        }
                    }
                }
                for c in 0..N {
                    let at = c * blocks + at;
                    let mut dot = low[c];
                    if two_chains && !U::TWO_SCALES {
                        dot = _mm512_add_epi32(dot, high[c]);
                    }
                    let mut m = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
                    if U::TWO_SCALES {
                        m = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[c]), extra, m);
                    } else if U::MINIMUM {
                        m = _mm512_fnmadd_ps(extra, _mm512_set1_ps(*act_sums.add(at)), m);
                    }
                    sums[c] = _mm512_fmadd_ps(m, _mm512_set1_ps(*scales.add(at)), sums[c]);
                }
            }
            block += in_group;
            group = group.add(U::BYTES);
        }
        let mask = (0xffff_u32 >> (16 - out.width())) as u16;
        for (c, sum) in sums.into_iter().enumerate() {
            _mm512_mask_storeu_ps(out.row(first + c), mask, sum);
        }
    }
    N
}
