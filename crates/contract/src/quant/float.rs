//! The three plain formats: F32, F16, BF16. Narrowing rounds to nearest, ties to even.

use half::{bf16, f16};

use super::blocks::{map_blocks, map_values};

pub(super) fn dequantize_f32(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 4], v: &mut [f32; 1]| {
        v[0] = f32::from_le_bytes(*b)
    });
}

pub(super) fn quantize_f32(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |v: &[f32; 1], b: &mut [u8; 4]| {
        *b = v[0].to_le_bytes()
    });
}

pub(super) fn dequantize_f16(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 2], v: &mut [f32; 1]| {
        v[0] = f16::from_le_bytes(*b).to_f32()
    });
}

pub(super) fn quantize_f16(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |v: &[f32; 1], b: &mut [u8; 2]| {
        *b = f16::from_f32(v[0]).to_le_bytes();
    });
}

pub(super) fn dequantize_bf16(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 2], v: &mut [f32; 1]| {
        v[0] = bf16::from_le_bytes(*b).to_f32();
    });
}

pub(super) fn quantize_bf16(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |v: &[f32; 1], b: &mut [u8; 2]| {
        *b = bf16::from_f32(v[0]).to_le_bytes();
    });
}
