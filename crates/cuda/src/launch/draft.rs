//! What a draft needs beside the kernels it shares with its target.
//!
//! A draft block is a `Step` of 16 nodes per tree, tokens `[root, mask, …]`, node `i` at position
//! `committed + i`; its attention is [`super::attention`] with a window, a block mask and a ring of
//! pages. Context keys and values are written once, when tokens are committed.

use super::attention::{Cache, PAGE, Positions, Projections, Shape, qk_norm_rope_append};
use super::norm::ActivationBuffers;
use super::{Args, Launch, Unit};

/// Pages that a ring needs so that a window and the rows of a block never share a place.
pub fn ring_pages(window: usize, block_rows: usize) -> usize {
    (window + block_rows).div_ceil(PAGE)
}

/// The rows of the paths of the `Commit` at `commit`, one path after the other, in the forms of
/// `out`.
///
/// `x` is f32 `[slots][kept][width]`, captured hidden states; `rows` is the maximum of all paths
/// together.
pub fn path_rows(
    width: usize,
    kept: usize,
    rows: usize,
    (commit, x): (u64, u64),
    out: ActivationBuffers,
) -> Launch {
    Launch {
        entry: "draft_gather_path_rows",
        unit: out.define(
            Unit::new("draft/gather_path_rows.cu").define("FEATURE_ROWS", kept),
            width,
            rows,
        ),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [128, 1, 1],
        shared: 0,
        args: Args::new().ptr(commit).ptr(x).words(&out.words()),
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
    qk_norm_rope_append(shape, rows, positions, from, (cache, 0))
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
