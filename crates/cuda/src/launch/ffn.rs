//! The gated unit between the projections of a feed-forward.

use contract::GateActivation;

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

/// `f(gate) * up` into `out`, `width` values a row, with the function of `activation`.
///
/// `gate` and `up` are f32 rows, `stride` floats apart: two matrices, or two halves of one.
pub fn gated_unit(
    (width, rows): (usize, usize),
    source: RowSource,
    from: GateUp,
    activation: GateActivation,
    out: ActivationBuffers,
) -> Launch {
    let GateUp { gate, up, stride } = from;
    assert!(
        stride >= width,
        "rows of {width} values cannot be {stride} apart"
    );
    let unit = CompileUnit::new("ffn/gated_unit.cu")
        .define("SOURCE", source.number())
        .define("STRIDE", stride);
    let unit = with_function(unit, activation);
    Launch {
        entry: "gated_unit_rows",
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

/// Adds the define of `kernels/ffn/gate_function.cuh`.
pub(in crate::launch) fn with_function(
    unit: CompileUnit,
    activation: GateActivation,
) -> CompileUnit {
    match activation {
        GateActivation::Silu => unit,
        GateActivation::GeluTanh => unit.define("GELU", 1),
    }
}
