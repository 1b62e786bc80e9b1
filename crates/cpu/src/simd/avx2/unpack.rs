//! Unpacks one block of eight rows of a tile's group to lines: byte `4 * row + t` of line `i` is
//! column `4 * i + t`.

use std::arch::x86_64::*;

use crate::simd::offset::Offset;

/// One block of eight rows.
pub(super) struct UnpackedBlock {
    /// Codes.
    pub(super) lines: [__m256i; 8],
    /// Scale of each row; of its first half block with two scales.
    pub(super) scale: __m256,
    /// Scale of the second half block, or the minimum, or unused.
    pub(super) extra: __m256,
}

/// Unpacking of a format. `BYTES` and `BLOCKS` are those of a group in [`crate::matmul::layout`].
pub(super) trait Unpack {
    const BLOCKS: usize;
    const BYTES: usize;
    /// With an offset of 128, lines are signed bytes, because pairs of larger unsigned products
    /// overflow 16 bits.
    const OFFSET: Offset;
    const TWO_SCALES: bool = false;
    const MINIMUM: bool = false;

    /// Block `j < BLOCKS` of rows `8 * half..` of the group.
    ///
    /// # Safety
    /// AVX2 and F16C; `group` points at a whole group, `half < 2`.
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock;
}

#[inline(always)]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: callers point at 32 readable bytes.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Eight halves, widened.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: callers point at 16 readable bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// Eight unsigned bytes, widened.
#[inline(always)]
unsafe fn widen(at: *const u8) -> __m256i {
    // SAFETY: callers point at 8 readable bytes.
    unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())) }
}

/// Four nibble lines as eight lines of codes; `at` is the half's part of the first.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> [__m256i; 8] {
    // SAFETY: callers point into four lines of 64 readable bytes.
    unsafe {
        let low_bits = _mm256_set1_epi8(15);
        let mut lines = [_mm256_setzero_si256(); 8];
        for i in 0..4 {
            let line = load(at.add(64 * i));
            lines[i] = _mm256_and_si256(line, low_bits);
            lines[i + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(line), low_bits);
        }
        lines
    }
}

/// Eight lines of value + 128 as signed bytes.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> [__m256i; 8] {
    // SAFETY: callers point into eight lines of 64 readable bytes.
    unsafe {
        let excess = _mm256_set1_epi8(i8::MIN);
        let mut lines = [_mm256_setzero_si256(); 8];
        for (i, line) in lines.iter_mut().enumerate() {
            *line = _mm256_xor_si256(load(at.add(64 * i)), excess);
        }
        lines
    }
}

/// `x | (bits & mask)`.
#[inline(always)]
unsafe fn or_masked(x: __m256i, bits: __m256i, mask: __m256i) -> __m256i {
    // SAFETY: callers have AVX2.
    unsafe { _mm256_or_si256(x, _mm256_and_si256(bits, mask)) }
}

/// Adds the fifth bits of eight lines of codes; `at` is the half's part of their line.
#[inline(always)]
unsafe fn add_fifth_bits(lines: &mut [__m256i; 8], at: *const u8) {
    // SAFETY: callers point at 32 readable bytes.
    unsafe {
        let bits = load(at);
        let shifted = [
            _mm256_slli_epi16::<4>(bits),
            _mm256_slli_epi16::<3>(bits),
            _mm256_slli_epi16::<2>(bits),
            _mm256_slli_epi16::<1>(bits),
            bits,
            _mm256_srli_epi16::<1>(bits),
            _mm256_srli_epi16::<2>(bits),
            _mm256_srli_epi16::<3>(bits),
        ];
        for (line, bits) in lines.iter_mut().zip(shifted) {
            *line = or_masked(*line, bits, _mm256_set1_epi8(16));
        }
    }
}

/// Scales, and minima with the sign inverted: these are added, those of K-quants are subtracted.
#[inline(always)]
unsafe fn scale_and_min(group: *const u8, half: usize) -> (__m256, __m256) {
    // SAFETY: callers point at a group that begins with sixteen scales and sixteen minima.
    unsafe {
        let minimum = halves(group.add(32 + 16 * half));
        let minimum = _mm256_xor_ps(minimum, _mm256_set1_ps(-0.0));
        (halves(group.add(16 * half)), minimum)
    }
}

/// Scale and minimum of block `j` of a Q4K or Q5K group.
#[inline(always)]
unsafe fn six_bits(group: *const u8, half: usize, j: usize) -> (__m256, __m256) {
    // SAFETY: callers point at a whole group; its twelve scale bytes of sixteen rows begin at 64.
    unsafe {
        let byte = |i: usize| widen(group.add(64 + 16 * i + 8 * half));
        let (scale, min) = if j < 4 {
            let six = _mm256_set1_epi32(63);
            (
                _mm256_and_si256(byte(j), six),
                _mm256_and_si256(byte(j + 4), six),
            )
        } else {
            let top = |i| _mm256_slli_epi32::<4>(_mm256_srli_epi32::<6>(byte(i)));
            let both = byte(j + 4);
            let low = _mm256_and_si256(both, _mm256_set1_epi32(15));
            (
                _mm256_or_si256(low, top(j - 4)),
                _mm256_or_si256(_mm256_srli_epi32::<4>(both), top(j)),
            )
        };
        let (d, dmin) = (
            halves(group.add(16 * half)),
            halves(group.add(32 + 16 * half)),
        );
        (
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(scale)),
            _mm256_mul_ps(dmin, _mm256_cvtepi32_ps(min)),
        )
    }
}

pub(super) struct UnpackQ4K;

impl Unpack for UnpackQ4K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2304;
    const OFFSET: Offset = Offset::None;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 256.
        unsafe {
            let (scale, extra) = six_bits(group, half, j);
            let lines = nibbles(group.add(256 + 256 * j + 32 * half));
            UnpackedBlock {
                lines,
                scale,
                extra,
            }
        }
    }
}

pub(super) struct UnpackQ5K;

impl Unpack for UnpackQ5K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2816;
    const OFFSET: Offset = Offset::None;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 256, fifth bits at 2304.
        unsafe {
            let (scale, extra) = six_bits(group, half, j);
            let mut lines = nibbles(group.add(256 + 256 * j + 32 * half));
            add_fifth_bits(&mut lines, group.add(2304 + 64 * j + 32 * half));
            UnpackedBlock {
                lines,
                scale,
                extra,
            }
        }
    }
}

pub(super) struct UnpackQ6K;

impl Unpack for UnpackQ6K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 3392;
    const OFFSET: Offset = Offset::Minus32Halves;
    const TWO_SCALES: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 64, nibble lines at 320, bit pairs at 2368.
        unsafe {
            let d = halves(group.add(16 * half));
            let scale = |part: usize| {
                let at = group.add(64 + 32 * j + 16 * part + 8 * half);
                let whole = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
                _mm256_mul_ps(d, _mm256_cvtepi32_ps(whole))
            };
            let mut lines = nibbles(group.add(320 + 256 * j + 32 * half));
            for part in 0..2 {
                let bits = load(group.add(2368 + 128 * j + 64 * part + 32 * half));
                let shifted = [
                    _mm256_slli_epi16::<4>(bits),
                    _mm256_slli_epi16::<2>(bits),
                    bits,
                    _mm256_srli_epi16::<2>(bits),
                ];
                for (i, bits) in shifted.into_iter().enumerate() {
                    let line = &mut lines[4 * part + i];
                    *line = or_masked(*line, bits, _mm256_set1_epi8(0x30));
                }
            }
            UnpackedBlock {
                lines,
                scale: scale(0),
                extra: scale(1),
            }
        }
    }
}

pub(super) struct UnpackQ4;

impl Unpack for UnpackQ4 {
    const BLOCKS: usize = 2;
    const BYTES: usize = 576;
    const OFFSET: Offset = Offset::Minus8;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, nibble lines at 64.
        unsafe {
            let scale = halves(group.add(32 * j + 16 * half));
            UnpackedBlock {
                lines: nibbles(group.add(64 + 256 * j + 32 * half)),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct UnpackS8;

impl Unpack for UnpackS8 {
    const BLOCKS: usize = 2;
    const BYTES: usize = 1088;
    const OFFSET: Offset = Offset::Minus128;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, lines at 64.
        unsafe {
            let scale = halves(group.add(32 * j + 16 * half));
            UnpackedBlock {
                lines: bytes(group.add(64 + 512 * j + 32 * half)),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct UnpackS8W;

impl Unpack for UnpackS8W {
    const BLOCKS: usize = 1;
    const BYTES: usize = 576;
    const OFFSET: Offset = Offset::Minus128;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, lines at 64.
        unsafe {
            let scale = _mm256_loadu_ps(group.add(32 * half).cast());
            UnpackedBlock {
                lines: bytes(group.add(64 + 32 * half)),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct UnpackS8H;

impl Unpack for UnpackS8H {
    const BLOCKS: usize = 1;
    const BYTES: usize = 640;
    const OFFSET: Offset = Offset::Minus128Halves;
    const TWO_SCALES: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales of the two halves of a row begin at 0 and 64, lines at 128.
        unsafe {
            UnpackedBlock {
                lines: bytes(group.add(128 + 32 * half)),
                scale: _mm256_loadu_ps(group.add(32 * half).cast()),
                extra: _mm256_loadu_ps(group.add(64 + 32 * half).cast()),
            }
        }
    }
}

pub(super) struct UnpackQ4M;

impl Unpack for UnpackQ4M {
    const BLOCKS: usize = 1;
    const BYTES: usize = 320;
    const OFFSET: Offset = Offset::None;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 64.
        unsafe {
            let (scale, extra) = scale_and_min(group, half);
            UnpackedBlock {
                lines: nibbles(group.add(64 + 32 * half)),
                scale,
                extra,
            }
        }
    }
}

pub(super) struct UnpackQ5;

impl Unpack for UnpackQ5 {
    const BLOCKS: usize = 2;
    const BYTES: usize = 704;
    const OFFSET: Offset = Offset::Minus16;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, nibble lines at 64, fifth bits at 576.
        unsafe {
            let scale = halves(group.add(32 * j + 16 * half));
            let mut lines = nibbles(group.add(64 + 256 * j + 32 * half));
            add_fifth_bits(&mut lines, group.add(576 + 64 * j + 32 * half));
            UnpackedBlock {
                lines,
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct UnpackQ5M;

impl Unpack for UnpackQ5M {
    const BLOCKS: usize = 1;
    const BYTES: usize = 384;
    const OFFSET: Offset = Offset::None;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 64, fifth bits at 320.
        unsafe {
            let (scale, extra) = scale_and_min(group, half);
            let mut lines = nibbles(group.add(64 + 32 * half));
            add_fifth_bits(&mut lines, group.add(320 + 32 * half));
            UnpackedBlock {
                lines,
                scale,
                extra,
            }
        }
    }
}
