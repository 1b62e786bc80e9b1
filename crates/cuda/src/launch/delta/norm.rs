//! The output norm of the delta rule and the forms in which its rows are wanted.

use super::{Layer, Rows, Shape, dim, launch, row_args};
use crate::launch::{Args, Launch};

/// Groups of 256 values in a block, a warp each.
const GROUPS: usize = 4;

/// Where the rows `[rows][n_v_heads * 128]` go, one address per form; 0 is a form that is not wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Out {
    /// f32 rows.
    pub f32: u64,
    /// 8-bit codes of `kernels/matmul/a8.cuh`, laid out for the bucket's rows.
    pub a8: u64,
    /// bf16 of `kernels/matmul/a8.cuh`.
    pub bf16: u64,
    /// f16 of `kernels/matmul/a8.cuh`.
    pub f16: u64,
    /// f16 panels of `kernels/prefill/panel.cuh`: the address, and the rows a panel has room for.
    pub panel: (u64, usize),
}

/// Which header says how many rows there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Address of a `Step`.
    Step(u64),
    /// Address of a `Chunk`.
    Chunk(u64),
}

/// `rms(o) * norm * silu(z)` head by head for the true rows, in every form of `out`.
///
/// `o` and `z` are `[rows][n_v_heads * 128]`; `rows` is the bucket or the capacity of a chunk.
pub fn gated_norm(
    shape: Shape,
    rows: usize,
    source: Source,
    layer: &Layer,
    [o, z]: [Rows; 2],
    out: &Out,
) -> Launch {
    let wanted = |address: u64| u8::from(address != 0);
    let (kind, header) = match source {
        Source::Step(address) => (0, address),
        Source::Chunk(address) => (1, address),
    };
    let unit = shape
        .unit("delta/gated_norm.cu")
        .define("SOURCE", kind)
        .define("N_TILES", rows.div_ceil(8))
        .define("OUT_F32", wanted(out.f32))
        .define("OUT_A8", wanted(out.a8))
        .define("OUT_BF16", wanted(out.bf16))
        .define("OUT_F16", wanted(out.f16))
        .define("OUT_PANEL", wanted(out.panel.0));
    let args = row_args(row_args(Args::new().ptr(header), o), z);
    let args = args.ptr(layer.norm).f32(layer.eps);
    let args = args.words(&[out.f32, out.a8, out.bf16, out.f16]);
    let args = args.ptr(out.panel.0).u32(dim(out.panel.1));
    let groups = shape.values().div_ceil(256);
    let grid = [groups.div_ceil(GROUPS), rows, 1];
    launch("gated_norm", unit, grid, dim(32 * GROUPS), args)
}
