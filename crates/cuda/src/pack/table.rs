//! Rows of the embedding table: as in the file, or in a format that the gather kernel reads.

use contract::QuantType;
use contract::quant::{dequantize_row, signed_run, six_bits};
use half::f16;

/// The format of an embedding table whose file has `ty`: the same if the kernel reads it, otherwise
/// one that holds the same values. IQ3_S becomes Q6_K, the ternary formats Q4_0, and the other
/// formats of points and 4-bit floats F32.
pub fn table_type(ty: QuantType) -> QuantType {
    match ty {
        QuantType::IQ3_S => QuantType::Q6_K,
        QuantType::TQ1_0 | QuantType::TQ2_0 => QuantType::Q4_0,
        QuantType::IQ2_XXS
        | QuantType::IQ2_XS
        | QuantType::IQ2_S
        | QuantType::IQ3_XXS
        | QuantType::IQ1_S
        | QuantType::IQ1_M
        | QuantType::MXFP4
        | QuantType::NVFP4 => QuantType::F32,
        _ => ty,
    }
}

/// Converts whole rows of `cols` values of `ty` to [`table_type`]; every value stays the same.
///
/// # Panics
/// If `from` is not whole rows or `to` does not have their length.
pub fn table_rows(ty: QuantType, cols: usize, from: &[u8], to: &mut [u8]) {
    let stored = table_type(ty);
    let rows = from.len() / ty.row_bytes(cols);
    assert_eq!(from.len(), rows * ty.row_bytes(cols));
    assert_eq!(to.len(), rows * stored.row_bytes(cols));
    let blocks = from.chunks_exact(ty.block_bytes());
    match ty {
        _ if stored == ty => to.copy_from_slice(from),
        QuantType::IQ3_S => {
            let to = to.chunks_exact_mut(stored.block_bytes());
            for (six, to) in blocks.filter_map(|block| six_bits(ty, block)).zip(to) {
                six.write_q6_k(to);
            }
        }
        QuantType::TQ1_0 | QuantType::TQ2_0 => {
            let runs = blocks.flat_map(|block| (0..8).filter_map(|i| signed_run(ty, block, i)));
            for (run, to) in runs.zip(to.chunks_exact_mut(stored.block_bytes())) {
                to[..2].copy_from_slice(&f16::from_f32(run.unit).to_le_bytes());
                for (j, byte) in to[2..].iter_mut().enumerate() {
                    let nibble = |i: usize| (run.codes[i] + 8).cast_unsigned();
                    *byte = nibble(j) | nibble(j + 16) << 4;
                }
            }
        }
        _ => {
            let mut row = vec![0.0; cols];
            let rows = from.chunks_exact(ty.row_bytes(cols));
            for (from, to) in rows.zip(to.chunks_exact_mut(4 * cols)) {
                dequantize_row(ty, from, &mut row);
                for (v, to) in row.iter().zip(to.chunks_exact_mut(4)) {
                    to.copy_from_slice(&v.to_le_bytes());
                }
            }
        }
    }
}
