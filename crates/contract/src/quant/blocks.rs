//! Walking rows block by block, and the half-precision fields inside blocks.

use half::f16;

/// Calls `read` for each block of `BYTES` bytes and its `VALUES` values.
///
/// Whole blocks only; [`super::dequantize_row`] has checked that nothing is left over.
pub(super) fn map_blocks<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    read: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let (values, _) = out.as_chunks_mut::<VALUES>();
    for (block, values) in blocks.iter().zip(values) {
        read(block, values);
    }
}

/// Calls `write` for each group of `VALUES` values and its block of `BYTES` bytes.
pub(super) fn map_values<const VALUES: usize, const BYTES: usize>(
    values: &[f32],
    out: &mut [u8],
    write: impl Fn(&[f32; VALUES], &mut [u8; BYTES]),
) {
    let (values, _) = values.as_chunks::<VALUES>();
    let (blocks, _) = out.as_chunks_mut::<BYTES>();
    for (values, block) in values.iter().zip(blocks) {
        write(values, block);
    }
}

/// The half at byte `at` of a block, widened.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The four bytes at byte `at` of a block.
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Stores `value` as a half at byte `at` and returns the value after rounding.
pub(super) fn put_half<const BYTES: usize>(block: &mut [u8; BYTES], at: usize, value: f32) -> f32 {
    let half = f16::from_f32(value);
    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// `1 / v`, or 0 for 0.
pub(super) fn inverse(v: f32) -> f32 {
    if v == 0.0 { 0.0 } else { 1.0 / v }
}

/// The value of largest magnitude, sign kept, the first among equals; 0 when all are 0.
pub(super) fn peak(values: &[f32]) -> f32 {
    let mut magnitude = 0.0;
    let mut peak = 0.0;
    for &v in values {
        if v.abs() > magnitude {
            magnitude = v.abs();
            peak = v;
        }
    }
    peak
}
