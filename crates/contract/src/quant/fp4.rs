//! MXFP4 and NVFP4: 4-bit floats (one sign, two exponent bits, one mantissa bit) with small scales.
//!
//! ```text
//! MXFP4  17 bytes  32 values  e u8 @0, nibbles [16] @1               2^(e - 128) * LEVELS[n]
//! NVFP4  36 bytes  64 values  scales [4] @0, nibbles [8] for each of four runs of 16 @4
//!                                                                    s / 2 * LEVELS[n]
//! ```
//!
//! Levels are twice the floats' values, so that they are whole numbers. A scale `s` of NVFP4 is a
//! float of four exponent bits (bias 7) and three mantissa bits; its pattern 0x7f counts as zero.
//! The first half of the values of a run are low nibbles, the second half high ones.

use super::blocks::{map_values, peak};
use super::signed_run::SignedRun;

/// Twice the values of the sixteen codes.
const LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(e - 128)`.
fn exponent_scale(e: u8) -> f32 {
    match e {
        // Below the normal numbers.
        0 | 1 => f32::from_bits(0x0020_0000 << e),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}

/// Half of an unsigned float of four exponent and three mantissa bits.
fn float_scale(bits: u8) -> f32 {
    let (exponent, mantissa) = (bits >> 3 & 15, f32::from(bits & 7));
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        // 2^-10 and 2^(exponent - 11), the exponents of the mantissa's last bit, halved.
        (_, 0) => mantissa * f32::from_bits((127 - 10) << 23),
        _ => (8.0 + mantissa) * f32::from_bits((127 - 11 + u32::from(exponent)) << 23),
    }
}

/// The nearest bit pattern to a positive scale, not halved; ties go up.
fn float_bits(scale: f32) -> u8 {
    // Written so that a NaN is zero as well.
    let is_positive = scale > 0.0;
    if !is_positive {
        return 0;
    }
    let scale = scale.min(448.0);
    let exponent = (scale.to_bits() >> 23).cast_signed() - 127 + 7;
    if exponent <= 0 {
        return ((scale * 512.0 + 0.5) as i32).min(7) as u8;
    }
    // The mantissa rounds on its next bit and may carry into the exponent.
    let top = scale.to_bits() >> 20 & 7;
    let rounded = (exponent as u32) << 3 | top;
    let rounded = rounded + (scale.to_bits() >> 19 & 1);
    // The format's own quantiser gives the largest scale to all that have the highest exponent.
    if rounded >= 15 << 3 {
        0x7e
    } else {
        rounded as u8
    }
}

/// The code whose level times `scale` is nearest to `v`, the first among equals.
fn code_of(v: f32, scale: f32) -> u8 {
    let mut best = (0, (f32::from(LEVELS[0]) * scale - v).abs());
    for (code, &level) in LEVELS.iter().enumerate().skip(1) {
        let off = (f32::from(level) * scale - v).abs();
        if off < best.1 {
            best = (code as u8, off);
        }
    }
    best.0
}

/// Codes of `nibbles.len()` low and as many high nibbles.
fn write(x: &[f32], scale: f32, nibbles: &mut [u8]) {
    let (low, high) = x.split_at(nibbles.len());
    for ((byte, &low), &high) in nibbles.iter_mut().zip(low).zip(high) {
        *byte = code_of(low, scale) | code_of(high, scale) << 4;
    }
}

pub(super) fn run_mx(b: &[u8], _: usize) -> SignedRun {
    SignedRun {
        codes: std::array::from_fn(|i| LEVELS[usize::from(b[1 + i % 16] >> (4 * (i / 16)) & 15)]),
        unit: 1.0,
        factors: [exponent_scale(b[0]); 2],
    }
}

pub(super) fn run_nv(b: &[u8], index: usize) -> SignedRun {
    let code = |i: usize| {
        let byte = b[4 + 16 * index + 8 * (i / 16) + i % 8];
        LEVELS[usize::from(byte >> (4 * (i % 16 / 8)) & 15)]
    };
    SignedRun {
        codes: std::array::from_fn(code),
        unit: 1.0,
        factors: [0, 1].map(|half| float_scale(b[2 * index + half])),
    }
}

pub(super) fn quantize_mx(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 17]| {
        let top = peak(x).abs();
        // The largest level, 12, has exponent 3, and 2^(e - 128) is a half of the usual scale.
        b[0] = if top > 0.0 {
            (top.log2().floor() + 125.0) as u8
        } else {
            0
        };
        write(x, exponent_scale(b[0]), &mut b[1..]);
    });
}

pub(super) fn quantize_nv(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 64], b: &mut [u8; 36]| {
        let (scales, nibbles) = b.split_at_mut(4);
        let runs = x.chunks_exact(16).zip(nibbles.chunks_exact_mut(8));
        for (scale, (x, nibbles)) in scales.iter_mut().zip(runs) {
            *scale = float_bits(peak(x).abs() / 6.0);
            write(x, float_scale(*scale), nibbles);
        }
    });
}
