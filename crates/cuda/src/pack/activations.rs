//! Activation formats on the host, for comparison with kernels and for test inputs.

use half::f16;

use super::kind::{A16_TILE, ActivationFormat};

/// Rows in a format, with their rounded values.
#[derive(Debug, Clone, PartialEq)]
pub struct Activations {
    /// The bytes that kernels read. Missing rows are zero.
    pub bytes: Vec<u8>,
    /// `[rows][width]` after rounding.
    pub rounded: Vec<f32>,
}

/// Converts `x` `[rows][width]` to format `input`, for a buffer of `bucket` rows.
///
/// # Panics
/// If `x` has more rows than the bucket.
pub fn activations(input: ActivationFormat, x: &[f32], width: usize, bucket: usize) -> Activations {
    let rows = x.len() / width;
    assert!(rows <= bucket && x.len() == rows * width);
    let mut bytes = vec![0; input.bytes(bucket, width)];
    let mut rounded = Vec::with_capacity(x.len());
    let tiles = bucket.div_ceil(8);
    for (row, x) in x.chunks_exact(width).enumerate() {
        match input {
            ActivationFormat::F16 => {
                for (k, &v) in x.iter().enumerate() {
                    // Infinities stay, so that their row's outputs show them.
                    let v = if v.is_finite() {
                        v.clamp(-65504.0, 65504.0)
                    } else {
                        v
                    };
                    let half = f16::from_f32(v);
                    let (chunk, k) = (k / 64, k % 64);
                    let at = (chunk * tiles + row / 8) * A16_TILE
                        + k / 8 * 128
                        + row % 8 * 16
                        + k % 8 * 2;
                    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
                    rounded.push(half.to_f32());
                }
            }
            ActivationFormat::F32 => {
                for (k, &v) in x.iter().enumerate() {
                    let at = (row * width + k) * 4;
                    bytes[at..at + 4].copy_from_slice(&v.to_le_bytes());
                }
                rounded.extend_from_slice(x);
            }
        }
    }
    Activations { bytes, rounded }
}
