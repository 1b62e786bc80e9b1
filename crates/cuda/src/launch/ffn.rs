//! The gated unit between the projections of a feed-forward.

use super::norm::{ActivationBuffers, RowSource};
use super::{Args, CompileUnit, Launch};

/// Outputs of the gate and up projections: f32 rows, `stride` floats apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateUp {
    /// Address of the gate's rows.
    pub gate: u64,
    /// Address of up's rows.
    pub up: u64,
    /// Floats from a row to the next of either.
    pub stride: usize,
}

/// `silu(gate) * up` into `out`, `width` values a row.
///
/// `gate` and `up` are f32 rows, `stride` floats apart: two matrices, or two halves of one.
pub fn swiglu(
    width: usize,
    rows: usize,
    source: RowSource,
    from: GateUp,
    out: ActivationBuffers,
) -> Launch {
    let GateUp { gate, up, stride } = from;
    assert!(
        stride >= width,
        "rows of {width} values cannot be {stride} apart"
    );
    let unit = CompileUnit::new("ffn/swiglu.cu")
        .define("SOURCE", source.number())
        .define("STRIDE", stride);
    Launch {
        entry: "swiglu_rows",
        unit: out.define(unit, width, rows),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(source.header())
            .ptr(gate)
            .ptr(up)
            .words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}
