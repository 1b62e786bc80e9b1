//! Stored codes and scales of formats without a kernel of their own.

use contract::QuantType;
use contract::quant::IQ4_LEVELS;
use half::f16;

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Unsigned codes of 32 values: nibbles, and a fifth bit from `high`.
fn nibbles_32(nibbles: &[u8], high: u32) -> [u8; 32] {
    std::array::from_fn(|e| {
        let nibble = nibbles[e % 16] >> (e / 16 * 4) & 15;
        nibble | ((high >> e & 1) as u8) << 4
    })
}

fn high_bits(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Signed codes of a 32-value block. Each value is its code times the f16 in the first two bytes.
pub(super) fn signed_32(ty: QuantType, block: &[u8]) -> [i8; 32] {
    match ty {
        QuantType::Q8_0 => std::array::from_fn(|e| block[2 + e].cast_signed()),
        QuantType::Q4_0 => nibbles_32(&block[2..], 0).map(|q| q.cast_signed() - 8),
        QuantType::Q5_0 => {
            nibbles_32(&block[6..], high_bits(block, 2)).map(|q| q.cast_signed() - 16)
        }
        QuantType::IQ4_NL => nibbles_32(&block[2..], 0).map(|q| IQ4_LEVELS[usize::from(q)]),
        other => unreachable!("{} has no single scale for 32 signed codes", other.name()),
    }
}

/// 32 values `scale * (code - bias) + offset`, with a scale and an offset per half.
pub(super) struct Affine {
    pub(super) codes: [u8; 32],
    pub(super) bias: u8,
    pub(super) scale: [f32; 2],
    pub(super) offset: [f32; 2],
}

/// Run `run` of 32 values of a block.
pub(super) fn affine(ty: QuantType, block: &[u8], run: usize) -> Affine {
    let whole = |codes: [u8; 32]| Affine {
        codes,
        bias: 0,
        scale: [half_at(block, 0); 2],
        offset: [half_at(block, 2); 2],
    };
    match ty {
        QuantType::Q4_1 => whole(nibbles_32(&block[4..], 0)),
        QuantType::Q5_1 => whole(nibbles_32(&block[8..], high_bits(block, 4))),
        QuantType::Q2_K => {
            let (d, dmin) = (half_at(block, 80), half_at(block, 82));
            let byte = |half: usize| block[2 * run + half];
            Affine {
                codes: std::array::from_fn(|l| block[16 + 32 * (run / 4) + l] >> (run % 4 * 2) & 3),
                bias: 0,
                scale: [0, 1].map(|half| d * f32::from(byte(half) & 15)),
                offset: [0, 1].map(|half| -(dmin * f32::from(byte(half) >> 4))),
            }
        }
        QuantType::IQ4_XS => {
            let high = u16::from_le_bytes([block[2], block[3]]);
            let low = block[4 + run / 2] >> (run % 2 * 4) & 15;
            let scale = i16::from(low) + ((high >> (2 * run) & 3) << 4).cast_signed() - 32;
            let codes = nibbles_32(&block[8 + 16 * run..24 + 16 * run], 0);
            Affine {
                codes: codes.map(|q| IQ4_LEVELS[usize::from(q)].cast_unsigned() ^ 0x80),
                bias: 128,
                scale: [half_at(block, 0) * f32::from(scale); 2],
                offset: [0.0; 2],
            }
        }
        other => unreachable!("{} has a kind of its own", other.name()),
    }
}

/// The codes of half `slice` of a Q6_K block.
pub(super) fn six_bits(block: &[u8], slice: usize) -> [u8; 128] {
    let low = &block[64 * slice..][..64];
    let top = &block[128 + 32 * slice..][..32];
    std::array::from_fn(|k| {
        let (run, l) = (k / 32, k % 32);
        low[run % 2 * 32 + l] >> (run / 2 * 4) & 15 | (top[l] >> (2 * run) & 3) << 4
    })
}

/// A Q3_K block in Q6_K terms.
pub(super) struct ThreeBits {
    /// Codes plus 32.
    pub(super) values: [u8; 256],
    /// Signed scales of runs of 16.
    pub(super) scales: [u8; 16],
    /// The f16 factor.
    pub(super) d: [u8; 2],
}

pub(super) fn three_bits(block: &[u8]) -> ThreeBits {
    let packed = &block[96..108];
    ThreeBits {
        values: std::array::from_fn(|k| {
            let byte = 32 + 32 * (k / 128) + k % 32;
            let pair = block[byte] >> (k % 128 / 32 * 2) & 3;
            let third = block[k % 32] >> (k / 32) & 1;
            32 + (pair | third << 2) - 4
        }),
        scales: std::array::from_fn(|j| {
            let low = packed[j % 8] >> (4 * (j / 8)) & 15;
            let scale = low | (packed[8 + j % 4] >> (2 * (j / 4)) & 3) << 4;
            scale.wrapping_sub(32)
        }),
        d: [block[108], block[109]],
    }
}
