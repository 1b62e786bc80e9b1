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
mod fp4;
mod grid;
mod grid_table;
pub mod hadamard;
mod iq1;
mod iq1_search;
mod iq2;
mod iq3;
mod iq4;
mod point_block;
mod point_search;
mod point_set;
mod points;
mod q23_k;
mod q45_k;
mod q6_k;
mod quant_type;
mod runs;
mod scale6;
mod scale_search;
mod signed_run;
mod ternary;
pub mod tq3;

pub use iq4::IQ4_LEVELS;
pub use quant_type::QuantType;
pub use runs::{signed_run, six_bits};
pub use scale6::scale_and_min;
pub use signed_run::{SignedRun, SixBits};

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
        QuantType::IQ4_XS
        | QuantType::IQ2_XXS
        | QuantType::IQ2_XS
        | QuantType::IQ3_XXS
        | QuantType::IQ1_S
        | QuantType::IQ3_S
        | QuantType::IQ2_S
        | QuantType::IQ1_M
        | QuantType::TQ1_0
        | QuantType::TQ2_0
        | QuantType::MXFP4
        | QuantType::NVFP4 => {
            runs::dequantize(ty, bytes, out);
        }
    }
}

/// Writes a row as whole blocks of `ty`, without an importance matrix.
///
/// Values should be finite; others give some valid block, never a panic. IQ2_XXS, IQ2_XS and IQ1_S,
/// which the format's own quantiser refuses without importance, take all values as equally
/// important.
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
        QuantType::IQ2_XXS
        | QuantType::IQ2_XS
        | QuantType::IQ2_S
        | QuantType::IQ3_XXS
        | QuantType::IQ3_S
        | QuantType::IQ1_S
        | QuantType::IQ1_M => points::quantize(ty, values, None, out),
        QuantType::TQ1_0 => ternary::quantize_tq1(values, out),
        QuantType::TQ2_0 => ternary::quantize_tq2(values, out),
        QuantType::MXFP4 => fp4::quantize_mx(values, out),
        QuantType::NVFP4 => fp4::quantize_nv(values, out),
    }
}

/// [`quantize_row`] under `importance`, a positive weight of the squared error of each value.
///
/// Types whose writing takes no importance are written as without.
///
/// # Panics
/// As [`quantize_row`], and when there are not as many weights as values.
pub fn quantize_row_weighted(ty: QuantType, values: &[f32], importance: &[f32], out: &mut [u8]) {
    assert_eq!(values.len(), importance.len(), "one weight for each value");
    check_lengths(ty, values.len(), out.len());
    if ty.takes_importance() {
        points::quantize(ty, values, Some(importance), out);
    } else {
        quantize_row(ty, values, out);
    }
}

fn check_lengths(ty: QuantType, values: usize, bytes: usize) {
    assert!(
        values.is_multiple_of(ty.block_values()) && bytes == ty.row_bytes(values),
        "a {} row of {values} values does not have {bytes} bytes",
        ty.name()
    );
}
