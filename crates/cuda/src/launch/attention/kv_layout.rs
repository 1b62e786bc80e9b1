//! How a cached row of each storage format is laid out on the GPU, as a plane of values and a plane
//! of scales, and its conversion from and to the bytes of the format.
//! `kernels/attention/kv_cache.cuh` has the layouts.

use contract::KvFormat;
use contract::quant::tq3;

/// Values of a block of the coarse formats.
const BLOCK: usize = 32;
/// Rows begin at multiples of this many bytes.
const ALIGN: usize = 16;
/// Bytes of a block of TQ3_0 without its norm: three words.
const TQ3_CODES: usize = 12;
/// Bytes of the norms of a row of TQ3_0.
const TQ3_NORMS: usize = 4;

/// Bytes of a block's scales, fifth bits and other code bits, in the order of the format. `None`
/// for formats that are stored as they are, or otherwise.
fn parts(format: KvFormat) -> Option<[usize; 3]> {
    match format {
        KvFormat::Q8_0 => Some([2, 0, BLOCK]),
        KvFormat::Q4_0 => Some([2, 0, BLOCK / 2]),
        KvFormat::Q4_1 => Some([4, 0, BLOCK / 2]),
        KvFormat::Q5_0 => Some([2, BLOCK / 8, BLOCK / 2]),
        KvFormat::Q5_1 => Some([4, BLOCK / 8, BLOCK / 2]),
        KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 | KvFormat::Tq3_0 => None,
    }
}

/// Bytes of a row of `head_dim` values in the plane of values and in the plane of scales.
pub fn row_bytes(format: KvFormat, head_dim: usize) -> (usize, usize) {
    let blocks = head_dim / BLOCK;
    match (format, parts(format)) {
        (_, Some([scale, fifth, codes])) => {
            let bytes = blocks * (fifth + codes);
            (bytes.next_multiple_of(ALIGN), blocks * scale)
        }
        (KvFormat::Tq3_0, None) => (blocks * TQ3_CODES, TQ3_NORMS),
        (_, None) => (format.bytes(head_dim), 0),
    }
}

/// The bit of a word of fifth bits on the GPU that value `value` of its block has.
fn fifth_bit(value: usize) -> usize {
    let (half, quad, rest) = (value / 16, value / 4 % 4, value % 4);
    4 * (2 * half + rest % 2) + quad + 16 * (rest / 2)
}

/// A word of bits, bit `from(i)` of it put at `to(i)`.
fn permuted(word: u32, from: impl Fn(usize) -> usize, to: impl Fn(usize) -> usize) -> u32 {
    (0..BLOCK).fold(0, |all, i| all | (word >> from(i) & 1) << to(i))
}

fn word(bytes: &[u8]) -> u32 {
    let mut whole = [0; 4];
    whole.copy_from_slice(bytes);
    u32::from_le_bytes(whole)
}

/// Puts a row in the bytes of its format where the planes have it.
///
/// # Panics
/// When the lengths are not those of one row.
pub fn to_planes(format: KvFormat, row: &[u8], values: &mut [u8], scales: &mut [u8]) {
    if format == KvFormat::Tq3_0 {
        return tq3_to_planes(row, values, scales);
    }
    let Some([scale, fifth, codes]) = parts(format) else {
        return values.copy_from_slice(row);
    };
    let blocks = row.len() / (scale + fifth + codes);
    for (b, stored) in row.chunks_exact(scale + fifth + codes).enumerate() {
        let (own_scale, rest) = stored.split_at(scale);
        let (own_fifth, own_codes) = rest.split_at(fifth);
        scales[b * scale..(b + 1) * scale].copy_from_slice(own_scale);
        values[b * codes..(b + 1) * codes].copy_from_slice(own_codes);
        if fifth > 0 {
            let bits = permuted(word(own_fifth), |i| i, fifth_bit);
            values[blocks * codes + b * fifth..][..fifth].copy_from_slice(&bits.to_le_bytes());
        }
    }
    values[blocks * (fifth + codes)..].fill(0);
}

/// Appends a row that the planes have, in the bytes of its format.
///
/// # Panics
/// When the lengths are not those of one row of `head_dim` values.
pub fn from_planes(
    format: KvFormat,
    head_dim: usize,
    (values, scales): (&[u8], &[u8]),
    row: &mut Vec<u8>,
) {
    let blocks = head_dim / BLOCK;
    if format == KvFormat::Tq3_0 {
        return tq3_from_planes(blocks, values, scales, row);
    }
    let Some([scale, fifth, codes]) = parts(format) else {
        return row.extend_from_slice(values);
    };
    for b in 0..blocks {
        row.extend_from_slice(&scales[b * scale..(b + 1) * scale]);
        if fifth > 0 {
            let bits = word(&values[blocks * codes + b * fifth..][..fifth]);
            row.extend_from_slice(&permuted(bits, fifth_bit, |i| i).to_le_bytes());
        }
        row.extend_from_slice(&values[b * codes..(b + 1) * codes]);
    }
}

/// Where code `code` of a block of TQ3_0 is on the GPU: bit `bit` of it is bit `.1` of word `.0`.
fn tq3_bit(code: usize, bit: usize) -> (usize, usize) {
    if code < 24 {
        (code / 8, 4 * (code % 8) + bit)
    } else {
        (bit, 4 * (code % 8) + 3)
    }
}

/// Where the format has the same bit: byte and bit of it.
fn tq3_stored_bit(code: usize, bit: usize) -> (usize, usize) {
    match bit {
        2 => (10 + code / 8, code % 8),
        low => (2 + code / 4, 2 * (code % 4) + low),
    }
}

fn tq3_to_planes(row: &[u8], values: &mut [u8], scales: &mut [u8]) {
    let blocks = row.chunks_exact(tq3::BLOCK_BYTES);
    let halves = [0, blocks.len() / 2 * tq3::BLOCK_BYTES];
    for (norm, at) in scales.chunks_exact_mut(2).zip(halves) {
        norm.copy_from_slice(&row[at..at + 2]);
    }
    for (stored, words) in blocks.zip(values.chunks_exact_mut(TQ3_CODES)) {
        words.fill(0);
        for code in 0..BLOCK {
            for bit in 0..3 {
                let (byte, from) = tq3_stored_bit(code, bit);
                let (w, to) = tq3_bit(code, bit);
                words[4 * w + to / 8] |= (stored[byte] >> from & 1) << (to % 8);
            }
        }
    }
}

fn tq3_from_planes(blocks: usize, values: &[u8], scales: &[u8], row: &mut Vec<u8>) {
    for (b, words) in values.chunks_exact(TQ3_CODES).take(blocks).enumerate() {
        let mut stored = [0; tq3::BLOCK_BYTES];
        let half = 2 * (2 * b / blocks);
        stored[..2].copy_from_slice(&scales[half..half + 2]);
        for code in 0..BLOCK {
            for bit in 0..3 {
                let (byte, to) = tq3_stored_bit(code, bit);
                let (w, from) = tq3_bit(code, bit);
                stored[byte] |= (words[4 * w + from / 8] >> (from % 8) & 1) << to;
            }
        }
        row.extend_from_slice(&stored);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_comes_back_from_its_planes() {
        for format in KvFormat::ALL {
            for head_dim in [64, 128, 256] {
                if format == KvFormat::Tq3_0 && head_dim < 128 {
                    continue;
                }
                let n = format.bytes(head_dim);
                let mut row: Vec<u8> = (0..n).map(|i| (i * i * 37 + i * 11 + 5) as u8).collect();
                if format == KvFormat::Tq3_0 {
                    // Blocks of a group of 128 have one norm.
                    for at in (0..n).step_by(tq3::BLOCK_BYTES) {
                        let first = at / tq3::GROUP_BYTES * tq3::GROUP_BYTES;
                        row.copy_within(first..first + 2, at);
                    }
                }
                let (value_bytes, scale_bytes) = row_bytes(format, head_dim);
                let (mut values, mut scales) = (vec![0xa5; value_bytes], vec![0x5a; scale_bytes]);
                to_planes(format, &row, &mut values, &mut scales);
                let mut back = Vec::new();
                from_planes(format, head_dim, (&values, &scales), &mut back);
                assert!(back == row, "{} of {head_dim}", format.name());
                assert_eq!(value_bytes % ALIGN, 0);
            }
        }
    }

    #[test]
    fn no_format_takes_more_than_it_says_where_rows_are_whole() {
        for format in KvFormat::ALL {
            let (values, scales) = row_bytes(format, 256);
            assert!(values + scales <= format.bytes(256), "{}", format.name());
        }
        assert_eq!(row_bytes(KvFormat::Tq3_0, 256), (96, 4));
        assert_eq!(row_bytes(KvFormat::Q5_1, 256), (160, 32));
        assert_eq!(row_bytes(KvFormat::Q5_0, 64), (48, 4));
    }
}
