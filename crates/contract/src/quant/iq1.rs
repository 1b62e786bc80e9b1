//! IQ1_S and IQ1_M: eight values are a point of -1, 0 and 1, all moved up or down by an eighth.
//!
//! ```text
//! IQ1_S  50 bytes  d f16 @0, points [32] @2, u16 [8] @34: four times three high bits of points,
//!                  the scale of 32 values in bits 12..15, bit 15 set: moved down
//! IQ1_M  56 bytes  points [32] @0, [16] @32: a nibble for each point, three high bits and, if
//!                  set, moved down; u16 [4] @48: four 3-bit scales of 16 values each, and the
//!                  nibbles of the f16 d, lowest first, in the top four bits
//! value = (d / 8 * (2 s + 1)) * (8 g ± 1)
//! ```

use half::f16;

use super::blocks::half_at;
use super::grid;
use super::point_block::PointBlock;
use super::signed_run::SignedRun;

/// Codes of eight values of a point.
fn codes(point: usize, is_down: bool) -> [i8; 8] {
    let shift = if is_down { -1 } else { 1 };
    grid::IQ1[point].map(|level| 8 * (level.cast_signed() - 1) + shift)
}

fn run(d: f32, scales: [u8; 2], groups: [(usize, bool); 4]) -> SignedRun {
    let groups = groups.map(|(point, is_down)| codes(point, is_down));
    SignedRun {
        codes: std::array::from_fn(|i| groups[i / 8][i % 8]),
        unit: d * 0.125,
        factors: scales.map(|s| f32::from(2 * s + 1)),
    }
}

pub(super) fn run_s(b: &[u8], index: usize) -> SignedRun {
    let bits = u16::from_le_bytes([b[34 + 2 * index], b[35 + 2 * index]]);
    let group = |l: usize| {
        let high = usize::from(bits >> (3 * l) & 7);
        let point = usize::from(b[2 + 4 * index + l]) | high << 8;
        (point, bits >> 15 == 1)
    };
    let scale = (bits >> 12 & 7) as u8;
    run(half_at(b, 0), [scale; 2], std::array::from_fn(group))
}

pub(super) fn run_m(b: &[u8], index: usize) -> SignedRun {
    let words: [u16; 4] =
        std::array::from_fn(|i| u16::from_le_bytes([b[48 + 2 * i], b[49 + 2 * i]]));
    let d = (0..4).fold(0, |d, i| d | (words[i] >> 12) << (4 * i));
    let group = |l: usize| {
        let nibble = b[32 + 2 * index + l / 2] >> (4 * (l % 2)) & 15;
        let point = usize::from(b[4 * index + l]) | usize::from(nibble & 7) << 8;
        (point, nibble >> 3 == 1)
    };
    let scales = [0, 3].map(|shift| (words[index / 2] >> (6 * (index % 2) + shift) & 7) as u8);
    let d = f16::from_bits(d).to_f32();
    run(d, scales, std::array::from_fn(group))
}

pub(super) fn write_s(block: &PointBlock, b: &mut [u8]) {
    b[..2].copy_from_slice(&block.d.to_le_bytes());
    for index in 0..8 {
        let mut bits = u16::from(block.scales[2 * index]) << 12;
        bits |= u16::from(block.signs[4 * index] & 1) << 15;
        for l in 0..4 {
            let point = block.points[4 * index + l];
            b[2 + 4 * index + l] = point as u8;
            bits |= (point >> 8) << (3 * l);
        }
        b[34 + 2 * index..36 + 2 * index].copy_from_slice(&bits.to_le_bytes());
    }
}

pub(super) fn write_m(block: &PointBlock, b: &mut [u8]) {
    for group in 0..32 {
        let point = block.points[group];
        b[group] = point as u8;
        let nibble = (point >> 8) as u8 | (block.signs[group] & 1) << 3;
        b[32 + group / 2] |= nibble << (4 * (group % 2));
    }
    for (i, word) in b[48..].chunks_exact_mut(2).enumerate() {
        let mut bits = (block.d.to_bits() >> (4 * i)) << 12;
        for (j, scale) in block.scales[4 * i..4 * i + 4].iter().enumerate() {
            bits |= u16::from(*scale) << (3 * j);
        }
        word.copy_from_slice(&bits.to_le_bytes());
    }
}
