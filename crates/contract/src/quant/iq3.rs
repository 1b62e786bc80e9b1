//! IQ3_XXS and IQ3_S: four values are a point of a set, a sign each, and a 4-bit scale for 32.
//!
//! ```text
//! IQ3_XXS  98 bytes  d f16 @0, points [64] @2, eight u32 @66: four times seven sign bits, and the
//!                    scale in the top four bits
//!          value = (d / 2 * (2 s + 1)) * (2, 6, 10, 14, 18, 22, 26 or 31)
//! IQ3_S   110 bytes  d f16 @0, points [64] @2, ninth bits of points [8] @66, signs [32] @74,
//!                    scales [4] @106, low nibble first
//!          value = (d * (2 s + 1)) * (1, 3 .. 15)
//! ```
//!
//! Seven sign bits stand for eight signs whose product is plus.

use super::blocks::{half_at, u32_at};
use super::grid::{self, even_signs, signed};
use super::point_block::PointBlock;
use super::signed_run::SignedRun;

/// Magnitudes of the eight levels of IQ3_XXS, in halves of what the format's own table holds.
pub(super) const XXS_LEVELS: [u8; 8] = [2, 6, 10, 14, 18, 22, 26, 31];

pub(super) fn run_xxs(b: &[u8], index: usize) -> SignedRun {
    let word = u32_at(b, 66 + 4 * index);
    SignedRun {
        codes: std::array::from_fn(|i| {
            let point = &grid::IQ3_XXS[usize::from(b[2 + 8 * index + i / 4])];
            let signs = even_signs((word >> (7 * (i / 8))) as u8);
            signed(XXS_LEVELS[usize::from(point[i % 4])], signs, i % 8)
        }),
        unit: half_at(b, 0) * 0.5,
        factors: [f32::from(2 * (word >> 28) as u8 + 1); 2],
    }
}

pub(super) fn run_s(b: &[u8], index: usize) -> SignedRun {
    let ninth = usize::from(b[66 + index]);
    let scale = b[106 + index / 2] >> (4 * (index % 2)) & 15;
    SignedRun {
        codes: std::array::from_fn(|i| {
            let low = usize::from(b[2 + 8 * index + i / 4]);
            let point = &grid::IQ3_S[low | (ninth >> (i / 4) & 1) << 8];
            signed(2 * point[i % 4] + 1, b[74 + 4 * index + i / 8], i % 8)
        }),
        unit: half_at(b, 0),
        factors: [f32::from(2 * scale + 1); 2],
    }
}

pub(super) fn write_xxs(block: &PointBlock, b: &mut [u8]) {
    b[..2].copy_from_slice(&block.d.to_le_bytes());
    let (points, words) = b[2..].split_at_mut(64);
    for (byte, point) in points.iter_mut().zip(block.points) {
        *byte = point as u8;
    }
    for (index, word) in words.chunks_exact_mut(4).enumerate() {
        let mut bits = u32::from(block.scales[2 * index]) << 28;
        for l in 0..4 {
            bits |= u32::from(block.signs[4 * index + l] & 127) << (7 * l);
        }
        word.copy_from_slice(&bits.to_le_bytes());
    }
}

pub(super) fn write_s(block: &PointBlock, b: &mut [u8]) {
    b[..2].copy_from_slice(&block.d.to_le_bytes());
    for (i, point) in block.points.into_iter().enumerate() {
        b[2 + i] = point as u8;
        b[66 + i / 8] |= ((point >> 8) as u8) << (i % 8);
    }
    b[74..106].copy_from_slice(&block.signs);
    for (byte, scales) in b[106..].iter_mut().zip(block.scales.chunks_exact(4)) {
        *byte = scales[0] | scales[2] << 4;
    }
}
