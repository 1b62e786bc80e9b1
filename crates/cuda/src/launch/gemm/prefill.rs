//! GEMMs of a chunk's rows with matrices that share their input.

use super::panels::{ChunkRows, PANEL, Panels, TILE, count, int};
use super::small_batch::{GemmEpilogue, GemmMatrix};
use crate::launch::{Args, CompileUnit, Launch};
use crate::pack::{BLOCK_ROWS, WeightKind};

/// Rows of weights per tile: every matrix is padded to a multiple of this in the scratch.
const COLUMNS: usize = 256;
/// Matrices of one launch.
const MAX_MATRICES: usize = 4;

/// Rows and columns of a tile of an f32 GEMM.
const F32_ROWS: usize = 32;
const F32_COLUMNS: usize = 48;

/// The kernel of GEMMs over the rows of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillGemmKernel {
    /// `prefill_gemm.cu`: warp-level mma.
    Mma,
    /// `prefill_gemm_sm90.cu`: TMA and wgmma.
    Sm90,
}

impl PrefillGemmKernel {
    /// The source file.
    pub fn file(self) -> &'static str {
        match self {
            PrefillGemmKernel::Mma => "gemm/prefill_gemm.cu",
            PrefillGemmKernel::Sm90 => "gemm/prefill_gemm_sm90.cu",
        }
    }
}

/// A prefill GEMM with the multiprocessors that its persistent blocks fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillGemm {
    /// The kernel.
    pub kernel: PrefillGemmKernel,
    /// Blocks of a launch.
    pub sm_count: usize,
}

/// The input rows of all matrices; 0 for a format that no matrix reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillGemmInputs {
    /// Address of f16 panels, for packed kinds.
    pub panels: u64,
    /// f32 `[rows][cols]`, for F32 matrices.
    pub f32: u64,
}

/// Device memory that all prefill GEMMs share in sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DequantScratch {
    /// Dequantized weights as panels, 1024-byte aligned; need not be zeroed.
    pub weights: u64,
    /// Its bytes. More than [`dequantized_bytes`] is not used. Matrices that do not fit are
    /// dequantized in parts.
    pub weight_bytes: usize,
    /// [`split_k_flag_bytes`]; zero before the first launch, and left zero.
    pub split_k_flags: u64,
}

/// Bytes of the dequantized matrices of one input, from their rows and columns.
pub fn dequantized_bytes(rows: impl IntoIterator<Item = usize>, cols: usize) -> usize {
    let rows: usize = rows
        .into_iter()
        .map(|rows| rows.next_multiple_of(COLUMNS))
        .sum();
    rows * cols.next_multiple_of(PANEL) * 2
}

/// The least [`DequantScratch::weight_bytes`] for matrices of `cols` columns.
pub fn min_dequantized_bytes(cols: usize) -> usize {
    dequantized_bytes([COLUMNS], cols)
}

/// Bytes of [`DequantScratch::split_k_flags`] for chunks of up to `rows` rows and scratches of up
/// to `weight_bytes` bytes.
pub fn split_k_flag_bytes(rows: usize, weight_bytes: usize) -> usize {
    // A slice of 64 columns at least.
    rows.div_ceil(TILE) * (weight_bytes / (PANEL * 2)).div_ceil(TILE) * 4
}

/// K splits, from the matrix and the GPU alone: two if one leaves the last wave of a chunk of 2048
/// rows mostly idle.
fn splits(gemm: PrefillGemm, w_rows: usize, blocks: usize) -> usize {
    let tiles = 2048 / TILE * (w_rows / COLUMNS);
    let waste = |units: usize| {
        let waves = units.div_ceil(gemm.sm_count);
        (waves * gemm.sm_count) as f64 / units as f64
    };
    if blocks >= 32 && waste(2 * tiles) + 0.08 < waste(tiles) {
        2
    } else {
        1
    }
}

/// Columns of a tile of `prefill_gemm.cu`. A tile of 256 multiplies faster than two of 128, which
/// read x twice from shared memory; in waves that are mostly idle, small tiles finish earlier. The
/// bits are the same.
fn tile_columns(gemm: PrefillGemm, rows: usize, w_rows: usize, splits: usize) -> usize {
    let waves = |columns: usize| {
        let tiles = rows.div_ceil(TILE) * (w_rows / columns) * splits;
        tiles.div_ceil(gemm.sm_count)
    };
    // Tenths of the time of 128 columns of a large tile.
    if 13 * waves(TILE) < 20 * waves(COLUMNS) {
        TILE
    } else {
        COLUMNS
    }
}

/// Consecutive rows of a matrix in the scratch.
#[derive(Debug, Clone, Copy)]
struct MatrixPart {
    matrix: GemmMatrix,
    first: usize,
    rows: usize,
}

/// `out = W x`, or `out += W x`, for every matrix.
///
/// # Panics
/// If a matrix's input is missing, or the scratch is below [`min_dequantized_bytes`].
pub fn gemm(
    gemm: PrefillGemm,
    chunk: ChunkRows,
    cols: usize,
    matrices: &[GemmMatrix],
    inputs: PrefillGemmInputs,
    scratch: DequantScratch,
) -> Vec<Launch> {
    let mut launches = Vec::new();
    for write in [GemmEpilogue::Store, GemmEpilogue::Add] {
        let with = |f32_matrices: bool| {
            matrices
                .iter()
                .filter(move |s| s.write == write && (s.kind == WeightKind::F32) == f32_matrices)
        };
        let f32_matrices: Vec<GemmMatrix> = with(true).copied().collect();
        let of = |matrices: &[GemmMatrix]| f32_gemm(chunk, cols, matrices, inputs.f32);
        launches.extend(f32_matrices.chunks(MAX_MATRICES).map(of));
        for batch in batches(with(false).copied(), cols, scratch.weight_bytes) {
            let padded = |part: &MatrixPart| part.rows.next_multiple_of(COLUMNS);
            let w_rows: usize = batch.iter().map(padded).sum();
            let mut first = 0;
            for part in &batch {
                let slot = PanelSlot {
                    w_rows,
                    first,
                    step: 8,
                };
                launches.push(dequantize(*part, cols, scratch.weights, slot));
                first += padded(part);
            }
            let batch = DequantizedBatch {
                parts: &batch,
                cols,
                w_rows,
            };
            launches.push(multiply(gemm, chunk, batch, inputs.panels, scratch));
        }
    }
    launches
}

/// Gate and up of a SwiGLU, both `[ffn][cols]` and packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwiGluMatrices {
    /// Values of a row of either.
    pub cols: usize,
    /// Rows of either.
    pub ffn: usize,
    /// Layout and address of the gate.
    pub gate: (WeightKind, u64),
    /// Layout and address of up.
    pub up: (WeightKind, u64),
}

impl SwiGluMatrices {
    /// Whether [`gemm_swiglu`] serves these.
    pub fn fits(&self) -> bool {
        self.ffn.is_multiple_of(TILE)
            && self.gate.0 != WeightKind::F32
            && self.up.0 != WeightKind::F32
    }
}

/// `silu(gate x) * (up x)` as panels of `ffn` columns at `h`; `x` is the address of panels.
///
/// # Panics
/// Unless the matrices [fit](SwiGluMatrices::fits). Otherwise use [`gemm`] and
/// [`crate::launch::norm::panels::gated_unit`].
pub fn gemm_swiglu(
    gemm: PrefillGemm,
    chunk: ChunkRows,
    pair: SwiGluMatrices,
    x: u64,
    scratch: DequantScratch,
    h: u64,
) -> Vec<Launch> {
    assert!(pair.fits(), "SwiGLU GEMM of {pair:?}");
    let SwiGluMatrices { cols, ffn, .. } = pair;
    let room = scratch.weight_bytes / dequantized_bytes([COLUMNS], cols) * TILE;
    assert!(
        room > 0,
        "a scratch of {} bytes holds no tile of {cols} columns",
        scratch.weight_bytes
    );
    let cap = Panels::new(0, chunk.rows).rows;
    let mut launches = Vec::new();
    for first in (0..ffn).step_by(room) {
        let n = room.min(ffn - first);
        let w_rows = 2 * n;
        for (i, (kind, weight)) in [pair.gate, pair.up].into_iter().enumerate() {
            let matrix = GemmMatrix {
                kind,
                rows: ffn,
                weight,
                out: 0,
                stride: 0,
                write: GemmEpilogue::Store,
            };
            let slot = PanelSlot {
                w_rows,
                first: 8 * i,
                step: 16,
            };
            launches.push(dequantize(
                MatrixPart {
                    matrix,
                    first,
                    rows: n,
                },
                cols,
                scratch.weights,
                slot,
            ));
        }
        let to = h + (first / PANEL * cap * PANEL * 2) as u64;
        let args = Args::new()
            .ptr(x)
            .ptr(scratch.weights)
            .ptr(chunk.header)
            .i32(int(cap))
            .i32(int(w_rows))
            .i32(int(cols.div_ceil(PANEL)))
            .f32(1.0)
            .f32(1.0)
            .ptr(to);
        let columns = tile_columns(gemm, chunk.rows, w_rows, 1);
        launches.push(persistent(gemm, "prefill_gemm_swiglu", columns, args));
    }
    launches
}

/// Parts of matrices, grouped so that a group fits the scratch and a launch.
fn batches(
    matrices: impl Iterator<Item = GemmMatrix>,
    cols: usize,
    bytes: usize,
) -> Vec<Vec<MatrixPart>> {
    let room = bytes / dequantized_bytes([COLUMNS], cols) * COLUMNS;
    assert!(
        room > 0,
        "a scratch of {bytes} bytes holds no tile of {cols} columns"
    );
    let mut batches: Vec<Vec<MatrixPart>> = Vec::new();
    let mut left = 0;
    for matrix in matrices {
        let mut first = 0;
        while first < matrix.rows {
            let full = batches
                .last()
                .is_none_or(|batch| batch.len() == MAX_MATRICES);
            let whole = (matrix.rows - first).next_multiple_of(COLUMNS);
            // A matrix is divided only if it does not fit an empty scratch.
            if full || left == 0 || (whole > left && whole <= room) {
                batches.push(Vec::new());
                left = room;
            }
            let rows = left.min(matrix.rows - first);
            let part = MatrixPart {
                matrix,
                first,
                rows,
            };
            if let Some(batch) = batches.last_mut() {
                batch.push(part);
            }
            left -= rows.next_multiple_of(COLUMNS);
            first += rows;
        }
    }
    batches
}

/// Where the rows of a matrix go in the scratch.
#[derive(Debug, Clone, Copy)]
struct PanelSlot {
    /// Rows of a panel of the scratch.
    w_rows: usize,
    /// Row of the first.
    first: usize,
    /// Rows from a group of eight to the next.
    step: usize,
}

fn dequantize(part: MatrixPart, cols: usize, panels: u64, slot: PanelSlot) -> Launch {
    let MatrixPart {
        matrix,
        first,
        rows,
    } = part;
    assert!(
        first.is_multiple_of(BLOCK_ROWS),
        "parts begin at whole row blocks"
    );
    let (kind, units) = (matrix.kind, matrix.kind.units(cols));
    Launch {
        entry: "prefill_dequant",
        unit: CompileUnit::new("gemm/prefill_dequant.cu").define("WEIGHT_KIND", kind as u32),
        grid: [count(units), count(rows.div_ceil(BLOCK_ROWS)), 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(matrix.weight + kind.bytes(first, cols) as u64)
            .i32(int(rows))
            .i32(int(units))
            .i32(int(cols.div_ceil(PANEL)))
            .ptr(panels)
            .i32(int(slot.w_rows))
            .i32(int(slot.first))
            .i32(int(slot.step)),
        cooperative: false,
        overlap: false,
    }
}

/// Matrices that the scratch holds at once.
#[derive(Debug, Clone, Copy)]
struct DequantizedBatch<'a> {
    parts: &'a [MatrixPart],
    cols: usize,
    /// Rows of all of them in the scratch, padding included.
    w_rows: usize,
}

fn multiply(
    gemm: PrefillGemm,
    chunk: ChunkRows,
    batch: DequantizedBatch<'_>,
    x: u64,
    scratch: DequantScratch,
) -> Launch {
    let DequantizedBatch {
        parts,
        cols,
        w_rows,
    } = batch;
    assert!(x != 0, "packed matrices need their input as panels");
    let blocks = cols.div_ceil(PANEL);
    let mut words = [0; 2 * MAX_MATRICES];
    for (to, part) in words.chunks_exact_mut(2).zip(parts) {
        let stride = part.matrix.stride as u64;
        to[0] = part.matrix.out + 4 * part.first as u64;
        to[1] = part.rows as u64 | stride << 32;
    }
    let add = parts
        .iter()
        .any(|part| part.matrix.write == GemmEpilogue::Add);
    let splits = splits(gemm, w_rows, blocks);
    let args = Args::new()
        .ptr(x)
        .ptr(scratch.weights)
        .ptr(chunk.header)
        .i32(int(Panels::new(0, chunk.rows).rows))
        .i32(int(w_rows))
        .i32(int(blocks))
        .i32(int(splits))
        .ptr(scratch.split_k_flags)
        .f32(1.0)
        .i32(i32::from(add))
        .words(&words);
    let columns = tile_columns(gemm, chunk.rows, w_rows, splits);
    persistent(gemm, "prefill_gemm", columns, args)
}

/// A persistent launch over tiles: one block per multiprocessor.
fn persistent(gemm: PrefillGemm, entry: &'static str, columns: usize, args: Args) -> Launch {
    let unit = CompileUnit::new(gemm.kernel.file())
        .define("SWIGLU", u32::from(entry == "prefill_gemm_swiglu"));
    let (unit, threads, shared) = match gemm.kernel {
        PrefillGemmKernel::Sm90 => (unit, 384, 4 * 48 * 1024 + 128 + 8 * 16 * 64 * 4),
        PrefillGemmKernel::Mma => (unit.define("TILE_COLUMNS", columns), 256, 96 * 1024),
    };
    Launch {
        entry,
        unit,
        grid: [count(gemm.sm_count), 1, 1],
        block: [threads, 1, 1],
        shared,
        args,
        cooperative: false,
        overlap: false,
    }
}

/// GEMM of matrices kept as f32.
fn f32_gemm(chunk: ChunkRows, cols: usize, matrices: &[GemmMatrix], x: u64) -> Launch {
    assert!(x != 0, "F32 matrices need their input as f32 rows");
    assert!(
        cols.is_multiple_of(4),
        "rows of {cols} values: a multiple of 4 is needed"
    );
    let mut words = [0; 3 * MAX_MATRICES];
    for (to, matrix) in words.chunks_exact_mut(3).zip(matrices) {
        let (width, stride) = (matrix.rows as u64, matrix.stride as u64);
        to.copy_from_slice(&[matrix.weight, matrix.out, width | stride << 32]);
    }
    let columns: usize = matrices.iter().map(|s| s.rows.next_multiple_of(8)).sum();
    let add = matrices.iter().any(|s| s.write == GemmEpilogue::Add);
    Launch {
        entry: "prefill_sgemm",
        unit: CompileUnit::new("gemm/prefill_gemm_f32.cu"),
        grid: [
            count(columns.div_ceil(F32_COLUMNS)),
            count(chunk.rows.div_ceil(F32_ROWS)),
            1,
        ],
        block: [256, 1, 1],
        shared: count(8 * F32_ROWS * F32_COLUMNS * 4),
        args: Args::new()
            .ptr(x)
            .ptr(chunk.header)
            .i32(int(cols))
            .words(&words)
            .i32(i32::from(add)),
        cooperative: false,
        overlap: false,
    }
}
