//! Unpacks one block of eight rows of a tile's group to lines of signed values: byte `4 * row + t`
//! of line `i` is column `4 * i + t`. A line is two registers, each of four rows.

use std::arch::aarch64::*;

/// A line of eight rows.
type Line = [int8x16_t; 2];
/// A value for each of eight rows.
type PerRow = [float32x4_t; 2];

/// One block of eight rows.
pub(super) struct SignedBlock {
    /// Values.
    pub(super) lines: [Line; 8],
    /// Scale of each row; of its first half block with two scales.
    pub(super) scale: PerRow,
    /// Scale of the second half block, or the minimum, or unused.
    pub(super) extra: PerRow,
}

/// Unpacking of a format. `BYTES` and `BLOCKS` are those of a group in [`crate::matmul::layout`].
pub(super) trait UnpackSigned {
    const BLOCKS: usize;
    const BYTES: usize;
    const TWO_SCALES: bool = false;
    const MINIMUM: bool = false;

    /// Block `j < BLOCKS` of rows `8 * half..` of the group.
    ///
    /// # Safety
    /// NEON; `group` points at a whole group, `half < 2`.
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock;
}

#[inline(always)]
unsafe fn load(at: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: callers point at 32 readable bytes.
    unsafe { [vld1q_u8(at), vld1q_u8(at.add(16))] }
}

/// Eight halves, widened.
#[inline(always)]
unsafe fn halves(at: *const u8) -> PerRow {
    // SAFETY: callers point at 16 readable bytes.
    unsafe {
        let halves = vreinterpretq_u16_u8(vld1q_u8(at));
        let [low, high] = [vget_low_u16(halves), vget_high_u16(halves)];
        [low, high].map(|half| vcvt_f32_f16(vreinterpret_f16_u16(half)))
    }
}

/// Eight words.
#[inline(always)]
unsafe fn words(at: *const u8) -> PerRow {
    // SAFETY: callers point at 32 readable bytes.
    unsafe {
        let [low, high] = load(at);
        [vreinterpretq_f32_u8(low), vreinterpretq_f32_u8(high)]
    }
}

/// Eight unsigned bytes as f32.
#[inline(always)]
unsafe fn unsigned(bytes: uint8x8_t) -> PerRow {
    // SAFETY: callers have NEON.
    unsafe {
        let wide = vmovl_u8(bytes);
        [vget_low_u16(wide), vget_high_u16(wide)].map(|half| vcvtq_f32_u32(vmovl_u16(half)))
    }
}

/// Eight signed bytes as f32.
#[inline(always)]
unsafe fn signed(bytes: int8x8_t) -> PerRow {
    // SAFETY: callers have NEON.
    unsafe {
        let wide = vmovl_s8(bytes);
        [vget_low_s16(wide), vget_high_s16(wide)].map(|half| vcvtq_f32_s32(vmovl_s16(half)))
    }
}

#[inline(always)]
unsafe fn product(a: PerRow, b: PerRow) -> PerRow {
    // SAFETY: callers have NEON.
    unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
}

/// Four nibble lines as eight lines of codes; `at` is the half's part of the first.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> [[uint8x16_t; 2]; 8] {
    // SAFETY: callers point into four lines of 64 readable bytes.
    unsafe {
        let mut lines = [[vdupq_n_u8(0); 2]; 8];
        for i in 0..4 {
            let line = load(at.add(64 * i));
            lines[i] = line.map(|bytes| vandq_u8(bytes, vdupq_n_u8(15)));
            lines[i + 4] = line.map(|bytes| vshrq_n_u8::<4>(bytes));
        }
        lines
    }
}

/// Lines of codes less `OFFSET`.
#[inline(always)]
unsafe fn less<const OFFSET: i8>(lines: [[uint8x16_t; 2]; 8]) -> [Line; 8] {
    // SAFETY: callers have NEON.
    unsafe {
        let offset = vdupq_n_s8(OFFSET);
        lines.map(|line| line.map(|codes| vsubq_s8(vreinterpretq_s8_u8(codes), offset)))
    }
}

/// Eight lines of value + 128 as values.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> [Line; 8] {
    // SAFETY: callers point into eight lines of 64 readable bytes.
    unsafe {
        let excess = vdupq_n_u8(0x80);
        let mut lines = [[vdupq_n_s8(0); 2]; 8];
        for (i, line) in lines.iter_mut().enumerate() {
            *line = load(at.add(64 * i)).map(|bytes| vreinterpretq_s8_u8(veorq_u8(bytes, excess)));
        }
        lines
    }
}

/// Adds the bits of `bits` from `first` on to the codes of `line`, at the places of `mask`, which
/// begin at 4.
#[inline(always)]
unsafe fn with_top_bits(line: &mut [uint8x16_t; 2], bits: [uint8x16_t; 2], first: i8, mask: u8) {
    // SAFETY: callers have NEON.
    unsafe {
        for (codes, bits) in line.iter_mut().zip(bits) {
            let moved = vshlq_u8(bits, vdupq_n_s8(4 - first));
            *codes = vorrq_u8(*codes, vandq_u8(moved, vdupq_n_u8(mask)));
        }
    }
}

/// Adds the fifth bits of eight lines of codes; `at` is the half's part of their line.
#[inline(always)]
unsafe fn add_fifth_bits(lines: &mut [[uint8x16_t; 2]; 8], at: *const u8) {
    // SAFETY: callers point at 32 readable bytes.
    unsafe {
        let bits = load(at);
        for (i, line) in lines.iter_mut().enumerate() {
            with_top_bits(line, bits, i as i8, 0x10);
        }
    }
}

/// Scales, and minima with the sign inverted: these are added, those of K-quants are subtracted.
#[inline(always)]
unsafe fn scale_and_min(group: *const u8, half: usize) -> (PerRow, PerRow) {
    // SAFETY: callers point at a group that begins with sixteen scales and sixteen minima.
    unsafe {
        let minimum = halves(group.add(32 + 16 * half));
        let minimum = minimum.map(|min| vnegq_f32(min));
        (halves(group.add(16 * half)), minimum)
    }
}

/// Scale and minimum of block `j` of a Q4K or Q5K group.
#[inline(always)]
unsafe fn six_bits(group: *const u8, half: usize, j: usize) -> (PerRow, PerRow) {
    // SAFETY: callers point at a whole group; its twelve scale bytes of sixteen rows begin at 64.
    unsafe {
        let byte = |i: usize| vld1_u8(group.add(64 + 16 * i + 8 * half));
        let (scale, min) = if j < 4 {
            let six = vdup_n_u8(63);
            (vand_u8(byte(j), six), vand_u8(byte(j + 4), six))
        } else {
            let top = |i| vshl_n_u8::<4>(vshr_n_u8::<6>(byte(i)));
            let both = byte(j + 4);
            (
                vorr_u8(vand_u8(both, vdup_n_u8(15)), top(j - 4)),
                vorr_u8(vshr_n_u8::<4>(both), top(j)),
            )
        };
        let [d, dmin] = [0, 32].map(|from| halves(group.add(from + 16 * half)));
        (product(d, unsigned(scale)), product(dmin, unsigned(min)))
    }
}

pub(super) struct SignedQ4K;

impl UnpackSigned for SignedQ4K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2304;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock {
        // SAFETY: the caller's; nibble lines begin at 256.
        unsafe {
            let (scale, extra) = six_bits(group, half, j);
            SignedBlock {
                lines: less::<0>(nibbles(group.add(256 + 256 * j + 32 * half))),
                scale,
                extra,
            }
        }
    }
}

pub(super) struct SignedQ5K;

impl UnpackSigned for SignedQ5K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2816;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock {
        // SAFETY: the caller's; nibble lines begin at 256, fifth bits at 2304.
        unsafe {
            let (scale, extra) = six_bits(group, half, j);
            let mut lines = nibbles(group.add(256 + 256 * j + 32 * half));
            add_fifth_bits(&mut lines, group.add(2304 + 64 * j + 32 * half));
            SignedBlock {
                lines: less::<0>(lines),
                scale,
                extra,
            }
        }
    }
}

pub(super) struct SignedQ6K;

impl UnpackSigned for SignedQ6K {
    const BLOCKS: usize = 8;
    const BYTES: usize = 3392;
    const TWO_SCALES: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock {
        // SAFETY: the caller's; scales begin at 64, nibble lines at 320, bit pairs at 2368.
        unsafe {
            let d = halves(group.add(16 * half));
            let [scale, extra] = [0, 1].map(|part| {
                let at = group.add(64 + 32 * j + 16 * part + 8 * half);
                product(d, signed(vld1_s8(at.cast())))
            });
            let mut lines = nibbles(group.add(320 + 256 * j + 32 * half));
            for (part, lines) in lines.chunks_exact_mut(4).enumerate() {
                let bits = load(group.add(2368 + 128 * j + 64 * part + 32 * half));
                for (i, line) in lines.iter_mut().enumerate() {
                    with_top_bits(line, bits, 2 * i as i8, 0x30);
                }
            }
            SignedBlock {
                lines: less::<32>(lines),
                scale,
                extra,
            }
        }
    }
}

pub(super) struct SignedQ4;

impl UnpackSigned for SignedQ4 {
    const BLOCKS: usize = 2;
    const BYTES: usize = 576;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock {
        // SAFETY: the caller's; scales begin at 0, nibble lines at 64.
        unsafe {
            let scale = halves(group.add(32 * j + 16 * half));
            SignedBlock {
                lines: less::<8>(nibbles(group.add(64 + 256 * j + 32 * half))),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct SignedS8;

impl UnpackSigned for SignedS8 {
    const BLOCKS: usize = 2;
    const BYTES: usize = 1088;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock {
        // SAFETY: the caller's; scales begin at 0, lines at 64.
        unsafe {
            let scale = halves(group.add(32 * j + 16 * half));
            SignedBlock {
                lines: bytes(group.add(64 + 512 * j + 32 * half)),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct SignedS8W;

impl UnpackSigned for SignedS8W {
    const BLOCKS: usize = 1;
    const BYTES: usize = 576;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> SignedBlock {
        // SAFETY: the caller's; scales begin at 0, lines at 64.
        unsafe {
            let scale = words(group.add(32 * half));
            SignedBlock {
                lines: bytes(group.add(64 + 32 * half)),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct SignedS8H;

impl UnpackSigned for SignedS8H {
    const BLOCKS: usize = 1;
    const BYTES: usize = 640;
    const TWO_SCALES: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> SignedBlock {
        // SAFETY: the caller's; scales of the two halves of a row begin at 0 and 64, lines at 128.
        unsafe {
            SignedBlock {
                lines: bytes(group.add(128 + 32 * half)),
                scale: words(group.add(32 * half)),
                extra: words(group.add(64 + 32 * half)),
            }
        }
    }
}

pub(super) struct SignedQ4M;

impl UnpackSigned for SignedQ4M {
    const BLOCKS: usize = 1;
    const BYTES: usize = 320;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> SignedBlock {
        // SAFETY: the caller's; nibble lines begin at 64.
        unsafe {
            let (scale, extra) = scale_and_min(group, half);
            SignedBlock {
                lines: less::<0>(nibbles(group.add(64 + 32 * half))),
                scale,
                extra,
            }
        }
    }
}

pub(super) struct SignedQ5;

impl UnpackSigned for SignedQ5 {
    const BLOCKS: usize = 2;
    const BYTES: usize = 704;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, j: usize) -> SignedBlock {
        // SAFETY: the caller's; scales begin at 0, nibble lines at 64, fifth bits at 576.
        unsafe {
            let scale = halves(group.add(32 * j + 16 * half));
            let mut lines = nibbles(group.add(64 + 256 * j + 32 * half));
            add_fifth_bits(&mut lines, group.add(576 + 64 * j + 32 * half));
            SignedBlock {
                lines: less::<16>(lines),
                scale,
                extra: scale,
            }
        }
    }
}

pub(super) struct SignedQ5M;

impl UnpackSigned for SignedQ5M {
    const BLOCKS: usize = 1;
    const BYTES: usize = 384;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn block(group: *const u8, half: usize, _: usize) -> SignedBlock {
        // SAFETY: the caller's; nibble lines begin at 64, fifth bits at 320.
        unsafe {
            let (scale, extra) = scale_and_min(group, half);
            let mut lines = nibbles(group.add(64 + 32 * half));
            add_fifth_bits(&mut lines, group.add(320 + 32 * half));
            SignedBlock {
                lines: less::<0>(lines),
                scale,
                extra,
            }
        }
    }
}
