//! TQ1_0 and TQ2_0: 256 values of -1, 0 or 1 times one scale.
//!
//! ```text
//! TQ1_0  54 bytes  five digits a byte [48] @0, four digits a byte [4] @48, d f16 @52
//! TQ2_0  66 bytes  pairs [64] @0, d f16 @64; pairs of a half as in Q2_K
//! value = d * (digit - 1)
//! ```
//!
//! A byte of TQ1_0 is `ceil(n * 256 / 243)` of the number `n` with five digits in base 3, the first
//! digit highest: times three, the digit carries over into bit 8. Digit `k` of the first 32 bytes
//! belongs to values `32 k ..`, of the next 16 to values `160 + 16 k ..`, of the last four to
//! `240 + 4 k ..`.

use super::blocks::{half_at, inverse, map_values, peak, put_half};
use super::signed_run::SignedRun;

/// The byte and the digit of value `i` in TQ1_0.
fn place(i: usize) -> (usize, usize) {
    match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
        _ => (48 + (i - 240) % 4, (i - 240) / 4),
    }
}

fn run(d: f32, codes: [i8; 32]) -> SignedRun {
    SignedRun {
        codes,
        unit: d,
        factors: [1.0; 2],
    }
}

pub(super) fn run_tq1(b: &[u8], index: usize) -> SignedRun {
    let code = |i: usize| {
        let (byte, digit) = place(32 * index + i);
        let rest = b[byte].wrapping_mul(3_u8.pow(digit as u32));
        ((u16::from(rest) * 3) >> 8) as i8 - 1
    };
    run(half_at(b, 52), std::array::from_fn(code))
}

pub(super) fn run_tq2(b: &[u8], index: usize) -> SignedRun {
    let (half, shift) = (index / 4, 2 * (index % 4));
    let code = |i: usize| (b[32 * half + i] >> shift & 3).cast_signed() - 1;
    run(half_at(b, 64), std::array::from_fn(code))
}

/// The largest magnitude and, for each value, its digit. The digits use the scale before it is
/// rounded to a half.
fn digits(x: &[f32; 256]) -> (f32, [u8; 256]) {
    let d = peak(x).abs();
    let id = inverse(d);
    // Rounded to nearest, halves away from zero; magnitudes above one do not occur.
    (
        d,
        x.map(|v| ((v * id).round().clamp(-1.0, 1.0) + 1.0) as u8),
    )
}

pub(super) fn quantize_tq1(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 54]| {
        let (d, digits) = digits(x);
        let mut numbers = [0_u8; 52];
        for (i, digit) in digits.into_iter().enumerate() {
            let (byte, place) = place(i);
            numbers[byte] += digit * 3_u8.pow(4 - place as u32);
        }
        for (byte, number) in b.iter_mut().zip(numbers) {
            *byte = (u16::from(number) * 256).div_ceil(243) as u8;
        }
        put_half(b, 52, d);
    });
}

pub(super) fn quantize_tq2(values: &[f32], out: &mut [u8]) {
    map_values(values, out, |x: &[f32; 256], b: &mut [u8; 66]| {
        let (d, digits) = digits(x);
        b.fill(0);
        for (i, digit) in digits.into_iter().enumerate() {
            b[32 * (i / 128) + i % 32] |= digit << (2 * (i % 128 / 32));
        }
        put_half(b, 64, d);
    });
}
