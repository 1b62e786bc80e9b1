//! Stored codes and scales of formats without a kernel of their own.

use contract::QuantType;
use contract::quant::{IQ4_LEVELS, SignedRun, signed_run};
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

/// Run `run` of a block of a format of signed runs.
pub(super) fn run_of(ty: QuantType, block: &[u8], run: usize) -> SignedRun {
    signed_run(ty, block, run).unwrap_or_else(|| unreachable!("{} has no signed runs", ty.name()))
}

/// Signed codes of run `run` of a block, and the scale of its 32 values.
pub(super) fn signed_32(ty: QuantType, block: &[u8], run: usize) -> ([i8; 32], f32) {
    let codes = match ty {
        QuantType::Q8_0 => std::array::from_fn(|e| block[2 + e].cast_signed()),
        QuantType::Q4_0 => nibbles_32(&block[2..], 0).map(|q| q.cast_signed() - 8),
        QuantType::Q5_0 => {
            nibbles_32(&block[6..], high_bits(block, 2)).map(|q| q.cast_signed() - 16)
        }
        QuantType::IQ4_NL => nibbles_32(&block[2..], 0).map(|q| IQ4_LEVELS[usize::from(q)]),
        _ => {
            let run = run_of(ty, block, run);
            return (run.codes, run.scales()[0]);
        }
    };
    (codes, half_at(block, 0))
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
        _ => {
            let run = run_of(ty, block, run);
            Affine {
                codes: run.codes.map(|code| code.cast_unsigned() ^ 0x80),
                bias: 128,
                scale: run.scales(),
                offset: [0.0; 2],
            }
        }
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
