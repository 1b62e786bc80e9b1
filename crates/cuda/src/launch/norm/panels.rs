//! From f32 rows to the formats that prefill GEMMs read.

use contract::GateActivation;

use crate::launch::ffn;
use crate::launch::gemm::panels::{ChunkRows, Panels, PrefillActivations, count, int};
use crate::launch::norm::RmsShape;
use crate::launch::{Args, CompileUnit, Launch};

/// Threads of a block; a block has one row.
const THREADS: u32 = 128;

/// f32 rows in device memory, without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct F32Rows {
    /// Device address of the first.
    pub at: u64,
    /// Values of a row.
    pub width: usize,
}

fn launch(entry: &'static str, width: usize, chunk: ChunkRows, args: Args) -> Launch {
    assert!(
        width.is_multiple_of(4) && width > 0,
        "rows of {width} values: a multiple of 4 is needed"
    );
    Launch {
        entry,
        unit: CompileUnit::new("norm/prefill_to_panels.cu").define("WIDTH", width),
        grid: [count(chunk.rows), 1, 1],
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

/// `x / sqrt(mean(x^2) + eps) * weight` of f32 rows `[rows][width]` at `x`.
pub fn rms_norm(
    shape: RmsShape,
    chunk: ChunkRows,
    x: u64,
    weight: u64,
    to: PrefillActivations,
) -> Launch {
    let RmsShape { width, eps } = shape;
    let args = Args::new()
        .ptr(x)
        .i32(int(width))
        .ptr(chunk.header)
        .ptr(weight)
        .f32(eps);
    let args = out(args, to, chunk.rows);
    launch("prefill_rms_norm", width, chunk, args)
}

/// Rows as they are.
pub fn convert(chunk: ChunkRows, x: F32Rows, to: PrefillActivations) -> Launch {
    let args = Args::new().ptr(x.at).i32(int(x.width)).ptr(chunk.header);
    let args = out(args, to, chunk.rows);
    launch("prefill_convert", x.width, chunk, args)
}

/// `f(gate) * up` of rows of the same width, with the function of `activation`.
///
/// For what [`crate::launch::gemm::prefill::gemm_swiglu`] does not support.
pub fn gated_unit(
    chunk: ChunkRows,
    [gate, up]: [F32Rows; 2],
    activation: GateActivation,
    to: PrefillActivations,
) -> Launch {
    assert!(gate.width == up.width, "a unit of {gate:?} and {up:?}");
    let args = Args::new()
        .ptr(gate.at)
        .ptr(up.at)
        .i32(int(gate.width))
        .ptr(chunk.header);
    let args = out(args, to, chunk.rows);
    let mut launch = launch("prefill_swiglu", gate.width, chunk, args);
    launch.unit = ffn::with_function(launch.unit, activation);
    launch
}
