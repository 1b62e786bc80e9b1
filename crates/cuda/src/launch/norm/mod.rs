//! RMSNorm, residual, and the formats in which GEMMs read their inputs.

pub mod panels;

use super::{Args, CompileUnit, Launch};

/// The rows of a launch: a header in device memory, by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowSource {
    /// A `Step`: all its rows.
    Step(u64),
    /// A `Chunk`: all its rows.
    Chunk(u64),
    /// A `Step`: row `i` of the result comes from row `logits_row[i]`, `i < n_logits_rows`.
    LogitsRowsOfStep(u64),
    /// The same of a `Chunk`.
    LogitsRowsOfChunk(u64),
}

impl RowSource {
    /// The header's address.
    pub fn header(self) -> u64 {
        match self {
            RowSource::Step(at)
            | RowSource::Chunk(at)
            | RowSource::LogitsRowsOfStep(at)
            | RowSource::LogitsRowsOfChunk(at) => at,
        }
    }

    /// The define of `kernels/norm/source_rows.cuh`.
    pub(in crate::launch) fn number(self) -> u32 {
        match self {
            RowSource::Step(_) => 0,
            RowSource::Chunk(_) => 1,
            RowSource::LogitsRowsOfStep(_) => 2,
            RowSource::LogitsRowsOfChunk(_) => 3,
        }
    }
}

/// Device addresses of an activation in each format; 0 for a format that is not needed.
///
/// Blocked f16 is laid out by `kernels/gemm/a16_layout.cuh` for the rows of the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationBuffers {
    /// Plain f32 rows.
    pub f32: u64,
    /// Blocked f16.
    pub f16: u64,
}

impl ActivationBuffers {
    /// Only f32 rows.
    pub fn f32(at: u64) -> ActivationBuffers {
        ActivationBuffers {
            f32: at,
            ..ActivationBuffers::default()
        }
    }

    /// Adds the defines of `kernels/norm/row_output.cuh`.
    pub(in crate::launch) fn define(
        self,
        unit: CompileUnit,
        width: usize,
        rows: usize,
    ) -> CompileUnit {
        let wanted = |at: u64| u32::from(at != 0);
        unit.define("WIDTH", width)
            .define("N8_TILES", rows.div_ceil(8))
            .define("OUT_F32", wanted(self.f32))
            .define("OUT_F16", wanted(self.f16))
    }

    /// The `Out` of the kernels.
    pub(in crate::launch) fn words(self) -> [u64; 2] {
        [self.f32, self.f16]
    }
}

/// Shape of a norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsShape {
    /// Values of a row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// `x += update` where `update` is not 0, then `rms_norm(x) * weight` into `out`.
///
/// `x` and `update` are f32 `[rows][width]`, `weight` f32 `[width]`. With logits rows there is no
/// update.
pub fn rms_norm(
    shape: RmsShape,
    rows: usize,
    source: RowSource,
    x: Residual,
    weight: u64,
    out: ActivationBuffers,
) -> Launch {
    let buffers = RmsNormBuffers {
        x,
        weight,
        scales: 0,
        out,
    };
    rms_norm_and_scales(shape, rows, source, buffers)
}

/// Device memory of [`rms_norm_and_scales`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RmsNormBuffers {
    /// The input.
    pub x: Residual,
    /// f32 `[width]`.
    pub weight: u64,
    /// f32 `[rows]`: the scale of each row, `1 / sqrt(mean(x^2) + eps)`; 0 if not needed.
    pub scales: u64,
    /// The result.
    pub out: ActivationBuffers,
}

/// As [`rms_norm`], with the scale of each row if `buffers` has room for them.
pub fn rms_norm_and_scales(
    shape: RmsShape,
    rows: usize,
    source: RowSource,
    buffers: RmsNormBuffers,
) -> Launch {
    let RmsNormBuffers {
        x,
        weight,
        scales,
        out,
    } = buffers;
    let gathers = source.number() >= 2;
    assert!(
        !(gathers && x.update != 0),
        "a gathered norm writes nothing back"
    );
    assert!(
        out != ActivationBuffers::default(),
        "a norm without a result"
    );
    let warps = warps(shape.width);
    let unit = CompileUnit::new("norm/rms_norm.cu")
        .define("SOURCE", source.number())
        .define("UPDATE", u32::from(x.update != 0))
        .define("NORM_WARPS", warps);
    Launch {
        entry: "rms_norm",
        unit: out.define(unit, shape.width, rows),
        grid: [rows as u32, 1, 1],
        block: [warps as u32 * 32, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(source.header())
            .ptr(x.rows)
            .ptr(x.update)
            .ptr(weight)
            .f32(shape.eps)
            .words(&out.words())
            .ptr(scales),
        cooperative: false,
        overlap: true,
    }
}

/// Warps that sum the squares of a row of `width` values.
///
/// # Panics
/// If rows are wider than a block holds.
pub(in crate::launch) fn warps(width: usize) -> usize {
    let groups = width.div_ceil(256);
    assert!(
        (1..=256).contains(&groups),
        "rows of {width} values are wider than a block holds"
    );
    // Two groups per warp leave registers for a block of the next GEMM beside a wide row's block.
    let per_warp = match groups {
        0..=8 => 1,
        _ => groups.div_ceil(32).max(2),
    };
    groups.div_ceil(per_warp)
}

/// The residual stream, and an update that is added first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residual {
    /// f32 `[rows][width]`.
    pub rows: u64,
    /// f32 `[rows][width]`, or 0 for nothing.
    pub update: u64,
}

impl Residual {
    /// A stream without an update.
    pub fn of(rows: u64) -> Residual {
        Residual { rows, update: 0 }
    }
}

/// f32 rows `x` `[rows][width]` in other formats.
pub fn convert(
    width: usize,
    rows: usize,
    source: RowSource,
    x: u64,
    out: ActivationBuffers,
) -> Launch {
    assert!(
        out != ActivationBuffers::default(),
        "a conversion without a result"
    );
    let unit = CompileUnit::new("norm/rms_norm.cu")
        .define("SOURCE", source.number())
        .define("NORM_WARPS", 0);
    Launch {
        entry: "convert_rows",
        unit: out.define(unit, width, rows),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new().ptr(source.header()).ptr(x).words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}

/// `x += rms_norm(update) * weight` of f32 rows `[rows][width]`: the norm behind a block, and the
/// residual. `weight` is f32 `[width]`.
pub fn add_normed(
    shape: RmsShape,
    rows: usize,
    source: RowSource,
    to: Residual,
    weight: u64,
) -> Launch {
    let warps = warps(shape.width);
    Launch {
        entry: "add_normed",
        unit: CompileUnit::new("norm/add_normed.cu")
            .define("SOURCE", source.number())
            .define("WIDTH", shape.width)
            .define("N8_TILES", 0)
            .define("OUT_F32", 0)
            .define("OUT_F16", 0)
            .define("NORM_WARPS", warps),
        grid: [rows as u32, 1, 1],
        block: [warps as u32 * 32, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(source.header())
            .ptr(to.rows)
            .ptr(to.update)
            .ptr(weight)
            .f32(shape.eps),
        cooperative: false,
        overlap: true,
    }
}
