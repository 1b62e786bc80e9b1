//! IQ2_XXS, IQ2_XS and IQ2_S: eight values are a point of a set, a sign each, and a 4-bit scale.
//!
//! ```text
//! IQ2_XXS  66 bytes  d f16 @0, eight runs of 8 bytes @2: points [4], then a u32 of four times
//!                    seven sign bits and the scale in its top four bits
//! IQ2_XS   74 bytes  d f16 @0, u16 [32] @2: point in the low 9 bits, seven sign bits;
//!                    scales [8] @66
//! IQ2_S    82 bytes  d f16 @0, points [32] @2, signs [32] @34, high pairs of points [8] @66,
//!                    scales [8] @74
//! value = (d / 8 * (2 s + 1)) * (8, 25 or 43), scale s of 32 values (IQ2_XXS) or 16 (low nibble
//! first)
//! ```
//!
//! Seven sign bits stand for eight signs whose product is plus.

use super::blocks::{half_at, u32_at};
use super::grid::{self, even_signs, signed};
use super::point_block::PointBlock;
use super::signed_run::SignedRun;

/// Magnitudes of the three levels.
pub(super) const LEVELS: [u8; 3] = [8, 25, 43];

/// A run from the points and signs of four groups of eight.
fn run(d: f32, scales: [u8; 2], groups: [(&[u8; 8], u8); 4]) -> SignedRun {
    SignedRun {
        codes: std::array::from_fn(|i| {
            let (point, signs) = groups[i / 8];
            signed(LEVELS[usize::from(point[i % 8])], signs, i % 8)
        }),
        unit: d * 0.125,
        factors: scales.map(|s| f32::from(2 * s + 1)),
    }
}

pub(super) fn run_xxs(b: &[u8], index: usize) -> SignedRun {
    let at = 2 + 8 * index;
    let word = u32_at(b, at + 4);
    let group = |l: usize| {
        let point = &grid::IQ2_XXS[usize::from(b[at + l])];
        (point, even_signs((word >> (7 * l)) as u8))
    };
    let scale = (word >> 28) as u8;
    run(half_at(b, 0), [scale; 2], std::array::from_fn(group))
}

pub(super) fn run_xs(b: &[u8], index: usize) -> SignedRun {
    let group = |l: usize| {
        let at = 2 + 8 * index + 2 * l;
        let bits = u16::from_le_bytes([b[at], b[at + 1]]);
        let point = &grid::IQ2_XS[usize::from(bits & 511)];
        (point, even_signs((bits >> 9) as u8))
    };
    let scales = [b[66 + index] & 15, b[66 + index] >> 4];
    run(half_at(b, 0), scales, std::array::from_fn(group))
}

pub(super) fn run_s(b: &[u8], index: usize) -> SignedRun {
    let high = usize::from(b[66 + index]);
    let group = |l: usize| {
        let at = 4 * index + l;
        let point = usize::from(b[2 + at]) | (high >> (2 * l) & 3) << 8;
        (&grid::IQ2_S[point], b[34 + at])
    };
    let scales = [b[74 + index] & 15, b[74 + index] >> 4];
    run(half_at(b, 0), scales, std::array::from_fn(group))
}

pub(super) fn write_xxs(block: &PointBlock, b: &mut [u8]) {
    b[..2].copy_from_slice(&block.d.to_le_bytes());
    for (index, run) in b[2..].chunks_exact_mut(8).enumerate() {
        let (points, signs) = run.split_at_mut(4);
        let mut word = u32::from(block.scales[2 * index]) << 28;
        for (l, byte) in points.iter_mut().enumerate() {
            *byte = block.points[4 * index + l] as u8;
            word |= u32::from(block.signs[4 * index + l] & 127) << (7 * l);
        }
        signs.copy_from_slice(&word.to_le_bytes());
    }
}

pub(super) fn write_xs(block: &PointBlock, b: &mut [u8]) {
    b[..2].copy_from_slice(&block.d.to_le_bytes());
    for (group, b) in b[2..66].chunks_exact_mut(2).enumerate() {
        let signs = u16::from(block.signs[group] & 127);
        b.copy_from_slice(&(block.points[group] | signs << 9).to_le_bytes());
    }
    write_scales(block, &mut b[66..]);
}

pub(super) fn write_s(block: &PointBlock, b: &mut [u8]) {
    b[..2].copy_from_slice(&block.d.to_le_bytes());
    for group in 0..32 {
        let point = block.points[group];
        b[2 + group] = point as u8;
        b[34 + group] = block.signs[group];
        b[66 + group / 4] |= ((point >> 8) as u8) << (2 * (group % 4));
    }
    write_scales(block, &mut b[74..]);
}

fn write_scales(block: &PointBlock, b: &mut [u8]) {
    for (byte, pair) in b.iter_mut().zip(block.scales.chunks_exact(2)) {
        *byte = pair[0] | pair[1] << 4;
    }
}
