//! Codecs of the KV cache: one key or value head of `head_dim` values in its storage format.

use contract::KvFormat;
use contract::quant::{dequantize_row, hadamard, quantize_row, tq3};
use half::f16;

/// Values of a block of the quantized formats.
const BLOCK: usize = 32;
/// Bytes of a Q8_0 block: an f16 scale, then signed bytes.
const BLOCK_BYTES: usize = 34;
/// Bytes of a Q4_0 block: an f16 scale, then 4-bit codes biased by 8; byte `j` holds value `j` low
/// and `j + 16` high.
const NIBBLE_BYTES: usize = 18;

/// Storage of one key or value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codec {
    format: KvFormat,
    rotated: bool,
}

impl Codec {
    /// Storage in `format`. With `rotate`, quantized formats hold rows rotated by
    /// [`hadamard::rotate`]. Float formats are never rotated; TQ3_0 always is.
    pub fn new(format: KvFormat, rotate: bool) -> Codec {
        let rotated = match format {
            KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 => false,
            KvFormat::Tq3_0 => true,
            _ => rotate,
        };
        Codec { format, rotated }
    }

    /// The format.
    pub fn format(self) -> KvFormat {
        self.format
    }

    /// Whether rows are stored Hadamard-rotated. Then the query is rotated too, and the weighted
    /// sum of values is rotated back.
    pub fn is_rotated(self) -> bool {
        self.rotated
    }

    /// Bytes of a row of `n` values.
    pub fn row_bytes(self, n: usize) -> usize {
        self.format.bytes(n)
    }
}

/// Encodes a head `[n]` into [`Codec::row_bytes`] bytes.
pub fn encode(codec: Codec, values: &[f32], bytes: &mut [u8]) {
    let Some(ty) = codec.format.block_type() else {
        return tq3::quantize(values, bytes);
    };
    if !codec.rotated {
        return quantize_row(ty, values, bytes);
    }
    let size = hadamard::group(values.len());
    let mut group = [0.0; hadamard::GROUP];
    let groups = bytes.chunks_exact_mut(codec.row_bytes(size));
    for (values, bytes) in values.chunks_exact(size).zip(groups) {
        let group = &mut group[..size];
        group.copy_from_slice(values);
        hadamard::rotate(group);
        quantize_row(ty, group, bytes);
    }
}

/// Decodes a head in its stored basis (still rotated if it was rotated).
pub fn decode(format: KvFormat, bytes: &[u8], values: &mut [f32]) {
    match format.block_type() {
        Some(ty) => dequantize_row(ty, bytes, values),
        None => tq3::dequantize(bytes, values),
    }
}

/// `sum x * row` with the row of [`decode`], `x` `[n]`.
pub fn dot(format: KvFormat, x: &[f32], bytes: &[u8]) -> f32 {
    let mut piece = [0.0; 128];
    let size = if x.len().is_multiple_of(128) {
        128
    } else {
        BLOCK
    };
    let mut sum = 0.0;
    for (x, bytes) in x
        .chunks_exact(size)
        .zip(bytes.chunks_exact(format.bytes(size)))
    {
        let piece = &mut piece[..size];
        decode(format, bytes, piece);
        sum += x.iter().zip(&*piece).map(|(x, v)| x * v).sum::<f32>();
    }
    sum
}

/// Decodes an f32 row, `[n]` from `4 n` bytes.
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

/// Decodes an f16 row, `[n]` from `2 n` bytes.
pub fn decode_f16(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * values.len());
    for (value, half) in values.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = f16::from_le_bytes([half[0], half[1]]).to_f32();
    }
}

/// Decodes a Q8_0 row, `[n]`, `n` a multiple of 32.
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

/// Signed codes of a Q4_0 block, in the order of their values.
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

/// Decodes a Q4_0 row, `[n]`, `n` a multiple of 32.
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

/// `sum x * row` with a Q4_0 row, `x` `[n]`: sums each block, then scales it.
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

/// [`dot_f16`] of several queries `[m, n]` into `dots` `[m]`.
pub fn dots_f16(queries: &[f32], key: &[u8], dots: &mut [f32]) {
    let dim = queries.len() / dots.len();
    for (query, dot) in queries.chunks_exact(dim).zip(dots) {
        *dot = dot_f16(query, key);
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

/// `sum x * row` with a Q8_0 row, `x` `[n]`: sums each block, then scales it.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 + 5) % 64) as f32 / 32.0 - 1.0)
            .collect()
    }

    #[test]
    fn formats_round_trip_in_either_basis() {
        for format in KvFormat::ALL {
            for rotated in [false, true] {
                for dim in [32_usize, 64, 96, 128, 256] {
                    if format == KvFormat::Tq3_0 && !dim.is_multiple_of(128) {
                        continue;
                    }
                    let codec = Codec::new(format, rotated);
                    let (x, query) = (row(dim), row(dim + 3).split_off(3));
                    let mut bytes = vec![0; codec.row_bytes(dim)];
                    encode(codec, &x, &mut bytes);
                    let mut back = vec![0.0; dim];
                    decode(format, &bytes, &mut back);
                    let mut turned_query = query.clone();
                    if codec.is_rotated() {
                        hadamard::rotate_inverse(&mut back);
                        hadamard::rotate(&mut turned_query);
                    }
                    let error: f32 = x.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum();
                    let length: f32 = x.iter().map(|a| a * a).sum();
                    let most = match format {
                        KvFormat::Tq3_0 => 0.06,
                        KvFormat::Q4_0 | KvFormat::Q4_1 => 0.02,
                        KvFormat::Q5_0 | KvFormat::Q5_1 => 0.005,
                        _ => 1e-3,
                    };
                    assert!(error < most * length, "{codec:?} {dim}: {}", error / length);
                    let product: f32 = query.iter().zip(&back).map(|(a, b)| a * b).sum();
                    let found = dot(format, &turned_query, &bytes);
                    assert!((found - product).abs() < 1e-3 * length, "{codec:?} {dim}");
                }
            }
        }
    }
}
