//! Relative quantization error of each KV cache type on normal data, with and without outliers.

#![allow(
    clippy::print_stdout,
    reason = "figures for those who run it with --nocapture"
)]

use contract::QuantType;
use contract::quant::{dequantize_row, hadamard, quantize_row, tq3};

const GROUPS: usize = 400;
const DIM: usize = 128;
/// Number of outlier dimensions, and their factor.
const OUTLIERS: usize = 4;
const FACTOR: f32 = 20.0;

/// Normally distributed numbers, by Box and Muller over a linear congruence.
struct Normal(u64);

impl Normal {
    fn unit(&mut self) -> f64 {
        // Knuth's MMIX numbers; the high bits are even enough.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    fn next(&mut self) -> f32 {
        let (a, b) = (self.unit(), self.unit());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }
}

#[derive(Clone, Copy, Debug)]
enum Stored {
    Plain(QuantType),
    Rotated(QuantType),
    Tq3,
}

impl Stored {
    /// The values of a group after storing and reading, in the original basis.
    fn round_trip(self, x: &[f32]) -> Vec<f32> {
        let mut kept = x.to_vec();
        match self {
            Stored::Plain(ty) => through(ty, &mut kept),
            Stored::Rotated(ty) => {
                hadamard::rotate(&mut kept);
                through(ty, &mut kept);
                hadamard::rotate_inverse(&mut kept);
            }
            Stored::Tq3 => {
                let mut bytes = vec![0; x.len() / 32 * tq3::BLOCK_BYTES];
                tq3::quantize(x, &mut bytes);
                tq3::dequantize(&bytes, &mut kept);
                hadamard::rotate_inverse(&mut kept);
            }
        }
        kept
    }
}

fn through(ty: QuantType, values: &mut [f32]) {
    let mut bytes = vec![0; ty.row_bytes(values.len())];
    quantize_row(ty, values, &mut bytes);
    dequantize_row(ty, &bytes, values);
}

/// Mean over groups of the squared error relative to the squared length.
fn relative_error(stored: Stored, outliers: usize) -> f64 {
    let mut normal = Normal(7);
    let errors = (0..GROUPS).map(|_| {
        let mut x: Vec<f32> = (0..DIM).map(|_| normal.next()).collect();
        // The same channels are outliers in every key.
        (0..outliers).for_each(|i| x[i * 31 + 5] *= FACTOR);
        let kept = stored.round_trip(&x);
        let error: f64 = x
            .iter()
            .zip(&kept)
            .map(|(a, b)| f64::from(a - b).powi(2))
            .sum();
        let length: f64 = x.iter().map(|a| f64::from(*a).powi(2)).sum();
        error / length
    });
    errors.sum::<f64>() / GROUPS as f64
}

fn decibels(error: f64) -> f64 {
    -10.0 * error.log10()
}

#[track_caller]
fn check(stored: Stored, outliers: usize, expected: f64) {
    let found = relative_error(stored, outliers);
    println!(
        "{stored:?}, {outliers} outliers: {found:.6}, {:.1} dB",
        decibels(found)
    );
    assert!(
        (found / expected - 1.0).abs() < 0.1,
        "{stored:?}, {outliers} outliers: {found:.6}, {expected} expected"
    );
}

#[test]
fn normal_data_error_matches_the_documented_table() {
    check(Stored::Plain(QuantType::Q8_0), 0, 2.9e-5);
    check(Stored::Plain(QuantType::Q4_0), 0, 0.0073);
    check(Stored::Rotated(QuantType::Q4_0), 0, 0.0073);
    check(Stored::Tq3, 0, 0.0334);
    assert!((decibels(relative_error(Stored::Rotated(QuantType::Q4_0), 0)) - 21.4).abs() < 0.5);
    assert!((decibels(relative_error(Stored::Tq3, 0)) - 14.8).abs() < 0.5);
}

#[test]
fn rotation_protects_four_bit_formats_from_outliers() {
    let plain = relative_error(Stored::Plain(QuantType::Q4_0), OUTLIERS);
    let rotated = relative_error(Stored::Rotated(QuantType::Q4_0), OUTLIERS);
    println!("q4_0 plain {plain:.4}, rotated {rotated:.4}");
    assert!(plain > 3.0 * rotated);
    check(Stored::Tq3, OUTLIERS, 0.030);
    check(Stored::Rotated(QuantType::Q4_0), OUTLIERS, 0.0053);
    check(Stored::Plain(QuantType::Q4_0), OUTLIERS, 0.0277);
}

/// Formats in descending size, rotated as in the KV cache.
#[test]
fn error_falls_with_bits_per_value() {
    let rotated = [
        QuantType::Q8_0,
        QuantType::Q5_1,
        QuantType::Q5_0,
        QuantType::Q4_1,
        QuantType::Q4_0,
    ];
    let mut errors: Vec<f64> = rotated
        .map(|ty| relative_error(Stored::Rotated(ty), 0))
        .into();
    errors.push(relative_error(Stored::Tq3, 0));
    println!("{errors:?}");
    assert!(errors.is_sorted(), "{errors:?}");
}
