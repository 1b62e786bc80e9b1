//! Q4_K and Q5_K: 256 values in eight sub-blocks of 32, each with a 6-bit scale and a 6-bit
//! minimum.
//!
//! ```text
//! Q4_K  144 bytes  d f16 @0, dmin f16 @2, scales [12] @4, nibbles [128] @16
//! Q5_K  176 bytes  d f16 @0, dmin f16 @2, scales [12] @4, high bits [32] @16, nibbles [128] @48
//! value = (d * scale_j) * code - (dmin * min_j)
//! ```
//!
//! Bytes `32 g ..` hold sub-block `2 g` in their low nibbles and `2 g + 1` in their high ones. Bit
//! `j` of high-bit byte `l` is the fifth bit of value `l` of sub-block `j`. The packing of the
//! scales is [`super::scale_and_min`].

use super::blocks::{half_at, map_blocks, map_values, put_half};
use super::scale_search::{Affine, AffineSearch, Misfit, nearest};
use super::scale6::{pack, scale_and_min};

const Q4: AffineSearch = AffineSearch {
    top: 15,
    first: -1.0,
    last: 20,
    misfit: Misfit::Squared,
};
const Q5: AffineSearch = AffineSearch {
    top: 31,
    first: -0.5,
    last: 15,
    misfit: Misfit::Squared,
};

fn packed_scales<const BYTES: usize>(block: &[u8; BYTES]) -> &[u8; 12] {
    block[4..16]
        .as_array()
        .expect("twelve bytes are twelve bytes")
}

pub(super) fn dequantize_q4_k(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 144], out: &mut [f32; 256]| {
        read(b, &b[16..], None, out)
    });
}

pub(super) fn dequantize_q5_k(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 176], out: &mut [f32; 256]| {
        read(b, &b[48..], Some(&b[16..48]), out);
    });
}

fn read<const BYTES: usize>(
    block: &[u8; BYTES],
    nibbles: &[u8],
    high_bits: Option<&[u8]>,
    out: &mut [f32; 256],
) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let scales = packed_scales(block);
    for (g, (nibbles, out)) in nibbles
        .chunks_exact(32)
        .zip(out.chunks_exact_mut(64))
        .enumerate()
    {
        for (half, out) in out.chunks_exact_mut(32).enumerate() {
            let j = 2 * g + half;
            let (scale, min) = scale_and_min(scales, j);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            for (l, (v, &byte)) in out.iter_mut().zip(nibbles).enumerate() {
                let low = (byte >> (4 * half)) & 15;
                let fifth = high_bits.map_or(0, |bits| (bits[l] >> j & 1) << 4);
                *v = scale * f32::from(low | fifth) - min;
            }
        }
    }
}

pub(super) fn quantize_q4_k(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 144]| {
        let codes = write(&Q4, x, b);
        put_nibbles(&codes, &mut b[16..]);
    });
}

pub(super) fn quantize_q5_k(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 176]| {
        let codes = write(&Q5, x, b);
        put_nibbles(&codes, &mut b[48..]);
        for (l, byte) in b[16..48].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, j| bits | (codes[j][l] >> 4) << j);
        }
    });
}

fn put_nibbles(codes: &[[u8; 32]; 8], nibbles: &mut [u8]) {
    for (pair, bytes) in codes.chunks_exact(2).zip(nibbles.chunks_exact_mut(32)) {
        for ((byte, low), high) in bytes.iter_mut().zip(&pair[0]).zip(&pair[1]) {
            *byte = low & 15 | (high & 15) << 4;
        }
    }
}

/// Fills the first 16 bytes of the block and gives the codes of each sub-block.
fn write<const BYTES: usize>(
    search: &AffineSearch,
    x: &[f32; 256],
    block: &mut [u8; BYTES],
) -> [[u8; 32]; 8] {
    let (groups, _) = x.as_chunks::<32>();
    let mut codes = [[0; 32]; 8];
    let mut fits = [Affine {
        scale: 0.0,
        min: 0.0,
    }; 8];
    let (mut max_scale, mut max_min) = (0.0, 0.0);
    for ((group, codes), fit) in groups.iter().zip(&mut codes).zip(&mut fits) {
        let sum_x2 = group.iter().fold(0.0, |sum, v| sum + v * v);
        let spread = (sum_x2 / 32.0).sqrt();
        *fit = search.run(group, &group.map(|v| spread + v.abs()), codes);
        if fit.scale > max_scale {
            max_scale = fit.scale;
        }
        if fit.min > max_min {
            max_min = fit.min;
        }
    }
    let scale_factor = if max_scale > 0.0 {
        63.0 / max_scale
    } else {
        0.0
    };
    let min_factor = if max_min > 0.0 { 63.0 / max_min } else { 0.0 };
    let pairs = fits.map(|fit| {
        // A negative scale wraps, as it does in a byte, and then is cut to the top.
        let six = |v: f32| (nearest(v) as u8).min(63);
        (six(scale_factor * fit.scale), six(min_factor * fit.min))
    });
    let d = put_half(block, 0, max_scale / 63.0);
    let dmin = put_half(block, 2, max_min / 63.0);
    block[4..16].copy_from_slice(&pack(&pairs));
    for ((group, codes), (scale, min)) in groups.iter().zip(&mut codes).zip(pairs) {
        let step = d * f32::from(scale);
        if step == 0.0 {
            continue;
        }
        let shift = dmin * f32::from(min);
        for (code, v) in codes.iter_mut().zip(group) {
            *code = nearest((v + shift) / step).clamp(0, i32::from(search.top)) as u8;
        }
    }
    codes
}
