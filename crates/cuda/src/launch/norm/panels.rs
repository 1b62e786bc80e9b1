//! From f32 rows to the formats that prefill GEMMs read.

use crate::launch::gemm::panels::{Panels, PrefillActivations, count, int};
use crate::launch::{Args, CompileUnit, Launch};

/// Threads of a block; a block has one row.
const THREADS: u32 = 128;

fn launch(entry: &'static str, width: usize, rows: usize, args: Args) -> Launch {
    assert!(
        width.is_multiple_of(4) && width > 0,
        "rows of {width} values: a multiple of 4 is needed"
    );
    Launch {
        entry,
        unit: CompileUnit::new("norm/prefill_to_panels.cu").define("WIDTH", width),
        grid: [count(rows), 1, 1],
        block: [THREADS, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: false,
    }
}

fn out(args: Args, out: PrefillActivations, rows: usize) -> Args {
    assert!(
        out != PrefillActivations::default(),
        "a launch without a result"
    );
    args.ptr(out.panels)
        .i32(int(Panels::new(0, rows).rows))
        .f32(1.0)
        .ptr(out.f32)
}

/// `x / sqrt(mean(x^2) + eps) * weight` of f32 rows `[rows][width]`.
pub fn rms_norm(
    width: usize,
    eps: f32,
    rows: usize,
    chunk: u64,
    (x, weight): (u64, u64),
    to: PrefillActivations,
) -> Launch {
    let args = Args::new()
        .ptr(x)
        .i32(int(width))
        .ptr(chunk)
        .ptr(weight)
        .f32(eps);
    launch("prefill_rms_norm", width, rows, out(args, to, rows))
}

/// f32 rows, `stride` floats apart, as they are.
pub fn convert(
    width: usize,
    stride: usize,
    rows: usize,
    chunk: u64,
    x: u64,
    to: PrefillActivations,
) -> Launch {
    let args = Args::new().ptr(x).i32(int(stride)).ptr(chunk);
    launch("prefill_convert", width, rows, out(args, to, rows))
}

/// `silu(gate) * up` of f32 rows, `stride` floats apart.
///
/// For matrices that [`crate::launch::gemm::prefill::gemm_swiglu`] does not support.
pub fn swiglu(
    width: usize,
    stride: usize,
    rows: usize,
    chunk: u64,
    (gate, up): (u64, u64),
    to: PrefillActivations,
) -> Launch {
    let args = Args::new().ptr(gate).ptr(up).i32(int(stride)).ptr(chunk);
    launch("prefill_swiglu", width, rows, out(args, to, rows))
}
