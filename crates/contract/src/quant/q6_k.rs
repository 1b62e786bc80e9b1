//! Q6_K: 256 values in sixteen sub-blocks of 16, each with a signed 8-bit scale.
//!
//! ```text
//! 210 bytes  low nibbles [128] @0, high pairs [64] @128, scales i8 [16] @192, d f16 @208 (last)
//! value = (d * scale_j) * (code - 32)
//! ```
//!
//! Each half of 128 values has 64 bytes of nibbles and 32 of pairs. Value `32 q + l` of a half (`q
//! < 4`, `l < 32`) has nibble byte `l + 32 (q % 2)`, the low half of it for `q < 2`, and bits `2 q
//! ..` of pair byte `l`.

use super::blocks::{half_at, map_blocks, map_values, peak, put_half};
use super::scale_search::{ALL_ZERO_BELOW, ScaleSums, nearest};
use super::signed_run::SixBits;

pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 210], out: &mut [f32; 256]| {
        let d = half_at(b, 208);
        for (half, out) in out.chunks_exact_mut(128).enumerate() {
            let nibbles = &b[64 * half..64 * half + 64];
            let pairs = &b[128 + 32 * half..160 + 32 * half];
            let scales = &b[192 + 8 * half..200 + 8 * half];
            for (q, out) in out.chunks_exact_mut(32).enumerate() {
                for (l, v) in out.iter_mut().enumerate() {
                    let low = (nibbles[l + 32 * (q % 2)] >> (4 * (q / 2))) & 15;
                    let code = low | (pairs[l] >> (2 * q) & 3) << 4;
                    let scale = f32::from(scales[2 * q + l / 16].cast_signed());
                    *v = d * scale * (f32::from(code) - 32.0);
                }
            }
        }
    });
}

pub(super) fn quantize(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 210]| {
        let (groups, _) = x.as_chunks::<16>();
        let mut codes = [[0; 16]; 16];
        let mut fitted = [0.0; 16];
        for ((group, codes), scale) in groups.iter().zip(&mut codes).zip(&mut fitted) {
            *scale = fit(group, codes);
        }
        let max_scale = peak(&fitted);
        b.fill(0);
        if max_scale.abs() < ALL_ZERO_BELOW {
            return;
        }
        let per_scale = -128.0 / max_scale;
        let d = put_half(b, 208, 1.0 / per_scale);
        let scales = fitted.map(|scale| nearest(per_scale * scale).min(127) as i8);
        for ((group, codes), scale) in groups.iter().zip(&mut codes).zip(scales) {
            let step = d * f32::from(scale);
            if step == 0.0 {
                continue;
            }
            for (code, v) in codes.iter_mut().zip(group) {
                *code = (nearest(v / step).clamp(-32, 31) + 32) as u8;
            }
        }
        for (byte, scale) in b[192..208].iter_mut().zip(scales) {
            *byte = scale.cast_unsigned();
        }
        pack(codes.as_flattened(), b);
    });
}

impl SixBits {
    /// Writes the block as one of Q6_K, 210 bytes. `d` must be a half, or it is rounded to one.
    ///
    /// # Panics
    /// When `b` has another length.
    pub fn write_q6_k(&self, b: &mut [u8]) {
        let b: &mut [u8; 210] = b.try_into().expect("a Q6_K block has 210 bytes");
        b.fill(0);
        pack(&self.codes, b);
        for (byte, scale) in b[192..208].iter_mut().zip(self.scales) {
            *byte = scale.cast_unsigned();
        }
        put_half(b, 208, self.d);
    }
}

fn pack(codes: &[u8], b: &mut [u8; 210]) {
    for (half, codes) in codes.chunks_exact(128).enumerate() {
        for (q, codes) in codes.chunks_exact(32).enumerate() {
            for (l, &code) in codes.iter().enumerate() {
                b[64 * half + l + 32 * (q % 2)] |= (code & 15) << (4 * (q / 2));
                b[128 + 32 * half + l] |= (code >> 4) << (2 * q);
            }
        }
    }
}

/// Scale of 16 values for codes `-32..32`, stored plus 32, weights `x^2`: the least-squares scale
/// of the plain rounding, then of eighteen rescaled roundings, whichever explains most.
fn fit(x: &[f32; 16], codes: &mut [u8; 16]) -> f32 {
    let top = peak(x);
    if top.abs() < ALL_ZERO_BELOW {
        codes.fill(0);
        return 0.0;
    }
    let assign = |factor: f32, codes: &mut [u8; 16]| {
        let mut sums = ScaleSums::default();
        for (code, &v) in codes.iter_mut().zip(x) {
            let l = nearest(factor * v).clamp(-32, 31);
            *code = (l + 32) as u8;
            sums.add(v * v, v, l as f32);
        }
        sums
    };
    let sums = assign(-32.0 / top, codes);
    let mut scale = sums.scale();
    let mut best = scale * sums.xl;
    let mut trial = [0; 16];
    for s in (-9i8..=9).filter(|&s| s != 0) {
        let sums = assign(-(32.0 + 0.1 * f32::from(s)) / top, &mut trial);
        if sums.l2 > 0.0 && sums.xl * sums.xl > best * sums.l2 {
            *codes = trial;
            scale = sums.scale();
            best = scale * sums.xl;
        }
    }
    scale
}
