//! TQ3_0: 3.5 bits a value, for cached keys and values only.
//!
//! ```text
//! 14 bytes for 32 values: norm f16 @0, low two bits of codes [8] @2, high bits of codes [4] @10
//! ```
//! Code `j`: its low bits are bits `2 (j % 4)..` of byte `2 + j / 4`, its high bit is bit `j % 8`
//! of byte `10 + j / 8`. Four blocks are a group of 128 values that were rotated
//! ([`super::hadamard`]) together and have the same norm. A value is `norm * LEVELS[code]`, **still
//! rotated**.
//!
//! The levels are the best eight for a coordinate of a unit vector of 128 dimensions in a random
//! direction.

use half::f16;

use super::hadamard::{GROUP, rotate};

/// Bytes of a block of 32 values.
pub const BLOCK_BYTES: usize = 14;
/// Bytes of a group of 128 values.
pub const GROUP_BYTES: usize = 4 * BLOCK_BYTES;

/// Levels by code.
pub const LEVELS: [f32; 8] = [
    -0.190685, -0.117832, -0.065717, -0.021460, 0.021460, 0.065717, 0.117832, 0.190685,
];
/// A value below `THRESHOLDS[k]`, and below no earlier one, has code `k`.
const THRESHOLDS: [f32; 7] = [
    -0.154259, -0.091775, -0.043589, 0.0, 0.043589, 0.091775, 0.154259,
];
/// A group no longer than this is all zeros.
const MIN_NORM: f32 = 1e-10;

/// Stores values that are not rotated yet, `[n]`, `n` a multiple of 128, in 14 bytes for each 32.
///
/// # Panics
/// When the lengths do not go together.
pub fn quantize(values: &[f32], bytes: &mut [u8]) {
    assert_eq!(bytes.len() * GROUP, values.len() * GROUP_BYTES);
    let (values, rest) = values.as_chunks::<GROUP>();
    let (groups, _) = bytes.as_chunks_mut::<GROUP_BYTES>();
    assert!(rest.is_empty(), "whole groups of {GROUP} values");
    for (values, group) in values.iter().zip(groups) {
        quantize_group(values, group);
    }
}

fn quantize_group(values: &[f32; GROUP], group: &mut [u8; GROUP_BYTES]) {
    let length = values.iter().map(|v| v * v).sum::<f32>().sqrt();
    let inverse = if length > MIN_NORM { 1.0 / length } else { 0.0 };
    let mut unit = values.map(|v| v * inverse);
    rotate(&mut unit);
    let codes = unit.map(|y| THRESHOLDS.iter().filter(|middle| y >= **middle).count() as u8);
    // What the levels lost or added in length is put right by the norm.
    let kept = codes
        .iter()
        .map(|code| LEVELS[usize::from(*code)])
        .map(|c| c * c)
        .sum::<f32>()
        .sqrt();
    let norm = f16::from_f32(length / kept).to_le_bytes();
    let (blocks, _) = group.as_chunks_mut::<BLOCK_BYTES>();
    for (block, codes) in blocks.iter_mut().zip(codes.chunks_exact(32)) {
        block.fill(0);
        block[..2].copy_from_slice(&norm);
        for (j, code) in codes.iter().enumerate() {
            block[2 + j / 4] |= (code & 3) << (2 * (j % 4));
            block[10 + j / 8] |= (code >> 2) << (j % 8);
        }
    }
}

/// Reads values, still rotated, `[n]`, `n` a multiple of 32.
///
/// # Panics
/// When the lengths do not go together.
pub fn dequantize(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len() * 32, values.len() * BLOCK_BYTES);
    let (blocks, _) = bytes.as_chunks::<BLOCK_BYTES>();
    for (values, block) in values.chunks_exact_mut(32).zip(blocks) {
        let norm = f16::from_le_bytes([block[0], block[1]]).to_f32();
        let levels = LEVELS.map(|level| norm * level);
        for (j, value) in values.iter_mut().enumerate() {
            let low = block[2 + j / 4] >> (2 * (j % 4)) & 3;
            let high = block[10 + j / 8] >> (j % 8) & 1;
            *value = levels[usize::from(low | high << 2)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::hadamard::rotate_inverse;

    #[test]
    fn thresholds_lie_between_levels_and_ties_go_up() {
        for (i, middle) in THRESHOLDS.iter().enumerate() {
            let between = (LEVELS[i] + LEVELS[i + 1]) / 2.0;
            assert!((between - middle).abs() < 1e-6, "{i}");
        }
        // The inverse rotation of a unit vector is rotated back to that vector.
        let mut x = [0.0; GROUP];
        x[5] = 1.0;
        rotate_inverse(&mut x);
        let mut bytes = [0; GROUP_BYTES];
        quantize(&x, &mut bytes);
        let mut back = [0.0; GROUP];
        dequantize(&bytes, &mut back);
        // Zeros up to rounding take one of the two innermost levels, the one outstanding value the
        // last.
        let norm = back[5] / LEVELS[7];
        assert!(
            back.iter()
                .enumerate()
                .all(|(i, v)| i == 5 || (v.abs() / norm - LEVELS[4]).abs() < 1e-6)
        );
    }

    /// The layout, bit by bit, from codes chosen by hand.
    #[test]
    fn code_layout_matches_the_format() {
        let mut block = [0_u8; BLOCK_BYTES];
        block[..2].copy_from_slice(&f16::from_f32(2.0).to_le_bytes());
        // Value 0 has code 1, value 6 code 6, value 31 code 7.
        block[2] = 0b01;
        block[2 + 1] = 0b10 << 4;
        block[10] = 1 << 6;
        block[2 + 7] = 0b11 << 6;
        block[10 + 3] = 1 << 7;
        let mut values = [0.0; 32];
        dequantize(&block, &mut values);
        for (i, value) in values.iter().enumerate() {
            let code = match i {
                0 => 1,
                6 => 6,
                31 => 7,
                _ => 0,
            };
            assert_eq!(*value, 2.0 * LEVELS[code], "{i}");
        }
    }

    #[test]
    fn zeros_stay_zero_and_norms_are_kept() {
        let mut bytes = [9; GROUP_BYTES];
        let mut back = [1.0; GROUP];
        quantize(&[0.0; GROUP], &mut bytes);
        dequantize(&bytes, &mut back);
        assert_eq!(back, [0.0; GROUP]);
        let x: [f32; GROUP] = std::array::from_fn(|i| ((i * 29 + 3) % 83) as f32 - 41.0);
        quantize(&x, &mut bytes);
        dequantize(&bytes, &mut back);
        let length = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>().sqrt();
        assert!((length(&back) / length(&x) - 1.0).abs() < 1e-3);
        assert!(
            bytes
                .chunks_exact(BLOCK_BYTES)
                .all(|block| block[..2] == bytes[..2])
        );
    }
}
