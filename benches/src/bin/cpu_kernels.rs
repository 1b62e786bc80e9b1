//! CPU GEMM speed relative to the memory bandwidth of the same threads, as JSON lines.
//!
//!   cargo run --release -p benches --bin cpu_kernels -- [THREADS [ROWS COLS]]
//!
//! One row of activations is bandwidth-bound, many rows are compute-bound.

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use contract::quant::quantize_row;
use contract::{QuantType, WeightRef};
use cpu::linear::Linear;
use cpu::simd::dispatch::Dispatch;
use cpu::thread_pool::ThreadPool;
use serde_json::json;

const TYPES: [QuantType; 8] = [
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
    QuantType::Q8_0,
    QuantType::Q4_0,
    QuantType::IQ4_XS,
    QuantType::BF16,
    QuantType::F32,
];

/// Bytes of weights per pass, larger than any private cache.
const WORKING_SET: usize = 512 << 20;

fn main() -> Result<()> {
    let arguments: Vec<usize> = std::env::args()
        .skip(1)
        .map(|argument| argument.parse().with_context(|| argument.clone()))
        .collect::<Result<_>>()?;
    let threads = arguments.first().copied().unwrap_or(2);
    let rows = arguments.get(1).copied().unwrap_or(3584);
    let cols = arguments.get(2).copied().unwrap_or(1024);
    let pool = ThreadPool::new(threads);
    let bandwidth = streaming_read(&pool);
    say(json!({"bench": "streaming_read", "threads": threads, "gb_per_s": bandwidth}))?;
    say(json!({"bench": "empty_region", "threads": threads, "us": empty_region(&pool)}))?;
    for dispatch in Dispatch::all_fast().into_iter().rev() {
        if dispatch == Dispatch::Scalar {
            continue;
        }
        for ty in TYPES {
            let (one, bytes) = product(&pool, dispatch, ty, (rows, cols), 1);
            let gb_per_s = bytes as f64 / one / 1e9;
            let (many, _) = product(&pool, dispatch, ty, (rows, cols), 512);
            let operations = 2.0 * (rows * cols * 512) as f64;
            say(json!({
                "bench": "linear", "kernels": dispatch.name(), "type": ty.name(), "threads": threads,
                "rows": rows, "cols": cols,
                "n1_us": one * 1e6, "n1_gb_per_s": gb_per_s, "n1_share_of_read": gb_per_s / bandwidth,
                "n512_us": many * 1e6, "n512_gop_per_s": operations / many / 1e9,
            }))?;
        }
    }
    Ok(())
}

fn say(line: serde_json::Value) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").context("standard output")
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Best read bandwidth in 1e9 bytes per second: the limit of one-row products.
fn streaming_read(pool: &ThreadPool) -> f64 {
    let words: Vec<u64> = (0..WORKING_SET as u64 / 8).collect();
    let total = AtomicU64::new(0);
    let pass = || {
        let start = Instant::now();
        pool.enter(|| {
            pool.for_each_item(words.chunks(1 << 15), |chunk| {
                let mut sums = [0_u64; 32];
                for lanes in chunk.chunks_exact(32) {
                    for (sum, &word) in sums.iter_mut().zip(lanes) {
                        *sum = sum.wrapping_add(word);
                    }
                }
                total.fetch_add(
                    sums.iter().fold(0, |a, &b| a.wrapping_add(b)),
                    Ordering::Relaxed,
                );
            });
        });
        start.elapsed().as_secs_f64()
    };
    let times = (0..7).map(|_| pass());
    let best = times.fold(f64::INFINITY, f64::min);
    black_box(total.into_inner());
    WORKING_SET as f64 / best / 1e9
}

/// Microseconds of an empty parallel region.
fn empty_region(pool: &ThreadPool) -> f64 {
    const REGIONS: usize = 10_000;
    let start = Instant::now();
    pool.enter(|| {
        for _ in 0..REGIONS {
            pool.for_each(2 * pool.threads(), |i| {
                black_box(i);
            });
        }
    });
    start.elapsed().as_secs_f64() * 1e6 / REGIONS as f64
}

/// Median seconds of `n` activation rows against a matrix, and the matrix's bytes.
fn product(
    pool: &ThreadPool,
    dispatch: Dispatch,
    ty: QuantType,
    (rows, cols): (usize, usize),
    n: usize,
) -> (f64, usize) {
    let weight = WeightRef {
        name: ty.name().into(),
        ty,
        rows,
        cols,
    };
    // One row of plausible weights, repeated. Only normal values matter.
    let values: Vec<f32> = (0..cols).map(|i| 0.05 * (i as f32 * 0.7).sin()).collect();
    let mut row = vec![0; ty.row_bytes(cols)];
    quantize_row(ty, &values, &mut row);
    let bytes = row.repeat(rows);
    let load = || Linear::load(&weight, &bytes, &dispatch).expect("the length is the reference's");
    let first = load();
    // One row reads a new matrix each time, so that no cache holds it.
    let copies = match n {
        1 => WORKING_SET.div_ceil(first.owned_bytes()),
        _ => 1,
    };
    let mut linears = vec![first];
    linears.resize_with(copies, load);
    let x: Vec<f32> = (0..n * cols).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut out = vec![0.0; n * rows];
    let mut times = Vec::new();
    pool.enter(|| {
        for _ in 0..if n == 1 { 3 } else { 7 } {
            let start = Instant::now();
            for linear in &linears {
                linear.apply(pool, &x, n, &mut out);
            }
            times.push(start.elapsed().as_secs_f64() / linears.len() as f64);
        }
    });
    black_box(&out);
    (median(times), linears[0].owned_bytes())
}
