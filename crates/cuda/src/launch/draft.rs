//! Launches of a draft beside those that it shares with its target.
//!
//! A draft block is a `Step` of a block's nodes per tree, tokens `[root, mask, …]`, node `i` at
//! position `committed + i`; its attention is [`super::attention`] with a window, a block mask and
//! a ring of pages. Context keys and values are written once, when tokens are committed.

mod candidates;
mod sublayer;

use super::attention::{
    AppendTarget, Cache, PAGE, Positions, Projections, Shape, qk_norm_rope_append,
};
use super::norm::{ActivationBuffers, RowSource};
use super::{Args, CompileUnit, Launch};

pub use candidates::{
    CHAIN_STATES, ChainConfidence, ChainSelect, ChainStates, PairScores, chain_bias,
    transform_logits,
};
pub use sublayer::{BlockConv, FinishBuffers, convolve_input, finish};

/// Pages of a ring in which a window and the rows of a block never overlap.
pub fn ring_pages(window: usize, block_rows: usize) -> usize {
    (window + block_rows).div_ceil(PAGE)
}

/// Where captured hidden states go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureTarget {
    /// f32 rows.
    pub out: u64,
    /// Floats between them.
    pub stride: usize,
    /// First column.
    pub offset: usize,
    /// Whether a step's rows go to the feature rows of their tree in the header, instead of in
    /// sequence.
    pub to_feature_pool: bool,
}

/// Copies the residual stream `x` f32 `[rows][width]` to the columns of `to`.
pub fn capture_hidden_states(
    width: usize,
    rows: usize,
    source: RowSource,
    x: u64,
    to: CaptureTarget,
) -> Launch {
    assert!(
        [width, to.stride, to.offset]
            .iter()
            .all(|n| n.is_multiple_of(4))
            && to.offset + width <= to.stride
            && (!to.to_feature_pool || matches!(source, RowSource::Step(_))),
        "a capture of {width} values of {source:?} at {to:?}"
    );
    Launch {
        entry: "capture_hidden_states",
        unit: CompileUnit::new("draft/capture_hidden_states.cu")
            .define("WIDTH", width)
            .define("STRIDE", to.stride)
            .define("OFFSET", to.offset)
            .define("TO_FEATURE_POOL", u8::from(to.to_feature_pool)),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new().ptr(source.header()).ptr(x).ptr(to.out),
        cooperative: false,
        overlap: true,
    }
}

/// Captured hidden states of all slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapturedStates {
    /// f32 `[slots][rows_per_slot][width]`.
    pub at: u64,
    /// Values of a row.
    pub width: usize,
    /// Rows of a slot.
    pub rows_per_slot: usize,
}

/// The rows of the paths of the `Commit` at `commit`, one path after the other, in the forms of
/// `out`.
///
/// `rows` is the maximum of all paths together.
pub fn path_rows(from: CapturedStates, rows: usize, commit: u64, out: ActivationBuffers) -> Launch {
    let CapturedStates {
        at,
        width,
        rows_per_slot,
    } = from;
    Launch {
        entry: "draft_gather_path_rows",
        unit: out.define(
            CompileUnit::new("draft/gather_path_rows.cu").define("FEATURE_ROWS", rows_per_slot),
            width,
            rows,
        ),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new().ptr(commit).ptr(at).words(&out.words()),
        cooperative: false,
        overlap: true,
    }
}

/// Context keys (normed, with RoPE) and values of committed tokens, into the draft's cache.
///
/// Rows are those of `positions`: a chunk's, or the entries of a commit's paths. `from.q` must be
/// 0.
pub fn context(
    shape: &Shape,
    rows: usize,
    positions: Positions,
    from: Projections,
    cache: Cache,
) -> Launch {
    assert!(
        from.q == 0 && !matches!(positions, Positions::Step(_)),
        "context has no queries and is committed"
    );
    let to = AppendTarget {
        cache,
        f16_queries: 0,
    };
    qk_norm_rope_append(shape, rows, positions, from, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_holds_a_window_and_a_block() {
        assert_eq!(ring_pages(2048, 16), 9);
        assert_eq!(ring_pages(240, 16), 1);
    }
}
