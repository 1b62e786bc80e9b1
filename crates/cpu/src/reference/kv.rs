//! Cached rows: one key or value head, `head_dim` values, in its storage format.

use contract::quant::{dequantize_row, quantize_row};
use contract::{KvFormat, QuantType};
use half::f16;

/// Values of a block of the quantised formats.
const BLOCK: usize = 32;
/// Bytes of a Q8_0 block: a half scale, then signed bytes.
const BLOCK_BYTES: usize = 34;
/// Bytes of a Q4_0 block: a half scale, then nibbles, value `j` low and `j + 16` high in byte `j`, biased by 8.
const NIBBLE_BYTES: usize = 18;

/// The formats this device stores; the others are refused when a plan is estimated.
pub fn block_type(format: KvFormat) -> Option<QuantType> {
    match format {
        KvFormat::F32 => Some(QuantType::F32),
        KvFormat::F16 => Some(QuantType::F16),
        KvFormat::Q8_0 => Some(QuantType::Q8_0),
        KvFormat::Q4_0 => Some(QuantType::Q4_0),
        _ => None,
    }
}

/// Stores a row `[n]` in [`QuantType::row_bytes`] bytes.
pub fn encode(ty: QuantType, values: &[f32], bytes: &mut [u8]) {
    quantize_row(ty, values, bytes);
}

/// Reads a stored row back, `[n]`.
pub fn decode(ty: QuantType, bytes: &[u8], values: &mut [f32]) {
    dequantize_row(ty, bytes, values);
}

/// Reads an f32 row, `[n]` from `4 n` bytes.
pub fn decode_f32(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), 4 * values.len());
    for (value, b) in values.iter_mut().zip(bytes.chunks_exact(4)) {
        *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    }
}

/// `sum x * row`, the row in f32, `x` `[n]`.
pub fn dot_f32(x: &[f32], bytes: &[u8]) -> f32 {
    assert_eq!(bytes.len(), 4 * x.len());
    x.iter()
        .zip(bytes.chunks_exact(4))
        .map(|(x, b)| x * f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .sum()
}

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

/// Signed codes of the nibbles of a Q4_0 block, in the order of their values.
pub fn codes_q4_0(nibbles: &[u8; 16]) -> [i8; BLOCK] {
    let mut codes = [0; BLOCK];
    let (low, high) = codes.split_at_mut(BLOCK / 2);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(nibbles) {
        *low = (byte & 15).cast_signed() - 8;
        *high = (byte >> 4).cast_signed() - 8;
    }
    codes
}

/// Scale and codes of a Q4_0 block.
fn block_q4_0(block: &[u8; NIBBLE_BYTES]) -> (f32, [i8; BLOCK]) {
    let [low, high, nibbles @ ..] = block;
    (
        f16::from_le_bytes([*low, *high]).to_f32(),
        codes_q4_0(nibbles),
    )
}

/// Reads a Q4_0 row, `[n]`, `n` a multiple of 32.
pub fn decode_q4_0(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), values.len() / BLOCK * NIBBLE_BYTES);
    let (blocks, _) = bytes.as_chunks::<NIBBLE_BYTES>();
    for (values, block) in values.chunks_exact_mut(BLOCK).zip(blocks) {
        let (scale, codes) = block_q4_0(block);
        for (value, code) in values.iter_mut().zip(codes) {
            *value = scale * f32::from(code);
        }
    }
}

/// `sum x * row`, the row in Q4_0, `x` `[n]`: each block is summed and then scaled.
pub fn dot_q4_0(x: &[f32], bytes: &[u8]) -> f32 {
    assert_eq!(bytes.len(), x.len() / BLOCK * NIBBLE_BYTES);
    let (blocks, _) = bytes.as_chunks::<NIBBLE_BYTES>();
    let mut sum = 0.0;
    for (x, block) in x.chunks_exact(BLOCK).zip(blocks) {
        let (scale, codes) = block_q4_0(block);
        let products = x.iter().zip(codes).map(|(x, code)| x * f32::from(code));
        sum += scale * products.sum::<f32>();
    }
    sum
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
        let products = x
            .iter()
            .zip(&block[2..])
            .map(|(x, &q)| x * f32::from(q as i8));
        sum += scale * products.sum::<f32>();
    }
    sum
}
