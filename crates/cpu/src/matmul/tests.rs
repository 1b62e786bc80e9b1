//! Tests: every kernel against the file format's definition and against each other.

use contract::quant::{dequantize_row, quantize_row};
use contract::{QuantType, WeightRef};

use super::activations::{self, Activations};
use super::layout::{BLOCK, Format};
use super::pack::pack;
use crate::linear::{Linear, apply_all};
use crate::simd::dispatch::Dispatch;
use crate::simd::scalar::weight_block;
use crate::thread_pool::ThreadPool;

/// Pseudo-random values in `-1..1`.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// `rows` of `cols` values in the file format.
fn stored(ty: QuantType, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows * ty.row_bytes(cols)];
    for (row, bytes) in bytes.chunks_exact_mut(ty.row_bytes(cols)).enumerate() {
        quantize_row(ty, &noise(row as u64 + 1, cols), bytes);
    }
    bytes
}

/// Rows with every code and quantised scale of a format; only the float fields are finite.
fn hostile(ty: QuantType, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = stored(ty, rows, cols);
    // Where the halves are, and the fields of IQ1_M and the 4-bit floats that are scales as well.
    let halves: &[usize] = match ty {
        QuantType::TQ1_0 => &[52],
        QuantType::TQ2_0 => &[64],
        QuantType::IQ1_M => &[48, 50, 52, 54],
        QuantType::MXFP4 => &[0],
        QuantType::NVFP4 => &[0, 2],
        QuantType::Q2_K => &[80, 82],
        QuantType::Q3_K => &[108],
        QuantType::Q6_K => &[208],
        QuantType::Q4_K | QuantType::Q5_K | QuantType::Q4_1 | QuantType::Q5_1 => &[0, 2],
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => return bytes,
        _ => &[0],
    };
    for (i, block) in bytes.chunks_exact_mut(ty.block_bytes()).enumerate() {
        for (at, byte) in block.iter_mut().enumerate() {
            let is_half = halves.iter().any(|&half| at == half || at == half + 1);
            if !is_half {
                *byte = [0x00, 0xff, 0x80, 0x7f, (at * 37 + i * 11) as u8][(at + i) % 5];
            }
        }
    }
    bytes
}

fn load(ty: QuantType, rows: usize, cols: usize, bytes: &[u8], dispatch: Dispatch) -> Linear {
    let weight = WeightRef {
        name: ty.name().into(),
        ty,
        rows,
        cols,
    };
    Linear::load(&weight, bytes, &dispatch).unwrap()
}

fn apply(linear: &Linear, x: &[f32], threads: usize) -> Vec<f32> {
    let n = x.len() / linear.cols();
    let mut out = vec![f32::NAN; n * linear.rows()];
    let pool = ThreadPool::new(threads);
    pool.enter(|| linear.apply(&pool, x, n, &mut out));
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn repacked_blocks_dequantize_like_the_file() {
    const COLS: usize = 512;
    for ty in QuantType::ALL {
        if Format::of(ty).is_float() {
            continue;
        }
        let bytes = hostile(ty, 18, COLS);
        let packed = pack(ty, 18, COLS, &bytes, &ThreadPool::new(1));
        for row in 0..18 {
            let mut values = vec![0.0; COLS];
            dequantize_row(
                ty,
                &bytes[row * ty.row_bytes(COLS)..][..ty.row_bytes(COLS)],
                &mut values,
            );
            for (at, values) in values.chunks_exact(BLOCK).enumerate() {
                let block = weight_block(packed.format, packed.tile(row / 16), row % 16, at);
                for (i, &value) in values.iter().enumerate() {
                    let scaled = block.scales[i / 16] * block.codes[i] as f32;
                    let found = scaled - block.min.unwrap_or(0.0);
                    assert_eq!(found, value, "{} row {row} block {at} value {i}", ty.name());
                }
            }
        }
    }
}

#[test]
fn kernels_are_bit_identical_to_scalar_for_any_rows_and_threads() {
    const COLS: usize = 768;
    for ty in QuantType::ALL {
        let rows = 37;
        let bytes = hostile(ty, rows, COLS);
        let x = noise(99, 31 * COLS);
        let scalar = apply(&load(ty, rows, COLS, &bytes, Dispatch::Scalar), &x, 1);
        for dispatch in Dispatch::all_fast() {
            let linear = load(ty, rows, COLS, &bytes, dispatch);
            for n in [1, 2, 3, 5, 8, 16, 31] {
                let found = apply(&linear, &x[..n * COLS], 1 + n % 3);
                let what = format!("{} {} n {n}", ty.name(), dispatch.name());
                assert_eq!(bits(&found), bits(&scalar[..n * rows]), "{what}");
            }
        }
    }
}

#[test]
fn widths_beyond_a_multiple_of_the_group_are_complete() {
    for (ty, cols) in [
        (QuantType::Q8_0, 96),
        (QuantType::Q4_0, 32),
        (QuantType::Q4_1, 160),
        (QuantType::F32, 7),
        (QuantType::F16, 30),
        (QuantType::BF16, 1),
    ] {
        let bytes = stored(ty, 3, cols);
        let x = noise(5, 2 * cols);
        let reference = apply(&load(ty, 3, cols, &bytes, Dispatch::reference()), &x, 1);
        for dispatch in Dispatch::all_fast() {
            let found = apply(&load(ty, 3, cols, &bytes, dispatch), &x, 2);
            for (found, reference) in found.iter().zip(&reference) {
                assert!(
                    (found - reference).abs() < 0.05,
                    "{} {found} {reference}",
                    ty.name()
                );
            }
        }
    }
}

/// The exact product in 64-bit integers and f64, from the file format's definition and the rounded
/// activations.
#[test]
fn integer_parts_are_exact_and_each_accumulation_is_within_two_ulp() {
    const COLS: usize = 512;
    for ty in QuantType::ALL {
        let format = Format::of(ty);
        if format.is_float() {
            continue;
        }
        let bytes = hostile(ty, 16, COLS);
        let x = noise(7, COLS);
        let packed = pack(ty, 16, COLS, &bytes, &ThreadPool::new(1));
        let mut acts = Activations::default();
        acts.resize(1, COLS);
        activations::quantize(&x, &mut acts.rows_mut().next().unwrap());
        for dispatch in Dispatch::all_fast() {
            let found = apply(&load(ty, 16, COLS, &bytes, dispatch), &x, 1);
            for (row, &found) in found.iter().enumerate() {
                let (mut exact, mut slack) = (0.0_f64, 0.0_f64);
                for at in 0..COLS / BLOCK {
                    let block = weight_block(format, packed.tile(0), row, at);
                    let q = &acts.values[at * BLOCK..][..BLOCK];
                    let dot = |half: usize| -> i64 {
                        let half = 16 * half..16 * half + 16;
                        let pairs = block.codes[half.clone()].iter().zip(&q[half]);
                        pairs.map(|(&w, &q)| i64::from(w) * i64::from(q)).sum()
                    };
                    let q_sum: i64 = q.iter().map(|&q| i64::from(q)).sum();
                    let min = f64::from(block.min.unwrap_or(0.0)) * q_sum as f64;
                    let terms: [f64; 2] =
                        std::array::from_fn(|h| dot(h) as f64 * f64::from(block.scales[h]));
                    let a = f64::from(acts.scales[at]);
                    exact += (terms[0] + terms[1] - min) * a;
                    let largest = (terms[0].abs() + terms[1].abs() + min.abs()) * a;
                    slack += 2.0 * f64::from(f32::EPSILON) * largest.max(exact.abs());
                }
                let error = (f64::from(found) - exact).abs();
                let what = format!("{} {} row {row}", ty.name(), dispatch.name());
                assert!(error <= slack, "{what}: {error:e} beyond {slack:e}");
            }
        }
    }
}

#[test]
fn activation_rounding_error_is_that_of_int8() {
    const COLS: usize = 1024;
    for ty in QuantType::ALL {
        let bytes = stored(ty, 64, COLS);
        let x = noise(3, 4 * COLS);
        let reference = apply(&load(ty, 64, COLS, &bytes, Dispatch::reference()), &x, 1);
        let found = apply(&load(ty, 64, COLS, &bytes, Dispatch::detect()), &x, 2);
        let error: f32 = found
            .iter()
            .zip(&reference)
            .map(|(f, o)| (f - o).powi(2))
            .sum();
        let size: f32 = reference.iter().map(|o| o * o).sum();
        let relative = (error / size).sqrt();
        // A uniform block of 32 rounds to a step of 1/127: 1/127/sqrt(12) over 1/sqrt(3).
        assert!(relative < 0.006, "{}: {relative}", ty.name());
    }
}

#[test]
fn fused_products_equal_single_products() {
    const COLS: usize = 256;
    let x = noise(11, 3 * COLS);
    let parts = [
        (QuantType::Q4_K, 48),
        (QuantType::Q6_K, 16),
        (QuantType::F32, 5),
        (QuantType::Q8_0, 1),
    ];
    let linears =
        parts.map(|(ty, rows)| load(ty, rows, COLS, &stored(ty, rows, COLS), Dispatch::detect()));
    let mut together = parts.map(|(_, rows)| vec![0.0; 3 * rows]);
    let mut pairs: Vec<(&Linear, &mut [f32])> = linears
        .iter()
        .zip(together.iter_mut().map(Vec::as_mut_slice))
        .collect();
    apply_all(&ThreadPool::new(2), &x, 3, &mut pairs);
    for (linear, together) in linears.iter().zip(&together) {
        assert_eq!(bits(&apply(linear, &x, 1)), bits(together));
    }
}

#[test]
fn nan_affects_its_row_only() {
    const COLS: usize = 256;
    let mut x = noise(1, 2 * COLS);
    x[COLS + 3] = f32::INFINITY;
    for dispatch in Dispatch::all_fast() {
        let linear = load(
            QuantType::Q4_K,
            16,
            COLS,
            &stored(QuantType::Q4_K, 16, COLS),
            dispatch,
        );
        let out = apply(&linear, &x, 1);
        assert!(
            out[..16].iter().all(|v| v.is_finite()),
            "{}",
            dispatch.name()
        );
        assert!(out[16..].iter().all(|v| v.is_nan()), "{}", dispatch.name());
    }
}
