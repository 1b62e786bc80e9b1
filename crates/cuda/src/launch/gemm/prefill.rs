//! Products of a chunk's rows with matrices that share their input.

use super::panels::{PANEL, Panels, TILE, count, int};
use super::small_batch::{Segment, Write};
use crate::launch::{Args, Launch, Unit};
use crate::pack::{BLOCK_ROWS, WeightKind};

/// Columns of a tile: every matrix is padded to a multiple of this in the scratch.
const COLUMNS: usize = 256;
/// Matrices of one launch.
const SEGMENTS: usize = 4;

/// Rows and columns of a tile of a product in f32.
const PLAIN_ROWS: usize = 32;
const PLAIN_COLUMNS: usize = 48;

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

/// The rows all matrices are multiplied with; 0 where no matrix reads the form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// Address of f16 panels, for packed kinds.
    pub panels: u64,
    /// f32 `[rows][cols]`, for F32 matrices.
    pub f32: u64,
}

/// Memory that products share, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scratch {
    /// Room for weights as panels, 1024-byte aligned; need not be zeroed.
    pub weights: u64,
    /// Its bytes. More than [`bytes_to_expand`] is not used; matrices that do not fit are taken in
    /// pieces.
    pub weight_bytes: usize,
    /// [`turn_bytes`]; zero before the first launch, and left zero.
    pub turns: u64,
}

/// Bytes that matrices of one input need to be expanded at once, from their rows and columns.
pub fn bytes_to_expand(rows: impl IntoIterator<Item = usize>, cols: usize) -> usize {
    let rows: usize = rows
        .into_iter()
        .map(|rows| rows.next_multiple_of(COLUMNS))
        .sum();
    rows * cols.next_multiple_of(PANEL) * 2
}

/// The least [`Scratch::weight_bytes`] for matrices of `cols` columns.
pub fn least_bytes(cols: usize) -> usize {
    bytes_to_expand([COLUMNS], cols)
}

/// Bytes of [`Scratch::turns`] for chunks of up to `rows` rows and scratches of up to
/// `weight_bytes` bytes.
pub fn turn_bytes(rows: usize, weight_bytes: usize) -> usize {
    // A slice of 64 columns at least.
    rows.div_ceil(TILE) * (weight_bytes / (PANEL * 2)).div_ceil(TILE) * 4
}

/// Parts that K is cut in, from the matrix and the card alone: two where one leaves the last wave
/// of a chunk of 2048 rows mostly idle.
fn splits(gemm: PrefillGemm, w_rows: usize, blocks: usize) -> usize {
    let tiles = 2048 / TILE * (w_rows / COLUMNS);
    let waste = |units: usize| {
        let waves = units.div_ceil(gemm.sm_count);
        (waves * gemm.sm_count) as f64 / units as f64
    };
    let sm90 = gemm.kernel == PrefillGemmKernel::Sm90;
    if sm90 && blocks >= 32 && waste(2 * tiles) + 0.08 < waste(tiles) {
        2
    } else {
        1
    }
}

/// A run of rows of a matrix in a scratch of weights.
#[derive(Debug, Clone, Copy)]
struct Piece {
    segment: Segment,
    first: usize,
    rows: usize,
}

/// `out = W x`, or `out += W x`, for every matrix.
///
/// # Panics
/// If a matrix has no input in its form, or the scratch is below [`least_bytes`].
pub fn products(
    gemm: PrefillGemm,
    rows: usize,
    cols: usize,
    segments: &[Segment],
    from: (u64, Inputs),
    scratch: Scratch,
) -> Vec<Launch> {
    let (chunk, inputs) = from;
    let mut launches = Vec::new();
    for write in [Write::Store, Write::Add] {
        let with = |plain: bool| {
            segments
                .iter()
                .filter(move |s| s.write == write && (s.kind == WeightKind::F32) == plain)
        };
        let plains: Vec<Segment> = with(true).copied().collect();
        let of = |segments: &[Segment]| plain(rows, cols, segments, chunk, inputs.f32);
        launches.extend(plains.chunks(SEGMENTS).map(of));
        for batch in batches(with(false).copied(), cols, scratch.weight_bytes) {
            let padded = |piece: &Piece| piece.rows.next_multiple_of(COLUMNS);
            let w_rows: usize = batch.iter().map(padded).sum();
            let mut first = 0;
            for piece in &batch {
                let place = Place {
                    w_rows,
                    first,
                    step: 8,
                };
                launches.push(expand(*piece, cols, scratch.weights, place));
                first += padded(piece);
            }
            launches.push(multiply(
                gemm,
                rows,
                cols,
                &batch,
                (chunk, inputs.panels),
                scratch,
                w_rows,
            ));
        }
    }
    launches
}

/// The two matrices of a gated unit, both `[ffn][cols]` and packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// Values of a row of either.
    pub cols: usize,
    /// Rows of either.
    pub ffn: usize,
    /// How the gate's matrix lies on the gpu, and where.
    pub gate: (WeightKind, u64),
    /// The same of the other.
    pub up: (WeightKind, u64),
}

impl Pair {
    /// Whether [`gated`] serves these.
    pub fn fits(&self) -> bool {
        self.ffn.is_multiple_of(TILE)
            && self.gate.0 != WeightKind::F32
            && self.up.0 != WeightKind::F32
    }
}

/// `silu(gate x) * (up x)` as panels of `ffn` columns at `h`; `from` is the chunk and panels of
/// `x`.
///
/// # Panics
/// Unless the pair [fits](Pair::fits); then take [`products`] and
/// [`crate::launch::norm::panels::swiglu`].
pub fn gated(
    gemm: PrefillGemm,
    rows: usize,
    pair: Pair,
    from: (u64, u64),
    scratch: Scratch,
    h: u64,
) -> Vec<Launch> {
    assert!(pair.fits(), "a gated product of {pair:?}");
    let Pair { cols, ffn, .. } = pair;
    let (chunk, x) = from;
    let room = scratch.weight_bytes / bytes_to_expand([COLUMNS], cols) * TILE;
    assert!(
        room > 0,
        "a scratch of {} bytes holds no tile of {cols} columns",
        scratch.weight_bytes
    );
    let cap = Panels::new(0, rows).rows;
    let mut launches = Vec::new();
    for first in (0..ffn).step_by(room) {
        let n = room.min(ffn - first);
        let w_rows = 2 * n;
        for (i, (kind, weight)) in [pair.gate, pair.up].into_iter().enumerate() {
            let segment = Segment {
                kind,
                rows: ffn,
                weight,
                out: 0,
                stride: 0,
                write: Write::Store,
            };
            let place = Place {
                w_rows,
                first: 8 * i,
                step: 16,
            };
            launches.push(expand(
                Piece {
                    segment,
                    first,
                    rows: n,
                },
                cols,
                scratch.weights,
                place,
            ));
        }
        let to = h + (first / PANEL * cap * PANEL * 2) as u64;
        let args = Args::new()
            .ptr(x)
            .ptr(scratch.weights)
            .ptr(chunk)
            .i32(int(cap))
            .i32(int(w_rows))
            .i32(int(cols.div_ceil(PANEL)))
            .f32(1.0)
            .f32(1.0)
            .ptr(to);
        launches.push(on_tiles(gemm, "prefill_gemm_swiglu", args));
    }
    launches
}

/// Pieces of matrices, grouped so that a group fits the scratch and a launch.
fn batches(segments: impl Iterator<Item = Segment>, cols: usize, bytes: usize) -> Vec<Vec<Piece>> {
    let room = bytes / bytes_to_expand([COLUMNS], cols) * COLUMNS;
    assert!(
        room > 0,
        "a scratch of {bytes} bytes holds no tile of {cols} columns"
    );
    let mut batches: Vec<Vec<Piece>> = Vec::new();
    let mut left = 0;
    for segment in segments {
        let mut first = 0;
        while first < segment.rows {
            let full = batches.last().is_none_or(|batch| batch.len() == SEGMENTS);
            let whole = (segment.rows - first).next_multiple_of(COLUMNS);
            // A matrix is cut only where it would not fit an empty scratch either.
            if full || left == 0 || (whole > left && whole <= room) {
                batches.push(Vec::new());
                left = room;
            }
            let rows = left.min(segment.rows - first);
            let piece = Piece {
                segment,
                first,
                rows,
            };
            if let Some(batch) = batches.last_mut() {
                batch.push(piece);
            }
            left -= rows.next_multiple_of(COLUMNS);
            first += rows;
        }
    }
    batches
}

/// Where rows of a matrix go in the scratch.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Rows of a panel of the scratch.
    w_rows: usize,
    /// Row of the first.
    first: usize,
    /// From a run of eight rows to the next.
    step: usize,
}

fn expand(piece: Piece, cols: usize, panels: u64, place: Place) -> Launch {
    let Piece {
        segment,
        first,
        rows,
    } = piece;
    assert!(
        first.is_multiple_of(BLOCK_ROWS),
        "pieces begin at whole row blocks"
    );
    let (kind, units) = (segment.kind, segment.kind.units(cols));
    Launch {
        entry: "prefill_dequant",
        unit: Unit::new("gemm/prefill_dequant.cu").define("WEIGHT_KIND", kind as u32),
        grid: [count(units), count(rows.div_ceil(BLOCK_ROWS)), 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new()
            .ptr(segment.weight + kind.bytes(first, cols) as u64)
            .i32(int(rows))
            .i32(int(units))
            .i32(int(cols.div_ceil(PANEL)))
            .ptr(panels)
            .i32(int(place.w_rows))
            .i32(int(place.first))
            .i32(int(place.step)),
        cooperative: false,
        overlap: false,
    }
}

fn multiply(
    gemm: PrefillGemm,
    rows: usize,
    cols: usize,
    batch: &[Piece],
    from: (u64, u64),
    scratch: Scratch,
    w_rows: usize,
) -> Launch {
    let (chunk, x) = from;
    assert!(x != 0, "packed matrices need their input as panels");
    let blocks = cols.div_ceil(PANEL);
    let mut words = [0; 2 * SEGMENTS];
    for (to, piece) in words.chunks_exact_mut(2).zip(batch) {
        let stride = piece.segment.stride as u64;
        to[0] = piece.segment.out + 4 * piece.first as u64;
        to[1] = piece.rows as u64 | stride << 32;
    }
    let add = batch.iter().any(|piece| piece.segment.write == Write::Add);
    let args = Args::new()
        .ptr(x)
        .ptr(scratch.weights)
        .ptr(chunk)
        .i32(int(Panels::new(0, rows).rows))
        .i32(int(w_rows))
        .i32(int(blocks))
        .i32(int(splits(gemm, w_rows, blocks)))
        .ptr(scratch.turns)
        .f32(1.0)
        .i32(i32::from(add))
        .words(&words);
    on_tiles(gemm, "prefill_gemm", args)
}

/// A persistent launch over tiles: a block for each multiprocessor.
fn on_tiles(gemm: PrefillGemm, entry: &'static str, args: Args) -> Launch {
    let (threads, shared) = match gemm.kernel {
        PrefillGemmKernel::Sm90 => (384, 4 * 48 * 1024 + 128 + 8 * 16 * 64 * 4),
        PrefillGemmKernel::Mma => (256, 3 * 32 * 1024),
    };
    Launch {
        entry,
        unit: Unit::new(gemm.kernel.file())
            .define("SWIGLU", u32::from(entry == "prefill_gemm_swiglu")),
        grid: [count(gemm.sm_count), 1, 1],
        block: [threads, 1, 1],
        shared,
        args,
        cooperative: false,
        overlap: false,
    }
}

/// Products with matrices kept as f32.
fn plain(rows: usize, cols: usize, segments: &[Segment], chunk: u64, x: u64) -> Launch {
    assert!(x != 0, "F32 matrices need their input as f32 rows");
    assert!(
        cols.is_multiple_of(4),
        "rows of {cols} values: a multiple of 4 is needed"
    );
    let mut words = [0; 3 * SEGMENTS];
    for (to, segment) in words.chunks_exact_mut(3).zip(segments) {
        let (width, stride) = (segment.rows as u64, segment.stride as u64);
        to.copy_from_slice(&[segment.weight, segment.out, width | stride << 32]);
    }
    let columns: usize = segments.iter().map(|s| s.rows.next_multiple_of(8)).sum();
    let add = segments.iter().any(|s| s.write == Write::Add);
    Launch {
        entry: "prefill_sgemm",
        unit: Unit::new("gemm/prefill_gemm_f32.cu"),
        grid: [
            count(columns.div_ceil(PLAIN_COLUMNS)),
            count(rows.div_ceil(PLAIN_ROWS)),
            1,
        ],
        block: [256, 1, 1],
        shared: count(8 * PLAIN_ROWS * PLAIN_COLUMNS * 4),
        args: Args::new()
            .ptr(x)
            .ptr(chunk)
            .i32(int(cols))
            .words(&words)
            .i32(i32::from(add)),
        cooperative: false,
        overlap: false,
    }
}
