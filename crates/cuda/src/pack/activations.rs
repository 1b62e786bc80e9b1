//! The activation forms on the host: what producers on the card are compared with, and what tests feed.

use half::{bf16, f16};

use super::Input;

/// Bytes of 8 rows and 256 values in the A8 form.
pub const A8_TILE: usize = 2336;
/// Bytes of 8 rows and 64 values in a 16-bit form.
pub const A16_TILE: usize = 1024;

/// Rows in a form, and the values they stand for there.
#[derive(Debug, Clone, PartialEq)]
pub struct Activations {
    /// As the kernels read them; rows that are not there are zero.
    pub bytes: Vec<u8>,
    /// `[rows][width]` after rounding.
    pub rounded: Vec<f32>,
}

/// `x` `[rows][width]` in form `input`, for a buffer of `bucket` rows.
///
/// # Panics
/// If `x` has more rows than the bucket.
pub fn activations(input: Input, x: &[f32], width: usize, bucket: usize) -> Activations {
    let rows = x.len() / width;
    assert!(rows <= bucket && x.len() == rows * width);
    let mut bytes = vec![0; input.bytes(bucket, width)];
    let mut rounded = Vec::with_capacity(x.len());
    let tiles = bucket.div_ceil(8);
    for (row, x) in x.chunks_exact(width).enumerate() {
        match input {
            Input::A8 => {
                for (group, x) in x.chunks(256).enumerate() {
                    let tile = &mut bytes[(group * tiles + row / 8) * A8_TILE..][..A8_TILE];
                    put_a8(tile, row % 8, x, &mut rounded);
                }
            }
            Input::F16 | Input::Bf16 => {
                for (k, &v) in x.iter().enumerate() {
                    let (bits, value) = if input == Input::F16 {
                        let h = f16::from_f32(v.clamp(-65504.0, 65504.0));
                        (h.to_bits(), h.to_f32())
                    } else {
                        let h = bf16::from_f32(v);
                        (h.to_bits(), h.to_f32())
                    };
                    let (chunk, k) = (k / 64, k % 64);
                    let at = (chunk * tiles + row / 8) * A16_TILE
                        + k / 8 * 128
                        + row % 8 * 16
                        + k % 8 * 2;
                    bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                    rounded.push(value);
                }
            }
            Input::F32 => {
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

/// One row's group of up to 256 values into a tile.
fn put_a8(tile: &mut [u8], row: usize, x: &[f32], rounded: &mut Vec<f32>) {
    let finite = x.iter().all(|v| v.is_finite());
    let top = x.iter().fold(0.0_f32, |top, v| top.max(v.abs()));
    let factor = if finite && top > 0.0 {
        127.0 / top
    } else {
        0.0
    };
    let d = if finite {
        top * (1.0 / 127.0)
    } else {
        f32::NAN
    };
    let mut sums = [0_i32; 16];
    for (k, &v) in x.iter().enumerate() {
        let code = if finite {
            (v * factor).round_ties_even().clamp(-127.0, 127.0) as i8
        } else {
            0
        };
        tile[k / 16 * 128 + row * 16 + k % 16] = code.cast_unsigned();
        sums[k / 16] += i32::from(code);
        rounded.push(d * f32::from(code));
    }
    for (run, sum) in sums.into_iter().enumerate() {
        let at = 2048 + (row * 4 + run % 8 / 2) * 8 + run / 8 * 4 + run % 2 * 2;
        let sum = f16::from_f32(sum as f32);
        tile[at..at + 2].copy_from_slice(&sum.to_bits().to_le_bytes());
    }
    tile[2304 + row * 4..2308 + row * 4].copy_from_slice(&d.to_le_bytes());
}
