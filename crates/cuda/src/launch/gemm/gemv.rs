//! GEMVs of one row with the norm before them, or SwiGLU after them, in one launch of
//! `gemm/gemv.cu`.
//!
//! The bits are those of [`norm::rms_norm`], [`super::small_batch::launches`] and
//! [`crate::launch::ffn::gated_unit`] in sequence. Every block loads all of its weights before it
//! waits for its predecessor, so steps of small models, which are bound by launches and not by
//! memory, take less time.

use super::f32_split::F32GemmInput;
use super::small_batch::{
    GemmEpilogue, GemmMatrix, MAX_MATRICES, f32_params, gemm_shared_bytes, kinds_of, launch_groups,
    work_ranges,
};
use super::words::{narrow, pair};
use crate::gpu_props::GpuProps;
use crate::launch::norm::{self, ActivationBuffers};
use crate::launch::{Args, CompileUnit, Launch};
use crate::pack::{M16_ROWS, WeightKind};

/// Rows of a tile of `gemm/decode_gemm_small_batch.cu`.
const SMALL_BATCH_TILE_ROWS: usize = 256;
/// Rows of an f32 matrix per block.
const F32_ROWS: usize = 8;
/// Bytes of the partial sums of a tile's rows over one K range, and of its begin.
const SUM_BYTES: usize = 4 * M16_ROWS + 4;
/// Maximum K range of a partial sum, which one warp computes. With longer ranges, as in large
/// models, the wait for that warp costs more than the saved launches.
const MAX_SLICE_VALUES: usize = 1024;
/// Other shared memory of a block, in bytes, at most.
const FIXED_SHARED: usize = 1024;
/// Words of `Matrix` in `gemm/gemv.cu`.
const MATRIX_WORDS: usize = 6;

/// The input row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GemvInput {
    /// f16, blocked for a bucket of one row.
    F16(u64),
    /// The norm of f32 values at `row`, by f32 `[cols]` at `weight`.
    RmsNorm {
        /// f32 `[cols]`.
        row: u64,
        /// f32 `[cols]`.
        weight: u64,
        /// Added to the mean square.
        eps: f32,
    },
}

/// What the kernel does with the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemvEpilogue {
    /// Each result goes to its matrix's output.
    Store,
    /// `silu(gate) * up` of two matrices, gate and up, as f16 at this address; their own outputs
    /// are not written.
    SwiGlu(u64),
}

/// The packed matrices of a launch.
struct PackedMatrices {
    /// `Matrix` structs of `gemm/gemv.cu`.
    words: Vec<u64>,
    /// The work ranges of `gemm/decode_gemm_small_batch.cu`, which give the K ranges.
    work_ranges: u64,
    /// Blocks of the launch for these matrices.
    blocks: usize,
    /// Bytes of the weights of the largest tile.
    weight_bytes: usize,
    /// Maximum partial sums of a tile.
    sums: usize,
    /// Values of K in the longest partial sum.
    longest_slice: usize,
}

impl PackedMatrices {
    /// `first`: the block that has the first tile.
    fn new(
        gpu: GpuProps,
        cols: usize,
        packed: &[GemmMatrix],
        first: usize,
        results: GemvEpilogue,
    ) -> PackedMatrices {
        let cost = |s: &GemmMatrix| SMALL_BATCH_TILE_ROWS / M16_ROWS * s.kind.tile_bytes() / 16;
        let cost_of =
            |s: &GemmMatrix| s.kind.units(cols) * s.rows.div_ceil(SMALL_BATCH_TILE_ROWS) * cost(s);
        let length: usize = packed.iter().map(cost_of).sum();
        let max_unit_cost = packed.iter().map(cost).max().unwrap_or(1).max(1);
        let mut line = PackedMatrices {
            words: Vec::new(),
            work_ranges: work_ranges(gpu, length, max_unit_cost),
            blocks: 0,
            weight_bytes: 0,
            sums: 0,
            longest_slice: 0,
        };
        let share = (line.work_ranges & 0xffff_ffff) as usize + 1;
        let mut first_cost = 0;
        for matrix in packed {
            let units = matrix.kind.units(cols);
            let out = match results {
                GemvEpilogue::Store => matrix.out,
                GemvEpilogue::SwiGlu(halves) => halves,
            };
            line.words.extend([
                matrix.weight,
                out,
                pair(matrix.rows, usize::from(matrix.write == GemmEpilogue::Add)),
                pair(matrix.kind as usize, units),
                pair(first + line.blocks, matrix.kind.tile_bytes()),
                pair(first_cost, cost(matrix)),
            ]);
            let longest_slice = units.min(share.div_ceil(cost(matrix))) * matrix.kind.unit_values();
            line.longest_slice = line.longest_slice.max(longest_slice);
            let bytes = units * matrix.kind.tile_bytes();
            line.weight_bytes = line.weight_bytes.max(bytes);
            for tile in 0..matrix.rows.div_ceil(SMALL_BATCH_TILE_ROWS) {
                let begin = first_cost + tile * units * cost(matrix);
                let last = begin + (units - 1) * cost(matrix);
                let parts =
                    block_of(line.work_ranges, last) - block_of(line.work_ranges, begin) + 1;
                line.sums = line.sums.max(parts);
            }
            first_cost += cost_of(matrix);
            // With SwiGLU the blocks of gate have the tiles of up too.
            if results == GemvEpilogue::Store || line.blocks == 0 {
                line.blocks += matrix.rows.div_ceil(M16_ROWS);
            }
        }
        line
    }
}

/// The block of `gemm/decode_gemm_small_batch.cu` whose work range contains `cost`.
pub(in crate::launch) fn block_of(work_ranges: u64, cost: usize) -> usize {
    let (share, extra) = (
        (work_ranges & 0xffff_ffff) as usize,
        (work_ranges >> 32) as usize,
    );
    let wide = extra * (share + 1);
    if cost < wide {
        cost / (share + 1)
    } else {
        extra + (cost - wide) / share
    }
}

/// Rows of an f32 matrix in a block: the most that take no more than `packed_bytes`.
fn f32_rows(cols: usize, packed_bytes: usize) -> usize {
    let fits = |rows: &usize| 4 * rows * cols <= packed_bytes;
    [F32_ROWS, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// The launch that multiplies one row of `cols` values by every matrix. `None` if a block has too
/// little shared memory, shapes are not multiples of the tiles, or separate launches are faster.
pub fn launch(
    gpu: GpuProps,
    cols: usize,
    matrices: &[GemmMatrix],
    input: GemvInput,
    results: GemvEpilogue,
) -> Option<Launch> {
    let kinds: Vec<WeightKind> = matrices.iter().map(|s| s.kind).collect();
    let (bits, has_f32) = kinds_of(&kinds);
    let gated = matches!(results, GemvEpilogue::SwiGlu(_));
    let normed = matches!(input, GemvInput::RmsNorm { .. });
    let whole = match matrices {
        [gate, up] if gated => {
            (gate.kind, gate.rows) == (up.kind, up.rows)
                && !has_f32
                && gate.rows.is_multiple_of(SMALL_BATCH_TILE_ROWS)
        }
        _ => !gated,
    };
    let fits = cols.is_multiple_of(256)
        && (1..=MAX_MATRICES).contains(&matrices.len())
        && bits != 0
        && (normed || !has_f32)
        && launch_groups(gpu, matrices).len() == 1;
    if !(whole && fits) {
        return None;
    }
    let (f32_matrices, packed): (Vec<GemmMatrix>, Vec<GemmMatrix>) =
        matrices.iter().partition(|s| s.kind == WeightKind::F32);
    let groups: usize = f32_matrices.iter().map(|s| s.rows.div_ceil(F32_ROWS)).sum();
    // All blocks have the shared memory of the largest.
    let packed_bytes = packed
        .iter()
        .map(|s| s.kind.units(cols) * s.kind.tile_bytes());
    let f32_rows = f32_rows(cols, packed_bytes.max().unwrap_or(0));
    let f32_blocks = groups * F32_ROWS / f32_rows;
    let line = PackedMatrices::new(gpu, cols, &packed, f32_blocks, results);
    let weight_bytes = if has_f32 {
        line.weight_bytes.max(4 * f32_rows * cols)
    } else {
        line.weight_bytes
    };
    let tiles = if gated { 2 } else { 1 };
    let floats = if has_f32 { 4 * cols } else { 0 };
    let shared = tiles * (weight_bytes + line.sums * SUM_BYTES) + 2 * cols + floats;
    if shared + FIXED_SHARED > gemm_shared_bytes(gpu) || line.longest_slice > MAX_SLICE_VALUES {
        return None;
    }
    let (x, weight, eps) = match input {
        GemvInput::F16(at) => (at, 0, 0.0),
        GemvInput::RmsNorm { row, weight, eps } => (row, weight, eps),
    };
    let mut words = line.words;
    words.resize(MAX_MATRICES * MATRIX_WORDS, 0);
    words.extend([
        x,
        weight,
        line.work_ranges,
        pair(packed.len(), 0) | u64::from(eps.to_bits()) << 32,
        pair(weight_bytes, line.sums),
    ]);
    if has_f32 {
        let input = F32GemmInput {
            x,
            cols,
            partials: 0,
        };
        words.extend(f32_params(gpu, &f32_matrices, input));
    }
    let warps: usize = if tiles * line.sums <= 8 { 8 } else { 16 };
    let unit = CompileUnit::new("gemm/gemv.cu")
        .define("WARPS", warps)
        .define("KINDS", bits)
        .define("MAX_MATRICES", MAX_MATRICES)
        .define("F32_MATRICES", u8::from(has_f32))
        .define("F32_ROWS", f32_rows)
        .define("NORM", u8::from(normed))
        .define("NORM_WARPS", if normed { norm::warps(cols) } else { 1 })
        .define("SWIGLU", u8::from(gated));
    Some(Launch {
        entry: "gemv_batch_1",
        unit: ActivationBuffers::default().define(unit, cols, 1),
        grid: [narrow(f32_blocks + line.blocks), 1, 1],
        block: [narrow(32 * warps), 1, 1],
        shared: narrow(shared),
        args: Args::new().words(&words),
        cooperative: false,
        overlap: true,
    })
}
