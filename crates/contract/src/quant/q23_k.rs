//! Q2_K and Q3_K: 256 values in sixteen sub-blocks of 16.
//!
//! ```text
//! Q2_K   84 bytes  scales [16] @0, pairs [64] @16, d f16 @80, dmin f16 @82
//!        value = (d * (s & 15)) * code - dmin * (s >> 4)
//! Q3_K  110 bytes  third bits [32] @0, pairs [64] @32, packed scales [12] @96, d f16 @108
//!        value = (d * (scale - 32)) * (pair - (third bit set ? 0 : 4))
//! ```
//!
//! Each half of 128 values has 32 bytes of pairs; bits `2 q ..` of byte `l` belong to value `32 q +
//! l` of the half. Bit `4 half + q` of third-bit byte `l` belongs to the same value.

use super::blocks::{half_at, map_blocks, map_values, peak, put_half};
use super::scale_search::{ALL_ZERO_BELOW, Affine, AffineSearch, Misfit, ScaleSums, nearest};
use super::signed_run::SixBits;

const Q2: AffineSearch = AffineSearch {
    top: 3,
    first: -0.5,
    last: 15,
    misfit: Misfit::Absolute,
};

/// Calls `visit(value index, pair byte index, shift)` for all 256 values in order.
fn each_pair(mut visit: impl FnMut(usize, usize, usize)) {
    for value in 0..256 {
        let (half, within) = (value / 128, value % 128);
        visit(value, 32 * half + within % 32, 2 * (within / 32));
    }
}

pub(super) fn dequantize_q2_k(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 84], out: &mut [f32; 256]| {
        let (d, dmin) = (half_at(b, 80), half_at(b, 82));
        each_pair(|value, byte, shift| {
            let scale = b[value / 16];
            let code = b[16 + byte] >> shift & 3;
            out[value] = d * f32::from(scale & 15) * f32::from(code) - dmin * f32::from(scale >> 4);
        });
    });
}

pub(super) fn quantize_q2_k(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 84]| {
        let (groups, _) = x.as_chunks::<16>();
        let mut codes = [[0; 16]; 16];
        let mut fits = [Affine {
            scale: 0.0,
            min: 0.0,
        }; 16];
        let (mut max_scale, mut max_min) = (0.0, 0.0);
        for ((group, codes), fit) in groups.iter().zip(&mut codes).zip(&mut fits) {
            *fit = Q2.run(group, &group.map(f32::abs), codes);
            if fit.scale > max_scale {
                max_scale = fit.scale;
            }
            if fit.min > max_min {
                max_min = fit.min;
            }
        }
        b.fill(0);
        let d = put_half(b, 80, max_scale / 15.0);
        let dmin = put_half(b, 82, max_min / 15.0);
        let scale_factor = if max_scale > 0.0 {
            15.0 / max_scale
        } else {
            0.0
        };
        let min_factor = if max_min > 0.0 { 15.0 / max_min } else { 0.0 };
        for (j, ((group, codes), fit)) in groups.iter().zip(&mut codes).zip(fits).enumerate() {
            let scale = nearest(scale_factor * fit.scale).clamp(0, 15) as u8;
            let min = nearest(min_factor * fit.min).clamp(0, 15) as u8;
            b[j] = scale | min << 4;
            let step = d * f32::from(scale);
            if step == 0.0 {
                continue;
            }
            let shift = dmin * f32::from(min);
            for (code, v) in codes.iter_mut().zip(group) {
                *code = nearest((v + shift) / step).clamp(0, 3) as u8;
            }
        }
        let codes = codes.as_flattened();
        each_pair(|value, byte, shift| b[16 + byte] |= codes[value] << shift);
    });
}

/// The sixteen 6-bit scales: scale `j` has its low nibble in byte `j % 8` (high half for `j >= 8`)
/// and its high pair in byte `8 + j % 4` at bit `2 (j / 4)`.
fn scale_of(packed: &[u8], j: usize) -> u8 {
    let low = packed[j % 8] >> (4 * (j / 8)) & 15;
    low | (packed[8 + j % 4] >> (2 * (j / 4)) & 3) << 4
}

fn put_scale(packed: &mut [u8], j: usize, scale: u8) {
    packed[j % 8] |= (scale & 15) << (4 * (j / 8));
    packed[8 + j % 4] |= (scale >> 4) << (2 * (j / 4));
}

pub(super) fn dequantize_q3_k(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 110], out: &mut [f32; 256]| {
        let six = six_bits_q3_k(b);
        for (value, v) in out.iter_mut().enumerate() {
            let scale = six.d * f32::from(six.scales[value / 16]);
            *v = scale * (f32::from(six.codes[value]) - 32.0);
        }
    });
}

pub(super) fn six_bits_q3_k(b: &[u8]) -> SixBits {
    let mut six = SixBits {
        codes: [0; 256],
        scales: std::array::from_fn(|j| scale_of(&b[96..108], j).cast_signed() - 32),
        d: half_at(b, 108),
    };
    each_pair(|value, byte, shift| {
        let third = b[value % 32] >> (value / 32) & 1;
        six.codes[value] = 28 + (b[32 + byte] >> shift & 3 | third << 2);
    });
    six
}

pub(super) fn quantize_q3_k(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 110]| {
        let (groups, _) = x.as_chunks::<16>();
        let mut codes = [[0; 16]; 16];
        let mut fitted = [0.0; 16];
        for ((group, codes), scale) in groups.iter().zip(&mut codes).zip(&mut fitted) {
            *scale = fit_q3(group, codes);
        }
        b.fill(0);
        let max_scale = peak(&fitted);
        let per_scale = if max_scale == 0.0 {
            0.0
        } else {
            -32.0 / max_scale
        };
        let d = if max_scale == 0.0 {
            0.0
        } else {
            put_half(b, 108, 1.0 / per_scale)
        };
        for (j, ((group, codes), scale)) in groups.iter().zip(&mut codes).zip(fitted).enumerate() {
            // With nothing to scale by, the packed scales stay zero, which reads as -32 times d =
            // 0.
            let scale = if max_scale == 0.0 {
                -32
            } else {
                nearest(per_scale * scale).clamp(-32, 31)
            };
            put_scale(&mut b[96..108], j, (scale + 32) as u8);
            let step = d * scale as f32;
            if step == 0.0 {
                continue;
            }
            for (code, v) in codes.iter_mut().zip(group) {
                *code = (nearest(v / step).clamp(-4, 3) + 4) as u8;
            }
        }
        let codes = codes.as_flattened();
        each_pair(|value, byte, shift| {
            b[32 + byte] |= (codes[value] & 3) << shift;
            b[value % 32] |= (codes[value] >> 2) << (value / 32);
        });
    });
}

/// Scale of 16 values for codes `-4..4`, stored plus 4, weights `x^2`: the plain rounding, then up
/// to five passes that move single codes as long as the fit improves.
fn fit_q3(x: &[f32; 16], codes: &mut [u8; 16]) -> f32 {
    let top = peak(x);
    if top.abs() < ALL_ZERO_BELOW {
        codes.fill(0);
        return 0.0;
    }
    let factor = -4.0 / top;
    let mut signed = x.map(|v| nearest(factor * v).clamp(-4, 3) as f32);
    let mut sums = ScaleSums::default();
    for (&v, &l) in x.iter().zip(&signed) {
        sums.add(v * v, v, l);
    }
    for _ in 0..5 {
        let mut moved = false;
        for (&v, l) in x.iter().zip(&mut signed) {
            let w = v * v;
            let mut without = ScaleSums {
                xl: sums.xl - w * v * *l,
                l2: sums.l2,
            };
            if without.xl <= 0.0 {
                continue;
            }
            without.l2 -= w * *l * *l;
            let better = nearest(v * without.l2 / without.xl).clamp(-4, 3) as f32;
            if better == *l {
                continue;
            }
            without.add(w, v, better);
            let improves = without.xl * without.xl * sums.l2 > sums.xl * sums.xl * without.l2;
            if without.l2 > 0.0 && improves {
                *l = better;
                sums = without;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (code, l) in codes.iter_mut().zip(signed) {
        *code = (l + 4.0) as u8;
    }
    sums.scale()
}
