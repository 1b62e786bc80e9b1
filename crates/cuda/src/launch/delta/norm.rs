//! The output norm of the delta rule and the forms in which its rows are wanted.

use super::{Layer, Rows, Shape, dim, launch, row_args};
use crate::launch::{Args, Launch};

/// Heads of a block, a warp each.
const HEADS: usize = 8;

/// Where the rows `[rows][n_v_heads * 128]` go, one address per form; 0 is a form that is not wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Out {
    /// f32 rows.
    pub f32: u64,
    /// Quantised to 8 bits: values, scales, sums, as `kernels/matmul/a8.cuh` lays them out.
    pub a8: [u64; 3],
    /// f16 rows.
    pub f16: u64,
    /// bf16 rows.
    pub bf16: u64,
    /// f16 panels (`kernels/prefill/panel.cuh`): address, and the rows a panel has room for.
    pub panel: (u64, usize),
}

/// `rms(o) * norm * silu(z)` head by head for the true rows of a step, in every form of `out`.
///
/// `o` is `[rows][n_v_heads * 128]`, `z` likewise.
pub fn gated_norm(
    shape: Shape,
    rows: usize,
    step: u64,
    layer: &Layer,
    o: Rows,
    z: Rows,
    out: &Out,
) -> Launch {
    let wanted = |address: u64| u8::from(address != 0);
    let unit = shape
        .unit("delta/gated_norm.cu")
        .define("OUT_F32", wanted(out.f32))
        .define("OUT_A8", wanted(out.a8[0]))
        .define("OUT_F16", wanted(out.f16))
        .define("OUT_BF16", wanted(out.bf16))
        .define("OUT_PANEL", wanted(out.panel.0));
    let args = row_args(row_args(Args::new().ptr(step), o), z);
    let args = args.ptr(layer.norm).f32(layer.eps).ptr(out.f32);
    let args = out.a8.iter().fold(args, |args, part| args.ptr(*part));
    let args = args.ptr(out.f16).ptr(out.bf16);
    let args = args.ptr(out.panel.0).u32(dim(out.panel.1));
    let grid = [shape.n_v_heads.div_ceil(HEADS), rows, 1];
    launch("gated_norm", unit, grid, dim(32 * HEADS), args)
}
