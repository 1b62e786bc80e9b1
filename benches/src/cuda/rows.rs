//! Row kernels between GEMMs: norms, SwiGLU and embedding, and the logits reduction.

use anyhow::Result;
use contract::{GateActivation, QuantType};
use cuda::driver::Buffer;
use cuda::launch::draft::{CaptureTarget, capture_hidden_states};
use cuda::launch::ffn::{self, GateUp};
use cuda::launch::logits::{LogitsBuffers, LogitsReduction, reduce};
use cuda::launch::norm::{ActivationBuffers, Residual, RmsShape, RowSource, convert, rms_norm};
use cuda::launch::{CompileUnit, embedding, step_words};

use super::{Bench, Work};

const HIDDEN: usize = 5120;
const FFN: usize = 17_408;
const VOCAB: usize = 248_320;

/// Times the kernels.
///
/// # Errors
/// Device errors.
pub fn run(bench: &mut Bench) -> Result<()> {
    for rows in [1, 24, 64] {
        glue(bench, rows)?;
    }
    for (rows, k) in [
        (1, 1),
        (1, 8),
        (1, 64),
        (15, 8),
        (24, 1),
        (24, 8),
        (24, 64),
        (64, 8),
    ] {
        reduction(bench, rows, k)?;
    }
    Ok(())
}

fn noise(n: usize) -> Vec<f32> {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    // A sum of three: most values are far below the maximum, like logits.
    (0..n).map(|_| 3.0 * (next() + next() + next())).collect()
}

/// A header with rows, trees and requested rows only.
fn header(rows: usize) -> Vec<i32> {
    let mut words = vec![0_i32; step_words::STEP];
    words[0] = rows as i32;
    words[1] = 1;
    words[2] = rows as i32;
    words
}

fn glue(bench: &mut Bench, rows: usize) -> Result<()> {
    let header = bench.gpu.upload(&header(rows))?;
    let source = RowSource::Step(header.ptr());
    let x = bench.gpu.upload(&noise(rows * HIDDEN))?;
    let update = bench.gpu.filled::<f32>(rows * HIDDEN, 0)?;
    let weight = bench.gpu.upload(&noise(HIDDEN))?;
    let both = bench.gpu.upload(&noise(rows * 2 * FFN))?;
    let out: Buffer<u8> = bench.gpu.alloc(64 * 5 * HIDDEN * 4)?;
    let f16 = ActivationBuffers {
        f16: out.ptr(),
        ..ActivationBuffers::default()
    };
    let shape = RmsShape {
        width: HIDDEN,
        eps: 1e-6,
    };
    let residual = Residual {
        rows: x.ptr(),
        update: update.ptr(),
    };
    let to = CaptureTarget {
        out: out.ptr(),
        stride: 5 * HIDDEN,
        offset: HIDDEN,
        to_feature_pool: false,
    };
    let halves = GateUp {
        gate: both.ptr(),
        up: both.ptr_at(FFN),
        stride: 2 * FFN,
    };
    let ty = QuantType::Q4_K;
    let table_rows = bench.gpu.filled::<u8>(ty.row_bytes(HIDDEN), 0x11)?;
    let table = embedding::EmbeddingTable {
        ty,
        width: HIDDEN,
        at: table_rows.ptr(),
    };
    let n = rows * HIDDEN;
    let all = [
        (
            "rms to f16",
            rms_norm(
                shape,
                rows,
                source,
                Residual::of(x.ptr()),
                weight.ptr(),
                f16,
            ),
            n * 5,
        ),
        (
            "residual, rms to f16",
            rms_norm(shape, rows, source, residual, weight.ptr(), f16),
            n * 13,
        ),
        (
            "f32 to f16",
            convert(HIDDEN, rows, source, x.ptr(), f16),
            n * 5,
        ),
        (
            "swiglu to f16",
            ffn::gated_unit((FFN, rows), source, halves, GateActivation::Silu, f16),
            rows * FFN * 9,
        ),
        (
            "tap",
            capture_hidden_states(HIDDEN, rows, source, x.ptr(), to),
            n * 8,
        ),
        (
            "embedding Q4_K",
            embedding::gather(table, rows, source, x.ptr()),
            n * 5,
        ),
    ];
    let units: Vec<CompileUnit> = all
        .iter()
        .map(|(_, launch, _)| launch.unit.clone())
        .collect();
    let modules = bench.modules(&units)?;
    for (kernel, launch, bytes) in &all {
        let work = Work {
            bytes: *bytes as f64,
            flops: 0.0,
        };
        let case = format!("{kernel}, {rows} rows");
        bench.case("rows", &case, &modules, &[launch], work)?;
    }
    Ok(())
}

fn reduction(bench: &mut Bench, rows: usize, k: usize) -> Result<()> {
    let header = bench.gpu.upload(&header(rows))?;
    let shape = LogitsReduction {
        vocab: VOCAB,
        stride: VOCAB,
        k,
    };
    let logits = bench.gpu.upload(&noise(rows * VOCAB))?;
    let scratch = bench.gpu.alloc::<u8>(shape.scratch_bytes(rows))?;
    let out = bench.gpu.alloc::<u8>(shape.out_bytes(rows))?;
    let at = LogitsBuffers {
        logits: logits.ptr(),
        edited: 0,
        edits: 0,
        scratch: scratch.ptr(),
        out: out.ptr(),
    };
    let [scan, select] = reduce(shape, rows, RowSource::Step(header.ptr()), at);
    let modules = bench.modules(&[scan.unit.clone(), select.unit.clone()])?;
    let work = Work {
        bytes: (rows * VOCAB * 4) as f64,
        flops: 0.0,
    };
    let name = format!("top {k} of {rows} rows");
    bench.sequence("rows", &name, &modules, &[&scan, &select], work)?;
    if rows == 24 {
        bench.case("rows", &format!("scan, {name}"), &modules, &[&scan], work)?;
        bench.case(
            "rows",
            &format!("select, {name}"),
            &modules,
            &[&select],
            Work::default(),
        )?;
    }
    Ok(())
}
