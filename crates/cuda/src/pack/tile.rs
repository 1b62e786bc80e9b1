//! One row of one tile, for each weight kind.

use contract::QuantType;
use contract::quant::{scale_and_min, six_bits};
use half::{bf16, f16};

use super::codes;
use super::exponent::power;
use super::kind::WeightKind;

/// A row of a tile: its index below 16, and its power-of-two exponent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) index: usize,
    pub(super) exponent: i32,
}

/// Writes a row of K-slice `slice` of a unit, from the unit's stored bytes (fewer at the end of a
/// row). The tile must be zeroed.
pub(super) fn write_row(ty: QuantType, slice: usize, row: Row, stored: &[u8], tile: &mut [u8]) {
    let blocks = stored.chunks_exact(ty.block_bytes());
    match ty {
        QuantType::Q4_K => {
            for block in blocks {
                write_nibbles(row, &block[16 + 64 * slice..][..64], 2, tile);
                write_header(row, slice, (1024, 22), &block[..16], tile);
            }
        }
        QuantType::Q5_K => {
            for block in blocks {
                write_five_bit(row, slice, block, tile);
                write_header(row, slice, (1280, 23), &block[..16], tile);
            }
        }
        QuantType::Q6_K => {
            for block in blocks {
                let six = codes::six_bits(block, slice);
                let scales = std::array::from_fn(|j| block[192 + 8 * slice + j].cast_signed());
                write_six_bit(row, slice, &six, &scales, half_at(block, 208), tile);
            }
        }
        QuantType::Q3_K
        | QuantType::IQ3_XXS
        | QuantType::IQ3_S
        | QuantType::IQ1_S
        | QuantType::IQ1_M => {
            for six in blocks.filter_map(|block| six_bits(ty, block)) {
                let codes = &six.codes[128 * slice..][..128];
                let scales = std::array::from_fn(|j| six.scales[8 * slice + j]);
                write_six_bit(row, slice, codes, &scales, six.d, tile);
            }
        }
        QuantType::Q8_0
        | QuantType::Q4_0
        | QuantType::Q5_0
        | QuantType::IQ4_NL
        | QuantType::MXFP4 => {
            for (run, block) in blocks.enumerate() {
                write_signed(row, run, codes::signed_32(ty, block, 0), tile);
            }
        }
        QuantType::Q4_1 | QuantType::Q5_1 => {
            for (run, block) in blocks.enumerate() {
                write_affine(row, run, &codes::affine(ty, block, 0), tile);
            }
        }
        QuantType::NVFP4 => {
            for block in blocks {
                for run in 0..2 {
                    write_affine(row, run, &codes::affine(ty, block, run), tile);
                }
            }
        }
        QuantType::Q2_K
        | QuantType::IQ4_XS
        | QuantType::IQ2_XXS
        | QuantType::IQ2_XS
        | QuantType::IQ2_S
        | QuantType::TQ1_0
        | QuantType::TQ2_0 => unreachable!("their units are a part of a block"),
        QuantType::F16 | QuantType::BF16 => {
            for (k, bytes) in stored.chunks_exact(2).enumerate() {
                let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
                let (lane, j) = lane_word(row, k % 16 / 2 * 2);
                let at = k / 16 * 512 + lane * 16 + j * 4 + k % 2 * 2;
                let half = match ty {
                    QuantType::F16 => bits,
                    _ => scaled_half(bf16::from_bits(bits).to_f32() * power(row.exponent)),
                };
                tile[at..at + 2].copy_from_slice(&half.to_le_bytes());
            }
        }
        QuantType::F32 => unreachable!("F32 is plain"),
    }
}

/// Writes quarter `quarter` (64 values) of a 256-value block of a format without its own kind.
pub(super) fn write_quarter(
    ty: QuantType,
    quarter: usize,
    row: Row,
    stored: &[u8],
    tile: &mut [u8],
) {
    for block in stored.chunks_exact(ty.block_bytes()) {
        for run in 0..2 {
            let of_block = 2 * quarter + run;
            if WeightKind::of(ty) == WeightKind::Q8 {
                write_signed(row, run, codes::signed_32(ty, block, of_block), tile);
            } else {
                write_affine(row, run, &codes::affine(ty, block, of_block), tile);
            }
        }
    }
}

/// Position of value `k` (0..16, even) and its neighbour: `(lane, word of the lane's 16 bytes)`.
fn lane_word(row: Row, k: usize) -> (usize, usize) {
    (row.index % 8 * 4 + k % 8 / 2, row.index / 8 + 2 * (k / 8))
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn scaled_half(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

fn write_half(tile: &mut [u8], at: usize, value: f32) {
    tile[at..at + 2].copy_from_slice(&scaled_half(value).to_le_bytes());
}

fn write_word(tile: &mut [u8], at: usize, bits: u32) {
    tile[at..at + 4].copy_from_slice(&bits.to_le_bytes());
}

fn or_word(tile: &mut [u8], at: usize, bits: u32) {
    for (byte, more) in tile[at..at + 4].iter_mut().zip(bits.to_le_bytes()) {
        *byte |= more;
    }
}

/// Bytes `at`, `at + 16`, `at + 1`, `at + 17` of 32: the register of both MMA steps, before
/// rotation.
fn four(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 16], bytes[at + 1], bytes[at + 17]])
}

/// Writes 64 bytes of nibbles, 32 bytes per 64 values. Low nibbles hold one run of 32 values, high
/// nibbles the next. `rotation` is the bit of the lowest nibble.
fn write_nibbles(row: Row, nibbles: &[u8], rotation: u32, tile: &mut [u8]) {
    for (q, pair) in nibbles.chunks_exact(32).enumerate() {
        for k in (0..16).step_by(2) {
            let (lane, j) = lane_word(row, k);
            let bits = four(pair, k).rotate_left(rotation);
            write_word(tile, q * 512 + lane * 16 + j * 4, bits);
        }
    }
}

/// Writes scales and minimums of a K-quant block to the first slice, from `at`. The factor is
/// scaled by `2^log2_scale`.
fn write_header(
    row: Row,
    slice: usize,
    (at, log2_scale): (usize, i32),
    stored: &[u8],
    tile: &mut [u8],
) {
    if slice != 0 {
        return;
    }
    let to = &mut tile[at + row.index * 16..][..16];
    write_half(to, 0, half_at(stored, 0) * power(log2_scale + row.exponent));
    write_half(to, 2, half_at(stored, 2) * power(row.exponent));
    let packed = stored[4..16].as_array().expect("twelve bytes");
    let (mut c, mut m) = ([0; 8], [0; 8]);
    for run in 0..8 {
        (c[run], m[run]) = scale_and_min(packed, run);
    }
    for i in 0..4 {
        to[4 + i] = c[i] << 2 | m[4 + i] & 3;
        to[8 + i] = m[i] << 2 | m[4 + i] >> 2 & 3;
        to[12 + i] = c[4 + i] << 2 | m[4 + i] >> 4;
    }
}

/// Writes a slice's 128 codes of a Q5_K block.
fn write_five_bit(row: Row, slice: usize, block: &[u8], tile: &mut [u8]) {
    // Bit `s` of byte `l` belongs to value `l` of run `s` of the unit.
    let fifths = &block[16..48];
    let nibbles = &block[48 + 64 * slice..][..64];
    for (q, pair) in nibbles.chunks_exact(32).enumerate() {
        for k in (0..8).step_by(2) {
            // Codes of values `h = 0` and `h = 1`, one per 16-bit half.
            let codes = |s: usize, b: usize, upper: usize| {
                let low = four(pair, k + 8 * upper) >> (8 * s + 4 * b);
                let top = four(fifths, k + 8 * upper) >> (4 * slice + 2 * q + 8 * s + b);
                low & 0x000f_000f | (top & 0x0001_0001) << 4
            };
            let first = |upper| codes(0, 0, upper) << 1 | codes(0, 1, upper) << 6;
            let words = match row.index / 8 {
                0 => {
                    let of_all = codes(1, 1, 1).rotate_left(16);
                    let rest = |i: usize| of_all >> i & 0x0001_0001;
                    [
                        first(0) | codes(1, 0, 1) << 11 | rest(0),
                        codes(1, 0, 0) << 11 | rest(1),
                        first(1) | rest(2),
                        rest(3),
                        codes(1, 1, 0) << 11 | rest(4),
                    ]
                }
                _ => [
                    0,
                    first(0),
                    codes(1, 0, 0) << 11,
                    first(1) | codes(1, 1, 0) << 11,
                    codes(1, 0, 1) << 1 | codes(1, 1, 1) << 6,
                ],
            };
            let (lane, _) = lane_word(row, k);
            for (i, bits) in words[..4].iter().enumerate() {
                or_word(tile, q * 512 + lane * 16 + i * 4, *bits);
            }
            or_word(tile, 1024 + lane * 8 + q * 4, words[4]);
        }
    }
}

/// Writes a slice's 128 six-bit codes.
fn write_six_bit(row: Row, slice: usize, six: &[u8], scales: &[i8; 8], d: f32, tile: &mut [u8]) {
    let i = row.index / 8;
    for (q, six) in six.chunks_exact(64).enumerate() {
        for k in (0..8).step_by(2) {
            // Codes of values `h = 0` and `h = 1`, one per 16-bit half.
            let codes = |s: usize, b: usize, upper: usize| {
                let at = 32 * b + 16 * s + 8 * upper + k;
                u32::from(six[at]) | u32::from(six[at + 1]) << 16
            };
            let (lane, _) = lane_word(row, k);
            let mut put = |word: usize, bits: u32| {
                let at = match word {
                    0..4 => q * 512 + lane * 16 + word * 4,
                    _ => 1024 + lane * 16 + q * 8 + (word - 4) * 4,
                };
                or_word(tile, at, bits);
            };
            for upper in 0..2 {
                let j = i + 2 * upper;
                put(j, codes(0, 0, upper) << 1);
                match i {
                    0 => put(4 + upper, codes(0, 1, upper) << 1),
                    _ => put(upper, codes(0, 1, upper).rotate_left(11)),
                }
                put(2 + j, codes(1, 0, upper).rotate_left(11));
                let last = codes(1, 1, upper);
                put(j, (last & 0x000f_000f) << 7);
                put(4 + upper, (last >> 4 & 0x0003_0003) << (7 + 2 * i));
            }
        }
    }
    for (to, scale) in tile[1536 + row.index * 8..][..8].iter_mut().zip(scales) {
        *to = scale.cast_unsigned() ^ 0x80;
    }
    if slice == 0 {
        write_half(tile, 1664 + row.index * 2, d * power(23 + row.exponent));
    }
}

/// Writes 32 bytes of run `run` of 64 values.
fn write_bytes(row: Row, run: usize, bytes: &[u8; 32], tile: &mut [u8]) {
    for k in (0..16).step_by(2) {
        let (lane, j) = lane_word(row, k);
        let bits = four(bytes, k).rotate_left(2);
        write_word(tile, run * 512 + lane * 16 + j * 4, bits);
    }
}

/// Writes run `run` of 64 values: its codes plus 128 and its scale.
fn write_signed(row: Row, run: usize, (codes, scale): ([i8; 32], f32), tile: &mut [u8]) {
    write_bytes(row, run, &codes.map(|q| q.cast_unsigned() ^ 0x80), tile);
    let scale = scale * power(22 + row.exponent);
    write_half(tile, 1024 + row.index * 4 + run * 2, scale);
}

fn write_affine(row: Row, run: usize, affine: &codes::Affine, tile: &mut [u8]) {
    write_bytes(row, run, &affine.codes, tile);
    for half in 0..2 {
        let at = 1024 + row.index * 16 + (2 * run + half) * 4;
        let scale = f16::from_f32(affine.scale[half] * power(22 + row.exponent));
        write_half(tile, at, scale.to_f32());
        // The bias of the codes, in rounded scales.
        let bias = f32::from(affine.bias) * (scale.to_f32() * power(-22));
        write_half(
            tile,
            at + 2,
            affine.offset[half] * power(row.exponent) - bias,
        );
    }
}
