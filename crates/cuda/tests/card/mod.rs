//! What tests of kernels share: the card if there is one, random data, and one comparison.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "each test file uses its part of this, and all of it is a test"
)]

use cuda::compile::{Modules, Options};
use cuda::driver::{Buffer, Gpu, Pod};
use cuda::launch::Unit;

/// Card 0, or `None` with a loud line when this machine has none.
pub fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test").to_owned();
            eprintln!("SKIPPED {test}: no CUDA card: {error}");
            None
        }
    }
}

/// How tests compile: what one of them compiled, the others take from the folder that all share. `TMPDIR` moves it.
pub fn compiling() -> Options {
    Options {
        cache: Some(std::env::temp_dir().join("hearth-test-kernels")),
        ..Options::default()
    }
}

/// Units compiled and loaded.
pub fn modules(gpu: &Gpu, units: &[Unit]) -> Modules {
    match Modules::compile(gpu, units, &compiling(), &mut |_| ()) {
        Ok(modules) => modules,
        Err(error) => panic!("{error}"),
    }
}

/// `len` values on the card, every byte 0xff: a NaN in every float type. What a kernel leaves out shows.
pub fn poisoned<T: Pod>(gpu: &Gpu, len: usize) -> Buffer<T> {
    gpu.filled(len, 0xff).unwrap()
}

/// Numbers that look random and are the same in every run (xorshift64*).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Another seed gives other numbers.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A whole number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.bits() >> 33) as usize) % end
    }

    /// Between 0 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// Roughly normal, mean 0, deviation 1: the sum of four uniform values.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.unit()).sum();
        (sum - 2.0) * 1.732_050_8
    }

    /// `n` roughly normal values of deviation `scale`.
    pub fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal() * scale).collect()
    }

    /// `n` values between `low` and `high`.
    pub fn between(&mut self, n: usize, low: f32, high: f32) -> Vec<f32> {
        (0..n).map(|_| low + self.unit() * (high - low)).collect()
    }

    /// `n` random bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.bits() >> 56) as u8).collect()
    }
}

/// `|out - reference| / |reference|` in the Euclidean norm; infinite if `out` has a NaN.
///
/// # Panics
/// If the lengths differ.
pub fn relative_error(out: &[f32], reference: &[f32]) -> f64 {
    assert_eq!(out.len(), reference.len());
    let mut difference = 0.0_f64;
    let mut norm = 0.0_f64;
    for (&a, &b) in out.iter().zip(reference) {
        if !a.is_finite() {
            return f64::INFINITY;
        }
        difference += (f64::from(a) - f64::from(b)).powi(2);
        norm += f64::from(b).powi(2);
    }
    if norm == 0.0 {
        return if difference == 0.0 {
            0.0
        } else {
            f64::INFINITY
        };
    }
    (difference / norm).sqrt()
}

/// Fails unless the relative error is at most `most`, showing the worst element; gives the error.
pub fn close(what: &str, out: &[f32], reference: &[f32], most: f64) -> f64 {
    let error = relative_error(out, reference);
    if error > most || error.is_nan() {
        let off = |i: &usize| {
            let difference = f64::from((out[*i] - reference[*i]).abs());
            if difference.is_nan() {
                f64::INFINITY
            } else {
                difference
            }
        };
        let worst = (0..out.len())
            .max_by(|a, b| off(a).total_cmp(&off(b)))
            .unwrap_or(0);
        let wrong = (0..out.len()).filter(|&i| !out[i].is_finite()).count();
        panic!(
            "{what}: relative error {error:.3e}, at most {most:.1e} is right; worst at {worst} of {}: \
             {} where {} is right; {wrong} not finite",
            out.len(),
            out[worst],
            reference[worst]
        );
    }
    error
}

/// Fails unless both are the same bits.
pub fn same_bits(what: &str, out: &[f32], reference: &[f32]) {
    assert_eq!(out.len(), reference.len(), "{what}");
    for (index, (a, b)) in out.iter().zip(reference).enumerate() {
        assert!(
            a.to_bits() == b.to_bits(),
            "{what}: {a} and {b} at {index} of {}",
            out.len()
        );
    }
}
