//! The two ends of a draft's sublayer that is convolved, or normed before the residual.

use crate::launch::norm::{ActivationBuffers, warps};
use crate::launch::{Args, CompileUnit, Launch};

/// The dynamic convolution of a sublayer, on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockConv {
    /// f32 `[2][taps][width]`.
    pub base: u64,
    /// f32 `[rows][2][taps][width / group]`, from the sublayer's normed input.
    pub dynamic: u64,
    /// Rows that one output row sums.
    pub taps: usize,
    /// Consecutive channels that share the dynamic weights.
    pub group: usize,
}

impl BlockConv {
    fn define(self, unit: CompileUnit, width: usize) -> CompileUnit {
        assert!(
            self.taps > 0 && self.group > 0 && width.is_multiple_of(self.group),
            "a convolution of {width} channels: {self:?}"
        );
        unit.define("TAPS", self.taps).define("GROUP", self.group)
    }
}

/// The rows of the `Step` at `step`, f32 `[rows][width]`, through the input side of a convolution.
pub fn convolve_input(
    (width, rows): (usize, usize),
    step: u64,
    input: u64,
    conv: BlockConv,
    out: ActivationBuffers,
) -> Launch {
    assert!(
        width.is_multiple_of(8) && out != ActivationBuffers::default(),
        "a convolution of {width} channels into {out:?}"
    );
    let unit = conv.define(CompileUnit::new("draft/convolve_input.cu"), width);
    Launch {
        entry: "draft_convolve_input",
        unit: out.define(unit, width, rows),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(step)
            .ptr(input)
            .words(&[conv.base, conv.dynamic])
            .words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}

/// Device memory of [`finish`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FinishBuffers {
    /// The residual stream, f32 `[rows][width]`.
    pub x: u64,
    /// The sublayer's output, f32 `[rows][width]`.
    pub update: u64,
    /// The convolution at its output side.
    pub conv: Option<BlockConv>,
    /// f32 `[width]`: norm of the output; 0 for none.
    pub post_norm: u64,
    /// f32 `[width]`: norm before the next sublayer; 0 for none.
    pub next_norm: u64,
    /// The normed rows, with `next_norm`.
    pub out: ActivationBuffers,
}

/// Adds a sublayer's output to the residual stream of the rows of the `Step` at `step`, and norms
/// the sum for the next sublayer.
pub fn finish(
    (width, rows): (usize, usize),
    step: u64,
    eps: f32,
    buffers: FinishBuffers,
) -> Launch {
    let FinishBuffers {
        x,
        update,
        conv,
        post_norm,
        next_norm,
        out,
    } = buffers;
    assert!(
        width.is_multiple_of(8) && (next_norm == 0) == (out == ActivationBuffers::default()),
        "a sublayer of {width} channels: {buffers:?}"
    );
    let warps = warps(width);
    let unit = CompileUnit::new("draft/finish_sublayer.cu")
        .define("NORM_WARPS", warps)
        .define("POST_NORM", u32::from(post_norm != 0))
        .define("NEXT_NORM", u32::from(next_norm != 0));
    let (unit, conv) = match conv {
        Some(conv) => (conv.define(unit, width), [conv.base, conv.dynamic]),
        None => (unit.define("TAPS", 0), [0; 2]),
    };
    Launch {
        entry: "draft_finish_sublayer",
        unit: out.define(unit, width, rows),
        grid: [rows as u32, 1, 1],
        block: [warps as u32 * 32, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(step)
            .ptr(x)
            .ptr(update)
            .words(&conv)
            .ptr(post_norm)
            .ptr(next_norm)
            .f32(eps)
            .words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}
