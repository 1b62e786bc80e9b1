//! The output norm of the delta rule and the forms in which its rows are wanted.

use super::{Layer, Shape, StridedRows, dim, launch, row_args};
use crate::launch::gemm::panels::Panels;
use crate::launch::norm::ActivationBuffers;
use crate::launch::{Args, Launch};

/// Groups of 256 values in a block, a warp each.
const GROUPS: usize = 4;

/// Where the rows `[rows][n_v_heads * 128]` go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GatedNormOutput {
    /// In the forms of the products of few rows.
    pub activations: ActivationBuffers,
    /// f16 panels of `kernels/gemm/panel_layout.cuh`, if they are needed.
    pub panels: Option<Panels>,
}

impl GatedNormOutput {
    /// Only those forms.
    pub fn of(activations: ActivationBuffers) -> GatedNormOutput {
        GatedNormOutput {
            activations,
            ..GatedNormOutput::default()
        }
    }
}

/// Which header says how many rows there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatedDeltaRows {
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
    source: GatedDeltaRows,
    layer: &Layer,
    [o, z]: [StridedRows; 2],
    out: &GatedNormOutput,
) -> Launch {
    let (kind, header) = match source {
        GatedDeltaRows::Step(address) => (0, address),
        GatedDeltaRows::Chunk(address) => (1, address),
    };
    let unit = shape
        .unit("gated_delta/gated_norm.cu")
        .define("SOURCE", kind)
        .define("OUT_PANEL", u8::from(out.panels.is_some()));
    let unit = out.activations.define(unit, shape.values(), rows);
    let args = row_args(row_args(Args::new().ptr(header), o), z);
    let args = args.ptr(layer.norm).f32(layer.eps);
    let args = args.words(&out.activations.words());
    let (at, rows_of_panel) = out.panels.map_or((0, 0), |panels| (panels.at, panels.rows));
    let args = args.ptr(at).u32(dim(rows_of_panel));
    let groups = shape.values().div_ceil(256);
    let grid = [groups.div_ceil(GROUPS), rows, 1];
    launch("gated_delta_norm", unit, grid, dim(32 * GROUPS), args)
}
