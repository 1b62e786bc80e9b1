//! Block formats of stored weights and cached rows: sizes, layouts, scalar codecs.
//!
//! One file per format family. Every formula is evaluated in f32, each operation rounded (no fused
//! multiply-add), which makes the codecs bit-equal to the reference implementation of the GGUF
//! format.
//!
//! Start with [`dequantize_row`]; each file's header gives the layout of its blocks.

mod block32;
mod blocks;
mod float;
pub mod hadamard;
mod iq4;
mod q23_k;
mod q45_k;
mod q6_k;
mod scale6;
mod scale_search;
pub mod tq3;

pub use iq4::IQ4_LEVELS;
pub use scale6::scale_and_min;

/// A storage format, by its GGUF type id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(non_camel_case_types, reason = "these are the names of the format")]
pub enum QuantType {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// 4 bits, scale.
    Q4_0,
    /// 4 bits, scale and minimum.
    Q4_1,
    /// 5 bits, scale.
    Q5_0,
    /// 5 bits, scale and minimum.
    Q5_1,
    /// 8 bits, scale.
    Q8_0,
    /// 2 bits in super-blocks of 256.
    Q2_K,
    /// 3 bits in super-blocks of 256.
    Q3_K,
    /// 4 bits in super-blocks of 256.
    Q4_K,
    /// 5 bits in super-blocks of 256.
    Q5_K,
    /// 6 bits in super-blocks of 256.
    Q6_K,
    /// 4 bits through a nonlinear table.
    IQ4_NL,
    /// 4 bits through a nonlinear table, in super-blocks of 256.
    IQ4_XS,
}

impl QuantType {
    /// Every format, in the order of the GGUF ids.
    pub const ALL: [QuantType; 15] = [
        QuantType::F32,
        QuantType::F16,
        QuantType::Q4_0,
        QuantType::Q4_1,
        QuantType::Q5_0,
        QuantType::Q5_1,
        QuantType::Q8_0,
        QuantType::Q2_K,
        QuantType::Q3_K,
        QuantType::Q4_K,
        QuantType::Q5_K,
        QuantType::Q6_K,
        QuantType::IQ4_NL,
        QuantType::IQ4_XS,
        QuantType::BF16,
    ];

    /// `(GGUF id, name, values per block, bytes per block)`.
    const fn properties(self) -> (u32, &'static str, usize, usize) {
        match self {
            QuantType::F32 => (0, "F32", 1, 4),
            QuantType::F16 => (1, "F16", 1, 2),
            QuantType::Q4_0 => (2, "Q4_0", 32, 18),
            QuantType::Q4_1 => (3, "Q4_1", 32, 20),
            QuantType::Q5_0 => (6, "Q5_0", 32, 22),
            QuantType::Q5_1 => (7, "Q5_1", 32, 24),
            QuantType::Q8_0 => (8, "Q8_0", 32, 34),
            QuantType::Q2_K => (10, "Q2_K", 256, 84),
            QuantType::Q3_K => (11, "Q3_K", 256, 110),
            QuantType::Q4_K => (12, "Q4_K", 256, 144),
            QuantType::Q5_K => (13, "Q5_K", 256, 176),
            QuantType::Q6_K => (14, "Q6_K", 256, 210),
            QuantType::IQ4_NL => (20, "IQ4_NL", 32, 18),
            QuantType::IQ4_XS => (23, "IQ4_XS", 256, 136),
            QuantType::BF16 => (30, "BF16", 1, 2),
        }
    }

    /// The id in a GGUF file.
    pub const fn id(self) -> u32 {
        self.properties().0
    }

    /// The format of a GGUF id, if it is one of ours.
    pub fn from_id(id: u32) -> Option<QuantType> {
        QuantType::ALL.into_iter().find(|ty| ty.id() == id)
    }

    /// The format's name as GGUF tools print it.
    pub const fn name(self) -> &'static str {
        self.properties().1
    }

    /// Values per block.
    pub const fn block_values(self) -> usize {
        self.properties().2
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.properties().3
    }

    /// Bytes of a row of `cols` values; `cols` must be a multiple of [`QuantType::block_values`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_values() * self.block_bytes()
    }
}

/// Reads a row: `bytes` are whole blocks of `ty`, `out` is as long as the values in them.
///
/// Any bytes are read; halves that are not finite give values that are not finite.
///
/// # Panics
/// When `out.len()` is not a multiple of [`QuantType::block_values`] or `bytes.len()` is not
/// [`QuantType::row_bytes`] of it.
pub fn dequantize_row(ty: QuantType, bytes: &[u8], out: &mut [f32]) {
    check_lengths(ty, out.len(), bytes.len());
    match ty {
        QuantType::F32 => float::dequantize_f32(bytes, out),
        QuantType::F16 => float::dequantize_f16(bytes, out),
        QuantType::BF16 => float::dequantize_bf16(bytes, out),
        QuantType::Q4_0 => block32::dequantize_q4_0(bytes, out),
        QuantType::Q4_1 => block32::dequantize_q4_1(bytes, out),
        QuantType::Q5_0 => block32::dequantize_q5_0(bytes, out),
        QuantType::Q5_1 => block32::dequantize_q5_1(bytes, out),
        QuantType::Q8_0 => block32::dequantize_q8_0(bytes, out),
        QuantType::Q2_K => q23_k::dequantize_q2_k(bytes, out),
        QuantType::Q3_K => q23_k::dequantize_q3_k(bytes, out),
        QuantType::Q4_K => q45_k::dequantize_q4_k(bytes, out),
        QuantType::Q5_K => q45_k::dequantize_q5_k(bytes, out),
        QuantType::Q6_K => q6_k::dequantize(bytes, out),
        QuantType::IQ4_NL => iq4::dequantize_nl(bytes, out),
        QuantType::IQ4_XS => iq4::dequantize_xs(bytes, out),
    }
}

/// Writes a row as whole blocks of `ty`, without an importance matrix.
///
/// Values should be finite; others give some valid block, never a panic.
///
/// # Panics
/// When `values.len()` is not a multiple of [`QuantType::block_values`] or `out.len()` is not
/// [`QuantType::row_bytes`] of it.
pub fn quantize_row(ty: QuantType, values: &[f32], out: &mut [u8]) {
    check_lengths(ty, values.len(), out.len());
    match ty {
        QuantType::F32 => float::quantize_f32(values, out),
        QuantType::F16 => float::quantize_f16(values, out),
        QuantType::BF16 => float::quantize_bf16(values, out),
        QuantType::Q4_0 => block32::quantize_q4_0(values, out),
        QuantType::Q4_1 => block32::quantize_q4_1(values, out),
        QuantType::Q5_0 => block32::quantize_q5_0(values, out),
        QuantType::Q5_1 => block32::quantize_q5_1(values, out),
        QuantType::Q8_0 => block32::quantize_q8_0(values, out),
        QuantType::Q2_K => q23_k::quantize_q2_k(values, out),
        QuantType::Q3_K => q23_k::quantize_q3_k(values, out),
        QuantType::Q4_K => q45_k::quantize_q4_k(values, out),
        QuantType::Q5_K => q45_k::quantize_q5_k(values, out),
        QuantType::Q6_K => q6_k::quantize(values, out),
        QuantType::IQ4_NL => iq4::quantize_nl(values, out),
        QuantType::IQ4_XS => iq4::quantize_xs(values, out),
    }
}

fn check_lengths(ty: QuantType, values: usize, bytes: usize) {
    assert!(
        values.is_multiple_of(ty.block_values()) && bytes == ty.row_bytes(values),
        "a {} row of {values} values does not have {bytes} bytes",
        ty.name()
    );
}
