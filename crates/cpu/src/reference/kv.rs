//! Cached rows: one key or value head, `head_dim` values, in its storage format.

use half::f16;

/// Values of a Q8_0 block, and its bytes: a half scale, then signed bytes.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 34;

/// Reads an f16 row, `[n]` from `2 n` bytes.
pub fn decode_f16(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * values.len());
    for (value, half) in values.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = f16::from_le_bytes([half[0], half[1]]).to_f32();
    }
}

/// Reads a Q8_0 row, `[n]`, `n` a multiple of 32.
pub fn decode_q8_0(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), values.len() / BLOCK * BLOCK_BYTES);
    let blocks = bytes.chunks_exact(BLOCK_BYTES);
    for (values, block) in values.chunks_exact_mut(BLOCK).zip(blocks) {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        for (value, &q) in values.iter_mut().zip(&block[2..]) {
            *value = scale * f32::from(q as i8);
        }
    }
}

/// `sum x * row`, the row in f16, `x` `[n]`.
pub fn dot_f16(x: &[f32], bytes: &[u8]) -> f32 {
    assert_eq!(bytes.len(), 2 * x.len());
    x.iter()
        .zip(bytes.chunks_exact(2))
        .map(|(x, half)| x * f16::from_le_bytes([half[0], half[1]]).to_f32())
        .sum()
}

/// `sum x * row`, the row in Q8_0, `x` `[n]`: each block is summed and then scaled.
pub fn dot_q8_0(x: &[f32], bytes: &[u8]) -> f32 {
    assert_eq!(bytes.len(), x.len() / BLOCK * BLOCK_BYTES);
    let mut sum = 0.0;
    for (x, block) in x.chunks_exact(BLOCK).zip(bytes.chunks_exact(BLOCK_BYTES)) {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        let products = x.iter().zip(&block[2..]).map(|(x, &q)| x * f32::from(q as i8));
        sum += scale * products.sum::<f32>();
    }
    sum
}

/// `out += weight * row`, the row in f16, `out` `[n]`.
pub fn axpy_f16(weight: f32, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len());
    for (o, half) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o += weight * f16::from_le_bytes([half[0], half[1]]).to_f32();
    }
}

/// `out += weight * row`, the row in Q8_0, `out` `[n]`.
pub fn axpy_q8_0(weight: f32, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() / BLOCK * BLOCK_BYTES);
    for (out, block) in out.chunks_exact_mut(BLOCK).zip(bytes.chunks_exact(BLOCK_BYTES)) {
        let weight = weight * f16::from_le_bytes([block[0], block[1]]).to_f32();
        for (o, &q) in out.iter_mut().zip(&block[2..]) {
            *o += weight * f32::from(q as i8);
        }
    }
}
