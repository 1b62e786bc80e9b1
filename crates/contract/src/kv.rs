//! KV cache types: storage formats of cached keys and values.

use crate::QuantType;

/// KV cache types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvFormats {
    /// Keys.
    pub k: KvFormat,
    /// Values.
    pub v: KvFormat,
}

/// A storage format of cached keys or values, by its command-line name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Single precision without loss, for the reference.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 signed bytes and one f16 scale.
    Q8_0,
    /// 32 4-bit codes and one f16 scale.
    Q4_0,
    /// 32 4-bit codes, one f16 scale and one f16 minimum.
    Q4_1,
    /// 32 5-bit codes and one f16 scale.
    Q5_0,
    /// 32 5-bit codes, one f16 scale and one f16 minimum.
    Q5_1,
    /// 3.5 bits per value: Hadamard-rotated, eight-level codebook.
    Tq3_0,
}

impl KvFormat {
    /// All formats, in descending size.
    pub const ALL: [KvFormat; 9] = [
        KvFormat::F32,
        KvFormat::F16,
        KvFormat::Bf16,
        KvFormat::Q8_0,
        KvFormat::Q5_1,
        KvFormat::Q5_0,
        KvFormat::Q4_1,
        KvFormat::Q4_0,
        KvFormat::Tq3_0,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Bf16 => "bf16",
            KvFormat::Q8_0 => "q8_0",
            KvFormat::Q5_1 => "q5_1",
            KvFormat::Q5_0 => "q5_0",
            KvFormat::Q4_1 => "q4_1",
            KvFormat::Q4_0 => "q4_0",
            KvFormat::Tq3_0 => "tq3_0",
        }
    }

    /// The block format of the stored rows; `None` for TQ3_0 ([`crate::quant::tq3`]), which only
    /// the KV cache uses.
    pub fn block_type(self) -> Option<QuantType> {
        Some(match self {
            KvFormat::F32 => QuantType::F32,
            KvFormat::F16 => QuantType::F16,
            KvFormat::Bf16 => QuantType::BF16,
            KvFormat::Q8_0 => QuantType::Q8_0,
            KvFormat::Q5_1 => QuantType::Q5_1,
            KvFormat::Q5_0 => QuantType::Q5_0,
            KvFormat::Q4_1 => QuantType::Q4_1,
            KvFormat::Q4_0 => QuantType::Q4_0,
            KvFormat::Tq3_0 => return None,
        })
    }

    /// Whether values are stored as scaled codes. Such formats profit from a Hadamard rotation
    /// ([`crate::quant::hadamard`]).
    pub fn is_quantized(self) -> bool {
        !matches!(self, KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16)
    }

    /// Bytes of `values` consecutive values, a multiple of 32.
    pub fn bytes(self, values: usize) -> usize {
        let per_32 = match self {
            KvFormat::F32 => 128,
            KvFormat::F16 | KvFormat::Bf16 => 64,
            KvFormat::Q8_0 => 34,
            KvFormat::Q5_1 => 24,
            KvFormat::Q5_0 => 22,
            KvFormat::Q4_1 => 20,
            KvFormat::Q4_0 => 18,
            KvFormat::Tq3_0 => 14,
        };
        values / 32 * per_32
    }
}
