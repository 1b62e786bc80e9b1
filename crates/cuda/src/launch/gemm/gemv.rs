//! Products of one row with the norm before them, or the gated unit behind them, in one launch of
//! `gemm/gemv.cu`.
//!
//! The bits are those of [`norm::rms`], [`super::small_batch::launches`] and
//! [`crate::launch::ffn::swiglu`] in sequence. Every block loads all of its weights before it waits
//! for its predecessor, so steps of small models, which are bound by launches and not by memory,
//! take less time.

use super::small_batch::{
    MAX_SEGMENTS, Segment, Write, gemm_shared_bytes, kinds_of, narrow, pair, parts, plain_words,
    shares,
};
use crate::gpu_props::GpuProps;
use crate::launch::norm::{self, Out};
use crate::launch::{Args, Launch, Unit};
use crate::pack::WeightKind;

/// Rows of a tile, which a block has.
const TILE_ROWS: usize = 16;
/// Rows that `gemm/decode_gemm_small_batch.cu` cuts together.
const CUT_ROWS: usize = 256;
/// Rows of an f32 matrix that a block has.
const PLAIN_ROWS: usize = 8;
/// Bytes of the sums of a tile's rows between two cuts, and of where they begin.
const SUM_BYTES: usize = 4 * TILE_ROWS + 4;
/// Values of K in the longest sum between two cuts, which one warp has: with more, the wait for it
/// is longer than what is gained, as on large models, whose products wait for memory.
const MOST_VALUES: usize = 1024;
/// Shared memory of a block besides, in bytes, at most.
const OWN_SHARED: usize = 1024;
/// Words of `Matrix` in `gemm/gemv.cu`.
const SEGMENT_WORDS: usize = 6;

/// The row that is multiplied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Input {
    /// Halves, blocked for a bucket of one row.
    Halves(u64),
    /// The norm of f32 values at `row`, by f32 `[cols]` at `weight`.
    Normed {
        /// f32 `[cols]`.
        row: u64,
        /// f32 `[cols]`.
        weight: u64,
        /// Added to the mean square.
        eps: f32,
    },
}

/// What becomes of the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Results {
    /// Each goes to its segment's output.
    Each,
    /// `silu(gate) * up` of two segments, gate and up, as halves at this address; their own outputs
    /// are not written.
    Gated(u64),
}

/// The packed segments of a launch.
struct Line {
    /// `Matrix` structs of `gemm/gemv.cu`.
    words: Vec<u64>,
    /// Where `gemm/decode_gemm_small_batch.cu` cuts them.
    shares: u64,
    /// Blocks that have them.
    blocks: usize,
    /// Bytes of the weights of the largest tile.
    weight_bytes: usize,
    /// The most pieces that a tile's sums are cut into.
    sums: usize,
    /// Values of K in the longest.
    longest: usize,
}

impl Line {
    /// `first`: the block that has the first tile.
    fn new(gpu: GpuProps, cols: usize, packed: &[Segment], first: usize, results: Results) -> Line {
        let cost = |s: &Segment| CUT_ROWS / TILE_ROWS * s.kind.tile_bytes() / 16;
        let cost_of = |s: &Segment| s.kind.units(cols) * s.rows.div_ceil(CUT_ROWS) * cost(s);
        let length: usize = packed.iter().map(cost_of).sum();
        let dearest = packed.iter().map(cost).max().unwrap_or(1).max(1);
        let mut line = Line {
            words: Vec::new(),
            shares: shares(gpu, length, dearest),
            blocks: 0,
            weight_bytes: 0,
            sums: 0,
            longest: 0,
        };
        let share = (line.shares & 0xffff_ffff) as usize + 1;
        let mut first_cost = 0;
        for segment in packed {
            let units = segment.kind.units(cols);
            let out = match results {
                Results::Each => segment.out,
                Results::Gated(halves) => halves,
            };
            line.words.extend([
                segment.weight,
                out,
                pair(segment.rows, usize::from(segment.write == Write::Add)),
                pair(segment.kind as usize, units),
                pair(first + line.blocks, segment.kind.tile_bytes()),
                pair(first_cost, cost(segment)),
            ]);
            let longest = units.min(share.div_ceil(cost(segment))) * segment.kind.unit_values();
            line.longest = line.longest.max(longest);
            let bytes = units * segment.kind.tile_bytes();
            line.weight_bytes = line.weight_bytes.max(bytes);
            for tile in 0..segment.rows.div_ceil(CUT_ROWS) {
                let begin = first_cost + tile * units * cost(segment);
                let last = begin + (units - 1) * cost(segment);
                let pieces = block_of(line.shares, last) - block_of(line.shares, begin) + 1;
                line.sums = line.sums.max(pieces);
            }
            first_cost += cost_of(segment);
            // With a gated unit the blocks of gate have the tiles of up too.
            if results == Results::Each || line.blocks == 0 {
                line.blocks += segment.rows.div_ceil(TILE_ROWS);
            }
        }
        line
    }
}

/// The block of `gemm/decode_gemm_small_batch.cu` whose share holds `cost`.
fn block_of(shares: u64, cost: usize) -> usize {
    let (share, extra) = ((shares & 0xffff_ffff) as usize, (shares >> 32) as usize);
    let wide = extra * (share + 1);
    if cost < wide {
        cost / (share + 1)
    } else {
        extra + (cost - wide) / share
    }
}

/// The launch that multiplies one row of `cols` values by every segment, or `None` where it cannot
/// be or would be slow: where a block has too little shared memory, shapes are not whole, or
/// matrices are large.
pub fn launch(
    gpu: GpuProps,
    cols: usize,
    segments: &[Segment],
    input: Input,
    results: Results,
) -> Option<Launch> {
    let kinds: Vec<WeightKind> = segments.iter().map(|s| s.kind).collect();
    let (bits, has_plain) = kinds_of(&kinds);
    let gated = matches!(results, Results::Gated(_));
    let normed = matches!(input, Input::Normed { .. });
    let whole = match segments {
        [gate, up] if gated => {
            (gate.kind, gate.rows) == (up.kind, up.rows)
                && !has_plain
                && gate.rows.is_multiple_of(CUT_ROWS)
        }
        _ => !gated,
    };
    let fits = cols.is_multiple_of(256)
        && (1..=MAX_SEGMENTS).contains(&segments.len())
        && bits != 0
        && (normed || !has_plain)
        && parts(gpu, segments).len() == 1;
    if !(whole && fits) {
        return None;
    }
    let (plain, packed): (Vec<Segment>, Vec<Segment>) =
        segments.iter().partition(|s| s.kind == WeightKind::F32);
    let groups: usize = plain.iter().map(|s| s.rows.div_ceil(PLAIN_ROWS)).sum();
    let line = Line::new(gpu, cols, &packed, groups, results);
    let weight_bytes = if has_plain {
        line.weight_bytes.max(4 * PLAIN_ROWS * cols)
    } else {
        line.weight_bytes
    };
    let tiles = if gated { 2 } else { 1 };
    let floats = if has_plain { 4 * cols } else { 0 };
    let shared = tiles * (weight_bytes + line.sums * SUM_BYTES) + 2 * cols + floats;
    if shared + OWN_SHARED > gemm_shared_bytes(gpu) || line.longest > MOST_VALUES {
        return None;
    }
    let (x, weight, eps) = match input {
        Input::Halves(at) => (at, 0, 0.0),
        Input::Normed { row, weight, eps } => (row, weight, eps),
    };
    let mut words = line.words;
    words.resize(MAX_SEGMENTS * SEGMENT_WORDS, 0);
    words.extend([
        x,
        weight,
        line.shares,
        pair(packed.len(), 0) | u64::from(eps.to_bits()) << 32,
        pair(weight_bytes, line.sums),
    ]);
    if has_plain {
        words.extend(plain_words(gpu, cols, (&plain, MAX_SEGMENTS), x, 0));
    }
    let warps: usize = if tiles * line.sums <= 8 { 8 } else { 16 };
    let unit = Unit::new("gemm/gemv.cu")
        .define("WARPS", warps)
        .define("KINDS", bits)
        .define("MAX_MATRICES", MAX_SEGMENTS)
        .define("F32_MATRICES", u8::from(has_plain))
        .define("NORM", u8::from(normed))
        .define("NORM_WARPS", if normed { norm::warps(cols) } else { 1 })
        .define("SWIGLU", u8::from(gated));
    Some(Launch {
        entry: "gemv_batch_1",
        unit: Out::default().define(unit, cols, 1),
        grid: [narrow(groups + line.blocks), 1, 1],
        block: [narrow(32 * warps), 1, 1],
        shared: narrow(shared),
        args: Args::new().words(&words),
        cooperative: false,
        overlap: true,
    })
}
