//! Unpacks one block of a tile's group to lines: byte `4 * row + t` of line `i` is column `4 * i +
//! t`.

use std::arch::x86_64::*;

use crate::simd::offset::Offset;

/// One block of sixteen rows.
pub(super) struct UnpackedBlock {
    /// Unsigned codes.
    pub(super) lines: [__m512i; 8],
    /// Scale of each row; of its first half block with two scales.
    pub(super) scale: __m512,
    /// Scale of the second half block, or the minimum, or unused.
    pub(super) extra: __m512,
}

/// Unpacking of a format. `BYTES` and `BLOCKS` are those of a group in [`crate::matmul::layout`].
pub(super) trait Unpack {
    const BLOCKS: usize;
    const BYTES: usize;
    const OFFSET: Offset;
    const TWO_SCALES: bool = false;
    const MINIMUM: bool = false;

    /// Reads the data that all blocks of a group share.
    ///
    /// # Safety
    /// AVX-512 F, BW, VL and DQ; `group` points at a whole group.
    unsafe fn open(group: *const u8) -> Self;

    /// Block `j < BLOCKS` of the group.
    ///
    /// # Safety
    /// As [`Unpack::open`], with the same group.
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock;

    /// Prefetches the lines `ahead` bytes after those of block `j`.
    ///
    /// # Safety
    /// No requirements: a prefetch never faults.
    #[inline(always)]
    unsafe fn prefetch(group: *const u8, j: usize, ahead: usize) {
        let block_bytes = Self::BYTES / Self::BLOCKS;
        let mut at = j * block_bytes / 64 * 64;
        while at < (j + 1) * block_bytes {
            // SAFETY: a prefetch never faults, and `wrapping_add` makes no claim about the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(ahead + at).cast()) };
            at += 64;
        }
    }
}

#[inline(always)]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: callers point at 64 readable bytes.
    unsafe { _mm512_loadu_si512(at.cast()) }
}

/// Sixteen halves, widened.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: callers point at 32 readable bytes, and have AVX-512 F.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Four nibble lines as eight lines of codes.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> [__m512i; 8] {
    // SAFETY: callers point at 256 readable bytes, and have AVX-512 BW.
    unsafe {
        let low_bits = _mm512_set1_epi8(15);
        let mut lines = [_mm512_setzero_si512(); 8];
        for i in 0..4 {
            let line = load(at.add(64 * i));
            lines[i] = _mm512_and_si512(line, low_bits);
            lines[i + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(line), low_bits);
        }
        lines
    }
}

/// Eight lines without conversion.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> [__m512i; 8] {
    // SAFETY: callers point at 512 readable bytes.
    unsafe {
        let mut lines = [_mm512_setzero_si512(); 8];
        for (i, line) in lines.iter_mut().enumerate() {
            *line = load(at.add(64 * i));
        }
        lines
    }
}

/// Adds the fifth bits of eight lines of codes; `at` points at their line.
#[inline(always)]
unsafe fn add_fifth_bits(lines: &mut [__m512i; 8], at: *const u8) {
    // SAFETY: callers point at 64 readable bytes, and have AVX-512 BW.
    unsafe {
        let bits = load(at);
        let sixteen = _mm512_set1_epi8(16);
        let shifted = [
            _mm512_slli_epi16::<4>(bits),
            _mm512_slli_epi16::<3>(bits),
            _mm512_slli_epi16::<2>(bits),
            _mm512_slli_epi16::<1>(bits),
            bits,
            _mm512_srli_epi16::<1>(bits),
            _mm512_srli_epi16::<2>(bits),
            _mm512_srli_epi16::<3>(bits),
        ];
        for (line, bits) in lines.iter_mut().zip(shifted) {
            *line = or_masked(*line, bits, sixteen);
        }
    }
}

/// Scales, and minima with the sign inverted: these are added, those of K-quants are subtracted.
#[inline(always)]
unsafe fn scale_and_min(group: *const u8) -> (__m512, __m512) {
    // SAFETY: callers point at a group that begins with sixteen scales and sixteen minima.
    unsafe {
        let minimum = _mm512_xor_ps(halves(group.add(32)), _mm512_set1_ps(-0.0));
        (halves(group), minimum)
    }
}

/// Six-bit scales and minima of eight blocks, a byte each.
struct SixBits {
    d: __m512,
    dmin: __m512,
    /// `[8][16]`.
    scales: [__m512i; 2],
    /// `[8][16]`.
    mins: [__m512i; 2],
}

impl SixBits {
    #[inline(always)]
    unsafe fn open(group: *const u8) -> SixBits {
        // SAFETY: callers point at the 256 bytes before the codes of a Q4K or Q5K group.
        unsafe {
            let six = _mm512_set1_epi8(63);
            let top = _mm512_set1_epi8(0x30);
            let low = _mm512_set1_epi8(15);
            let (a, b, c) = (
                load(group.add(64)),
                load(group.add(128)),
                load(group.add(192)),
            );
            let above = |x| _mm512_and_si512(_mm512_srli_epi16::<2>(x), top);
            let c_high = _mm512_and_si512(_mm512_srli_epi16::<4>(c), low);
            SixBits {
                d: halves(group),
                dmin: halves(group.add(32)),
                scales: [
                    _mm512_and_si512(a, six),
                    _mm512_or_si512(_mm512_and_si512(c, low), above(a)),
                ],
                mins: [_mm512_and_si512(b, six), _mm512_or_si512(c_high, above(b))],
            }
        }
    }

    /// Scale and minimum of block `j`.
    #[inline(always)]
    unsafe fn of(&self, j: usize) -> (__m512, __m512) {
        // SAFETY: `j < 8`, so both reads stay inside the two vectors.
        unsafe {
            let widen = |vectors: &[__m512i; 2]| {
                let at = vectors.as_ptr().cast::<u8>().add(16 * j);
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())))
            };
            (
                _mm512_mul_ps(self.d, widen(&self.scales)),
                _mm512_mul_ps(self.dmin, widen(&self.mins)),
            )
        }
    }
}

pub(super) struct UnpackQ4K(SixBits);

impl Unpack for UnpackQ4K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2304;
    const OFFSET: Offset = Offset::None;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn open(group: *const u8) -> Self {
        // SAFETY: the caller's.
        UnpackQ4K(unsafe { SixBits::open(group) })
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 256.
        unsafe {
            let (scale, extra) = self.0.of(j);
            let lines = nibbles(group.add(256 + 256 * j));
            UnpackedBlock {
                lines,
                scale,
                extra,
            }
        }
    }
}

pub(super) struct UnpackQ5K(SixBits);

impl Unpack for UnpackQ5K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2816;
    const OFFSET: Offset = Offset::None;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn open(group: *const u8) -> Self {
        // SAFETY: the caller's.
        UnpackQ5K(unsafe { SixBits::open(group) })
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 256, fifth bits at 2304.
        unsafe {
            let (scale, extra) = self.0.of(j);
            let mut lines = nibbles(group.add(256 + 256 * j));
            add_fifth_bits(&mut lines, group.add(2304 + 64 * j));
            UnpackedBlock {
                lines,
                scale,
                extra,
            }
        }
    }
}

/// `x | (bits & mask)` in one instruction.
#[inline(always)]
unsafe fn or_masked(x: __m512i, bits: __m512i, mask: __m512i) -> __m512i {
    // SAFETY: callers have AVX-512 F.
    unsafe { _mm512_ternarylogic_epi32::<0xf8>(x, bits, mask) }
}

pub(super) struct UnpackQ6K {
    d: __m512,
}

impl Unpack for UnpackQ6K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 3392;
    const OFFSET: Offset = Offset::Minus32Halves;
    const TWO_SCALES: bool = true;

    #[inline(always)]
    unsafe fn open(group: *const u8) -> Self {
        // SAFETY: the caller's.
        let d = unsafe { halves(group) };
        UnpackQ6K { d }
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 64, nibble lines at 320, bit pairs at 2368.
        unsafe {
            let scale = |half: usize| {
                let at = group.add(64 + 32 * j + 16 * half);
                let whole = _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()));
                _mm512_mul_ps(self.d, _mm512_cvtepi32_ps(whole))
            };
            let mut lines = nibbles(group.add(320 + 256 * j));
            let pairs = _mm512_set1_epi8(0x30);
            for half in 0..2 {
                let bits = load(group.add(2368 + 128 * j + 64 * half));
                let shifted = [
                    _mm512_slli_epi16::<4>(bits),
                    _mm512_slli_epi16::<2>(bits),
                    bits,
                    _mm512_srli_epi16::<2>(bits),
                ];
                for (i, bits) in shifted.into_iter().enumerate() {
                    let line = &mut lines[4 * half + i];
                    *line = or_masked(*line, bits, pairs);
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackQ4
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, nibble lines at 64.
        unsafe {
            let scale = halves(group.add(32 * j));
            UnpackedBlock {
                lines: nibbles(group.add(64 + 256 * j)),
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackS8
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, lines at 64.
        unsafe {
            let scale = halves(group.add(32 * j));
            UnpackedBlock {
                lines: bytes(group.add(64 + 512 * j)),
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackS8W
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, lines at 64.
        unsafe {
            let scale = _mm512_loadu_ps(group.cast());
            UnpackedBlock {
                lines: bytes(group.add(64)),
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackS8H
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales of the two halves of a row begin at 0 and 64, lines at 128.
        unsafe {
            UnpackedBlock {
                lines: bytes(group.add(128)),
                scale: _mm512_loadu_ps(group.cast()),
                extra: _mm512_loadu_ps(group.add(64).cast()),
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackQ4M
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 64.
        unsafe {
            let (scale, extra) = scale_and_min(group);
            UnpackedBlock {
                lines: nibbles(group.add(64)),
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackQ5
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, j: usize) -> UnpackedBlock {
        // SAFETY: the caller's; scales begin at 0, nibble lines at 64, fifth bits at 576.
        unsafe {
            let scale = halves(group.add(32 * j));
            let mut lines = nibbles(group.add(64 + 256 * j));
            add_fifth_bits(&mut lines, group.add(576 + 64 * j));
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
    unsafe fn open(_: *const u8) -> Self {
        UnpackQ5M
    }

    #[inline(always)]
    unsafe fn block(&self, group: *const u8, _: usize) -> UnpackedBlock {
        // SAFETY: the caller's; nibble lines begin at 64, fifth bits at 320.
        unsafe {
            let (scale, extra) = scale_and_min(group);
            let mut lines = nibbles(group.add(64));
            add_fifth_bits(&mut lines, group.add(320));
            UnpackedBlock {
                lines,
                scale,
                extra,
            }
        }
    }
}
