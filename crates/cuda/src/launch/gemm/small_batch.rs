//! GEMMs of few rows by quantized weights.
//!
//! [`launches`] multiplies the rows of one bucket by several matrices that share their input, in
//! one launch of `gemm/decode_gemm_small_batch.cu`.

use super::f32_split::{F32GemmInput, F32Split};
use super::words::{narrow, pair};
use crate::gpu_props::GpuProps;
use crate::launch::{Args, CompileUnit, Launch};
use crate::pack::A16_TILE;
use crate::pack::{ActivationFormat, WeightKind};

/// Maximum matrices of one launch.
pub const MAX_MATRICES: usize = 6;
/// Tiles of 16 rows in a row block.
pub(super) const TILES: usize = 8;
/// Threads of a block: eight MMA warps and a producer warp.
const THREADS: u32 = 288;
/// Maximum pipeline stages.
const MAX_PIPELINE_STAGES: usize = 8;
/// Shared memory of a block besides its pipeline stages, in bytes: barriers, and the scales that
/// the lanes of eight warps exchange.
const FIXED_SHARED: usize = 1024 + (8 << 10);
/// Maximum shared memory of a block, in bytes; small kernels run beside it in the rest.
pub(super) const MAX_SHARED: usize = 200 << 10;
/// Rows of a row block of packed weights.
pub(super) const BLOCK_ROWS: usize = 128;
/// Row blocks of a tile.
pub(super) const ROW_BLOCKS: usize = 2;
/// Rows of an f32 matrix per job, granularity of its K range, and maximum jobs with K ranges.
const F32_ROWS: usize = 8;
const F32_SPLIT: F32Split = F32Split {
    k_step: 512,
    max_jobs: 255,
};
/// Shared memory that f32 matrices add, in bytes.
pub(super) const F32_SHARED: usize = 17 << 10;
/// Words that `Matrix` of `gemm/decode_gemm_small_batch.cu` has.
const MATRIX_WORDS: usize = 8;

/// Dynamic shared memory of a block of small-batch GEMMs, in bytes.
pub(crate) fn gemm_shared_bytes(gpu: GpuProps) -> usize {
    gpu.shared_bytes.min(MAX_SHARED)
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemmEpilogue {
    /// `out = W x`.
    Store,
    /// `out += W x`, such as the residual stream.
    Add,
}

/// One matrix of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmMatrix {
    /// Its layout on the GPU.
    pub kind: WeightKind,
    /// Rows of the matrix: values of a row of the output.
    pub rows: usize,
    /// Packed weights, 256-byte aligned.
    pub weight: u64,
    /// f32 `[bucket][stride]`.
    pub out: u64,
    /// Floats from a row of the output to the next.
    pub stride: usize,
    /// Store or add.
    pub write: GemmEpilogue,
}

/// The input rows of all matrices, in the formats that their kinds read; 0 if no kind reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GemmInputs {
    /// f16 ([`ActivationFormat::F16`]).
    pub f16: u64,
    /// f32 `[bucket][cols]`.
    pub f32: u64,
}

impl GemmInputs {
    fn of(self, input: ActivationFormat) -> u64 {
        match input {
            ActivationFormat::F16 => self.f16,
            ActivationFormat::F32 => self.f32,
        }
    }
}

/// Partial sums, shared by launches in sequence: [`scratch_bytes`] at this address, zero before and
/// after each launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmScratch(pub u64);

/// Bytes of [`GemmScratch`] for buckets of up to `bucket` rows.
pub fn scratch_bytes(gpu: GpuProps, bucket: usize) -> usize {
    packed_scratch_bytes(gpu, bucket) + F32_SPLIT.max_jobs * F32_ROWS * bucket * 4
}

/// Bytes of the packed matrices' partial sums, at its start.
pub(super) fn packed_scratch_bytes(gpu: GpuProps, bucket: usize) -> usize {
    gpu.sm_count * 2 * TILES * ROW_BLOCKS * bucket.div_ceil(8) * 512
}

/// What a launch is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SmallBatchConfig {
    /// Rows of one launch, at most the bucket.
    rows: usize,
    /// Bit `i`: kind `i` occurs.
    kinds: u32,
    /// Pipeline stages.
    stages: usize,
    /// Whether there are f32 matrices.
    f32_matrices: bool,
}

impl SmallBatchConfig {
    /// `None` if not even 8 rows of these kinds leave shared memory for two stages.
    fn new(gpu: GpuProps, rows: usize, kinds: u32, f32_matrices: bool) -> Option<SmallBatchConfig> {
        let own = if f32_matrices { F32_SHARED } else { 0 };
        let room = gemm_shared_bytes(gpu).saturating_sub(FIXED_SHARED + own);
        let mut form = SmallBatchConfig {
            rows,
            kinds,
            stages: 0,
            f32_matrices,
        };
        // Rows that leave too little for two stages go in two launches.
        while form.slot() * 2 > room {
            if form.rows <= 8 {
                return None;
            }
            form.rows = (form.rows / 2).next_multiple_of(8);
        }
        form.stages = (room / form.slot()).clamp(2, MAX_PIPELINE_STAGES);
        Some(form)
    }

    /// Shared memory of a block in bytes.
    fn shared(self) -> usize {
        self.stages * self.slot()
    }

    fn tiles(self) -> usize {
        self.rows.div_ceil(8)
    }

    /// Bytes of a pipeline stage, as `SLOT` of the kernel.
    fn slot(self) -> usize {
        let kinds = || WeightKind::ALL.into_iter().filter(|&kind| self.has(kind));
        let slice_bytes = kinds().flat_map(WeightKind::slice_bytes).max().unwrap_or(0);
        let chunks = kinds().map(WeightKind::slices).max().unwrap_or(0);
        (ROW_BLOCKS * TILES * slice_bytes + self.tiles() * chunks * A16_TILE).max(16)
    }

    fn has(self, kind: WeightKind) -> bool {
        kind != WeightKind::F32 && self.kinds >> kind as u32 & 1 == 1
    }

    fn unit(self) -> CompileUnit {
        CompileUnit::new("gemm/decode_gemm_small_batch.cu")
            .define("ROWS", self.rows)
            .define("N8_TILES", self.tiles())
            .define("STAGES", self.stages)
            .define("KINDS", self.kinds)
            .define("MAX_MATRICES", MAX_MATRICES)
            .define("F32_MATRICES", u8::from(self.f32_matrices))
    }
}

/// The launches that multiply the rows of `bucket` by every matrix; `cols` is the width of the
/// input.
///
/// # Panics
/// If there are no matrices or more than [`MAX_MATRICES`], the bucket is not 1..=64, an input that
/// a kind reads is missing, or the GPU does not hold a kind (see [`fits_shared_memory`]).
pub fn launches(
    gpu: GpuProps,
    bucket: usize,
    cols: usize,
    matrices: &[GemmMatrix],
    inputs: GemmInputs,
    scratch: GemmScratch,
) -> Vec<Launch> {
    assert!((1..=64).contains(&bucket), "a bucket of {bucket} rows");
    assert!(
        (1..=MAX_MATRICES).contains(&matrices.len()),
        "{} matrices in one launch",
        matrices.len()
    );
    for matrix in matrices {
        assert!(
            inputs.of(matrix.kind.input()) != 0,
            "{:?} without its form of the input",
            matrix.kind
        );
        assert!(matrix.stride >= matrix.rows, "{matrix:?}");
        assert!(
            matrix.kind != WeightKind::F32 || cols.is_multiple_of(4),
            "an f32 matrix of {cols} columns: rows are read 16 bytes at a time"
        );
    }
    let rows = GemmRows {
        bucket,
        cols,
        inputs,
    };
    launch_groups(gpu, matrices)
        .iter()
        .flat_map(|matrices| range_launches(gpu, rows, matrices, scratch))
        .collect()
}

/// The input rows of a launch.
#[derive(Debug, Clone, Copy)]
struct GemmRows {
    bucket: usize,
    cols: usize,
    inputs: GemmInputs,
}

/// Whether a GPU has the shared memory that matrices of a kind need.
pub fn fits_shared_memory(gpu: GpuProps, kind: WeightKind) -> bool {
    let (kinds, f32_matrices) = kinds_of(&[kind]);
    SmallBatchConfig::new(gpu, 8, kinds, f32_matrices).is_some()
}

/// The packed kinds as bits, and whether there are f32 matrices.
pub(super) fn kinds_of(kinds: &[WeightKind]) -> (u32, bool) {
    let packed = kinds.iter().filter(|kind| **kind != WeightKind::F32);
    let bits = packed.fold(0, |bits, &kind| bits | 1 << kind as u32);
    (bits, kinds.contains(&WeightKind::F32))
}

/// The matrices of each launch: all in one if shared memory allows, else one launch per kind.
pub(super) fn launch_groups(gpu: GpuProps, matrices: &[GemmMatrix]) -> Vec<Vec<GemmMatrix>> {
    let kinds: Vec<WeightKind> = matrices.iter().map(|s| s.kind).collect();
    let (bits, f32_matrices) = kinds_of(&kinds);
    if SmallBatchConfig::new(gpu, 8, bits, f32_matrices).is_some() {
        return vec![matrices.to_vec()];
    }
    let of = |kind| {
        let own = matrices.iter().filter(move |s| s.kind == kind);
        own.copied().collect::<Vec<_>>()
    };
    let launch_groups = WeightKind::ALL.into_iter().map(of);
    launch_groups.filter(|part| !part.is_empty()).collect()
}

/// The launches of matrices that share one configuration.
fn range_launches(
    gpu: GpuProps,
    rows: GemmRows,
    matrices: &[GemmMatrix],
    scratch: GemmScratch,
) -> Vec<Launch> {
    let GemmRows {
        bucket,
        cols,
        inputs,
    } = rows;
    let (f32_matrices, packed): (Vec<GemmMatrix>, Vec<GemmMatrix>) =
        matrices.iter().partition(|s| s.kind == WeightKind::F32);
    let kinds: Vec<WeightKind> = matrices.iter().map(|s| s.kind).collect();
    let (kinds, has_f32) = kinds_of(&kinds);
    let mut launches = Vec::new();
    let mut first = 0;
    while first < bucket {
        let form = SmallBatchConfig::new(gpu, bucket - first, kinds, has_f32)
            .expect("unsupported kinds are refused before anything is planned");
        let part = RowRange {
            gpu,
            bucket,
            cols,
            first,
            form,
        };
        launches.push(part.launch(&packed, &f32_matrices, inputs, scratch));
        first += form.rows;
    }
    launches
}

/// The rows of a bucket that one launch computes.
struct RowRange {
    gpu: GpuProps,
    bucket: usize,
    cols: usize,
    /// The first of them, a multiple of 8.
    first: usize,
    form: SmallBatchConfig,
}

impl RowRange {
    fn launch(
        &self,
        packed: &[GemmMatrix],
        f32_matrices: &[GemmMatrix],
        inputs: GemmInputs,
        scratch: GemmScratch,
    ) -> Launch {
        let (form, cols) = (self.form, self.cols);
        let mut words = Vec::new();
        let (mut line, mut max_unit_cost) = (0, 1);
        for matrix in packed {
            let kind = matrix.kind;
            let units = kind.units(cols);
            let matrix_tiles = matrix.rows.div_ceil(BLOCK_ROWS * ROW_BLOCKS);
            let cost = ROW_BLOCKS * TILES * kind.tile_bytes() / 16;
            words.extend([
                matrix.weight,
                self.out(matrix),
                pair(matrix.rows, matrix.stride),
                pair(
                    usize::from(matrix.write == GemmEpilogue::Add),
                    kind as usize,
                ),
                pair(units, matrix_tiles),
                pair(kind.tile_bytes(), kind.slice_bytes()[0]),
                pair(line, cost),
                pair(kind.slices(), 0),
            ]);
            line += units * matrix_tiles * cost;
            max_unit_cost = max_unit_cost.max(cost);
        }
        words.resize(MAX_MATRICES * MATRIX_WORDS, 0);
        let x = inputs.f16 + (self.first / 8 * A16_TILE) as u64;
        words.extend([
            x,
            scratch.0,
            pair(packed.len(), self.bucket.div_ceil(8) * A16_TILE),
            work_ranges(self.gpu, line, max_unit_cost),
        ]);
        if !f32_matrices.is_empty() {
            let room = scratch.0 + packed_scratch_bytes(self.gpu, self.bucket) as u64;
            let f32_matrices: Vec<GemmMatrix> = f32_matrices
                .iter()
                .map(|matrix| GemmMatrix {
                    out: self.out(matrix),
                    ..*matrix
                })
                .collect();
            let x = inputs.f32 + (4 * self.first * cols) as u64;
            let input = F32GemmInput {
                x,
                cols,
                partials: room,
            };
            words.extend(f32_params(self.gpu, &f32_matrices, input));
        }
        Launch {
            entry: "gemm_small_batch",
            unit: form.unit(),
            grid: [narrow(self.gpu.sm_count), 1, 1],
            block: [THREADS, 1, 1],
            shared: narrow(form.shared()),
            args: Args::new().words(&words),
            cooperative: false,
            overlap: true,
        }
    }

    /// Address of the first row's output.
    fn out(&self, matrix: &GemmMatrix) -> u64 {
        matrix.out + (4 * self.first * matrix.stride) as u64
    }
}

/// `F32Params` of `gemm/f32_gemm.cuh`: groups of 8 rows, and split K if the groups alone would
/// leave multiprocessors idle. The outputs are those of the first row.
pub(super) fn f32_params(gpu: GpuProps, matrices: &[GemmMatrix], input: F32GemmInput) -> Vec<u64> {
    let mut words = Vec::new();
    let mut groups = 0;
    for matrix in matrices {
        words.extend([
            matrix.weight,
            matrix.out,
            pair(matrix.rows, matrix.stride),
            pair(usize::from(matrix.write == GemmEpilogue::Add), groups),
        ]);
        groups += matrix.rows.div_ceil(F32_ROWS);
    }
    words.resize(MAX_MATRICES * 4, 0);
    words.extend(F32_SPLIT.input_words(gpu, matrices.len(), groups, input));
    words
}

/// The work range of each block over the total cost, and how many blocks have one more. Every range
/// contains the begin of a unit: blocks that wait for a tile's partial sums rely on it.
pub(super) fn work_ranges(gpu: GpuProps, line: usize, max_unit_cost: usize) -> u64 {
    let blocks = (gpu.sm_count).min((line / max_unit_cost).max(1));
    pair(line / blocks, line % blocks)
}
