//! Power-of-two row scaling that keeps all values derived from scales in f16 range.

use contract::QuantType;
use half::{bf16, f16};

use super::codes;

/// Largest exponent magnitude. Both its power and the inverse are normal numbers.
const MAX_EXPONENT: i32 = 100;

/// `2^exponent`, for exponents of normal f32 numbers.
pub(super) fn power(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// The largest exponent that satisfies all bounds so far.
struct ExponentBound(Option<i32>);

impl ExponentBound {
    /// Requires `value * 2^exponent < 2^limit`. Zero and non-finite values satisfy any bound.
    fn below(&mut self, value: f32, limit: i32) {
        let value = value.abs();
        if value == 0.0 || !value.is_finite() {
            return;
        }
        // Values are f16, bf16, powers of two or their products with small integers. They are
        // normal in f32 except a few bf16 and powers, which the exponent bound covers.
        let log = (value.to_bits() >> 23).cast_signed() - 127;
        let most = limit - 1 - log;
        self.0 = Some(self.0.map_or(most, |so_far| so_far.min(most)));
    }
}

/// The exponent of a stored row. Scales of K-quants reach 256 times the factor (`d * 2^22`, Q5_K `d
/// * 2^23`, and `dmin`). Those of Q6_K reach 128 times (`d * 2^23`), others once (`scale * 2^22`).
/// f16 ends below `2^16`.
pub(super) fn of_row(ty: QuantType, row: &[u8]) -> i32 {
    let half = |block: &[u8], at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let mut fit = ExponentBound(None);
    let blocks = row.chunks_exact(ty.block_bytes());
    match ty {
        QuantType::Q4_K | QuantType::Q5_K => {
            let log2_scale = if ty == QuantType::Q5_K { 23 } else { 22 };
            for block in blocks {
                fit.below(half(block, 0), 8 - log2_scale);
                fit.below(half(block, 2), 8);
            }
        }
        QuantType::Q6_K => {
            for block in blocks {
                fit.below(half(block, 208), 9 - 23);
            }
        }
        QuantType::Q3_K => {
            for block in blocks {
                fit.below(half(block, 108), 9 - 23);
            }
        }
        QuantType::IQ3_XXS | QuantType::IQ3_S | QuantType::IQ1_S | QuantType::IQ1_M => {
            for block in blocks {
                fit.below(codes::run_of(ty, block, 0).unit, 9 - 23);
            }
        }
        QuantType::Q8_0 | QuantType::Q4_0 | QuantType::Q5_0 | QuantType::IQ4_NL => {
            for block in blocks {
                fit.below(half(block, 0), 16 - 22);
            }
        }
        QuantType::TQ1_0
        | QuantType::TQ2_0
        | QuantType::MXFP4
        | QuantType::IQ2_XXS
        | QuantType::Q4_1
        | QuantType::Q5_1
        | QuantType::Q2_K
        | QuantType::IQ4_XS
        | QuantType::IQ2_XS
        | QuantType::IQ2_S
        | QuantType::NVFP4 => {
            // Most of these scales are rounded, so they need a margin of one bit.
            for block in blocks {
                for run in 0..ty.block_values() / 32 {
                    let affine = codes::affine(ty, block, run);
                    for half in 0..2 {
                        fit.below(affine.scale[half], 15 - 22);
                        fit.below(affine.offset[half], 15);
                    }
                }
            }
        }
        QuantType::BF16 => {
            for bytes in row.chunks_exact(2) {
                let value = bf16::from_le_bytes([bytes[0], bytes[1]]);
                fit.below(value.to_f32(), 15);
            }
        }
        QuantType::F16 | QuantType::F32 => {}
    }
    fit.0.unwrap_or(0).clamp(-MAX_EXPONENT, MAX_EXPONENT)
}
