//! IQ4_NL and IQ4_XS: 4-bit codes into a table of sixteen uneven levels.
//!
//! ```text
//! IQ4_NL   18 bytes   32 values  d f16 @0, nibbles [16] @2          d * LEVELS[n]
//! IQ4_XS  136 bytes  256 values  d f16 @0, high pairs u16 @2, low nibbles [4] @4, nibbles [128] @8
//!         (d * (scale_j - 32)) * LEVELS[n], 6-bit scale_j of eight sub-blocks of 32
//! ```
//!
//! In 32 values, value `j < 16` is the low nibble of byte `j` and value `j + 16` the high one.

use super::blocks::{half_at, inverse, map_blocks, map_values, peak, put_half};
use super::scale_search::{ALL_ZERO_BELOW, ScaleSums, nearest};
use super::signed_run::SignedRun;

/// Values of the 4-bit codes of IQ4_NL and IQ4_XS, before scaling.
pub const IQ4_LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// How far below and above the table's lowest level the search for a scale looks.
const REACH: i8 = 7;

fn level(code: u8) -> f32 {
    f32::from(IQ4_LEVELS[usize::from(code & 15)])
}

/// The code whose level is nearest to `v`; the higher one at equal distance.
fn code_of(v: f32) -> u8 {
    let above = IQ4_LEVELS.partition_point(|&l| f32::from(l) <= v);
    if above == 0 {
        return 0;
    }
    if above == IQ4_LEVELS.len() {
        return 15;
    }
    let (low, high) = (
        f32::from(IQ4_LEVELS[above - 1]),
        f32::from(IQ4_LEVELS[above]),
    );
    if v - low < high - v {
        (above - 1) as u8
    } else {
        above as u8
    }
}

fn read_32(nibbles: &[u8], scale: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((&byte, low), high) in nibbles.iter().zip(low).zip(high) {
        *low = scale * level(byte);
        *high = scale * level(byte >> 4);
    }
}

/// Codes of 32 values divided by `scale`.
fn write_32(x: &[f32; 32], scale: f32, nibbles: &mut [u8]) {
    let inverse = inverse(scale);
    for (j, byte) in nibbles.iter_mut().enumerate() {
        *byte = code_of(inverse * x[j]) | code_of(inverse * x[j + 16]) << 4;
    }
}

/// The scale that explains most of 32 values, weights `x^2`, among those that put the value of
/// largest magnitude on or near the table's lowest level.
fn fit(x: &[f32; 32]) -> f32 {
    let top = peak(x);
    if top.abs() < ALL_ZERO_BELOW {
        return 0.0;
    }
    let sums_at = |inverse: f32| {
        let mut sums = ScaleSums::default();
        for &v in x {
            // Near ties are decided by rounding, so the order of these products is part of the
            // format.
            let (w, level) = (v * v, level(code_of(inverse * v)));
            sums.xl += w * level * v;
            sums.l2 += w * level * level;
        }
        sums
    };
    let lowest = f32::from(IQ4_LEVELS[0]);
    let sums = sums_at(1.0 / (-top / lowest));
    let mut scale = sums.xl / sums.l2;
    let mut best = scale * sums.xl;
    for reach in -REACH..=REACH {
        let sums = sums_at((f32::from(reach) + lowest) / top);
        if sums.l2 > 0.0 && sums.xl * sums.xl > best * sums.l2 {
            scale = sums.xl / sums.l2;
            best = scale * sums.xl;
        }
    }
    scale
}

pub(super) fn dequantize_nl(bytes: &[u8], out: &mut [f32]) {
    map_blocks(bytes, out, |b: &[u8; 18], out: &mut [f32; 32]| {
        read_32(&b[2..], half_at(b, 0), out);
    });
}

pub(super) fn quantize_nl(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 32], b: &mut [u8; 18]| {
        let scale = fit(x);
        put_half(b, 0, scale);
        write_32(x, scale, &mut b[2..]);
    });
}

pub(super) fn run_xs(b: &[u8], index: usize) -> SignedRun {
    let high_pairs = u16::from_le_bytes([b[2], b[3]]);
    let low = b[4 + index / 2] >> (4 * (index % 2)) & 15;
    let scale = low | ((high_pairs >> (2 * index) & 3) as u8) << 4;
    let code = |i: usize| {
        let nibble = b[8 + 16 * index + i % 16] >> (4 * (i / 16)) & 15;
        IQ4_LEVELS[usize::from(nibble)]
    };
    SignedRun {
        codes: std::array::from_fn(code),
        unit: half_at(b, 0),
        factors: [f32::from(scale) - 32.0; 2],
    }
}

pub(super) fn quantize_xs(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 136]| {
        let (groups, _) = x.as_chunks::<32>();
        let mut fitted = [0.0; 8];
        for (scale, group) in fitted.iter_mut().zip(groups) {
            *scale = fit(group);
        }
        b.fill(0);
        // The codes use the super-block scale before it is rounded to a half.
        let d = -peak(&fitted) / 32.0;
        put_half(b, 0, d);
        let id = inverse(d);
        let mut high_pairs = 0;
        for (j, (group, scale)) in groups.iter().zip(fitted).enumerate() {
            let scale = nearest(id * scale).clamp(-32, 31);
            write_32(group, d * scale as f32, &mut b[8 + 16 * j..24 + 16 * j]);
            let scale = (scale + 32) as u8;
            b[4 + j / 2] |= (scale & 15) << (4 * (j % 2));
            high_pairs |= u16::from(scale >> 4) << (2 * j);
        }
        b[2..4].copy_from_slice(&high_pairs.to_le_bytes());
    });
}
