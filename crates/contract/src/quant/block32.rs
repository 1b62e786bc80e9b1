//! The formats with one scale for 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! ```text
//! Q4_0  18 bytes  d f16 @0, nibbles [16] @2                      (n - 8) * d
//! Q4_1  20 bytes  d f16 @0, m f16 @2, nibbles [16] @4            n * d + m
//! Q5_0  22 bytes  d f16 @0, high bits u32 @2, nibbles [16] @6    ((n | bit << 4) - 16) * d
//! Q5_1  24 bytes  d f16 @0, m f16 @2, high bits u32 @4, nibbles [16] @8   (n | bit << 4) * d + m
//! Q8_0  34 bytes  d f16 @0, i8 [32] @2                           q * d
//! ```
//!
//! Value `j < 16` is the low nibble of byte `j`, value `j + 16` the high nibble; the high bit of
//! value `e` is bit `e`.

use super::blocks::{half_at, inverse, map_blocks, map_values, peak, put_half, u32_at};

/// Unsigned codes of a block from its nibbles and, for five bits, its high bits.
fn codes(nibbles: &[u8], high_bits: u32) -> [u8; 32] {
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for (j, &byte) in nibbles.iter().enumerate() {
        low[j] = (byte & 15) | ((high_bits >> j & 1) as u8) << 4;
        high[j] = (byte >> 4) | ((high_bits >> (j + 16) & 1) as u8) << 4;
    }
    codes
}

/// The reverse of [`codes`]: fills `nibbles` and gives the high bits.
fn put_codes(codes: &[u8; 32], nibbles: &mut [u8]) -> u32 {
    for (j, byte) in nibbles.iter_mut().enumerate() {
        *byte = (codes[j] & 15) | (codes[j + 16] & 15) << 4;
    }
    (0..32).fold(0, |bits, e| bits | u32::from(codes[e] >> 4 & 1) << e)
}

/// A value on the scale of codes, cut to a whole number in `0..=top`.
fn truncated(v: f32, top: u8) -> u8 {
    (v as i32).clamp(0, i32::from(top)) as u8
}

fn extent(x: &[f32; 32]) -> (f32, f32) {
    x.iter().fold((f32::MAX, -f32::MAX), |(low, high), &v| {
        (
            if v < low { v } else { low },
            if v > high { v } else { high },
        )
    })
}

pub(super) fn dequantize_q4_0(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 18], out: &mut [f32; 32]| {
        let d = half_at(b, 0);
        for (v, q) in out.iter_mut().zip(codes(&b[2..], 0)) {
            *v = (f32::from(q) - 8.0) * d;
        }
    });
}

pub(super) fn quantize_q4_0(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 18]| {
        let d = peak(x) / -8.0;
        let id = inverse(d);
        put_half(b, 0, d);
        put_codes(&x.map(|v| truncated(v * id + 8.5, 15)), &mut b[2..]);
    });
}

pub(super) fn dequantize_q4_1(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 20], out: &mut [f32; 32]| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        for (v, q) in out.iter_mut().zip(codes(&b[4..], 0)) {
            *v = f32::from(q) * d + m;
        }
    });
}

pub(super) fn quantize_q4_1(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 20]| {
        let (low, high) = extent(x);
        let d = (high - low) / 15.0;
        let id = inverse(d);
        put_half(b, 0, d);
        put_half(b, 2, low);
        put_codes(&x.map(|v| truncated((v - low) * id + 0.5, 15)), &mut b[4..]);
    });
}

pub(super) fn dequantize_q5_0(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 22], out: &mut [f32; 32]| {
        let d = half_at(b, 0);
        for (v, q) in out.iter_mut().zip(codes(&b[6..], u32_at(b, 2))) {
            *v = (f32::from(q) - 16.0) * d;
        }
    });
}

pub(super) fn quantize_q5_0(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 22]| {
        let d = peak(x) / -16.0;
        let id = inverse(d);
        put_half(b, 0, d);
        let high = put_codes(&x.map(|v| truncated(v * id + 16.5, 31)), &mut b[6..]);
        b[2..6].copy_from_slice(&high.to_le_bytes());
    });
}

pub(super) fn dequantize_q5_1(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 24], out: &mut [f32; 32]| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        for (v, q) in out.iter_mut().zip(codes(&b[8..], u32_at(b, 4))) {
            *v = f32::from(q) * d + m;
        }
    });
}

pub(super) fn quantize_q5_1(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 24]| {
        let (low, high) = extent(x);
        let d = (high - low) / 31.0;
        let id = inverse(d);
        put_half(b, 0, d);
        put_half(b, 2, low);
        let high = put_codes(&x.map(|v| truncated((v - low) * id + 0.5, 31)), &mut b[8..]);
        b[4..8].copy_from_slice(&high.to_le_bytes());
    });
}

pub(super) fn dequantize_q8_0(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 34], out: &mut [f32; 32]| {
        let d = half_at(b, 0);
        for (v, q) in out.iter_mut().zip(&b[2..]) {
            *v = f32::from(q.cast_signed()) * d;
        }
    });
}

pub(super) fn quantize_q8_0(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 34]| {
        // The codes use the scale before it is rounded to a half.
        let d = peak(x).abs() / 127.0;
        let id = inverse(d);
        put_half(b, 0, d);
        for (byte, v) in b[2..].iter_mut().zip(x) {
            *byte = ((v * id).round() as i8).cast_unsigned();
        }
    });
}
