//! Chunks of a prompt: the delta rule in chunk form, 64 positions at a time, state and window
//! brought along.

use super::conv_args;
use super::gated_norm::{GatedDeltaRows, GatedNormOutput, gated_norm};
use super::{ChunkLaunch, DIM, Shape, StridedRows, dim, launch, row_args, slot_args};
use crate::launch::{Args, Launch};

/// Positions of a chunk; chunks begin at absolute multiples of it.
const CHUNK: usize = 64;
/// Heads of a block of the convolution launch, a warp each.
const CONV_HEADS: usize = 8;
/// Rows that a warp of the convolution computes in sequence.
const CONV_ROWS: usize = 16;

/// Where the parts of the scratch begin, in bytes, and how long it is.
struct ChunkScratch {
    /// q and k as pairs of bf16, v as f32.
    mixed: usize,
    gates: usize,
    o: usize,
    /// Per chunk and value head [`INNER_BYTES`].
    inner: usize,
    bytes: usize,
}

/// What `kernels/gated_delta/chunk_layout.cuh` says of `inner`: the inverse and the decayed q k
/// products, pairs of bf16, and two vectors.
const INNER_BYTES: usize = 2 * CHUNK * CHUNK * 4 + 2 * CHUNK * 4;

fn chunks(rows: usize) -> usize {
    // A chunk that begins off a multiple of 64 is cut once more.
    rows.div_ceil(CHUNK) + 1
}

fn layout(shape: Shape, rows: usize) -> ChunkScratch {
    let piece = |floats: usize| (4 * floats).next_multiple_of(256);
    let mixed = 0;
    let gates = mixed + piece(rows * shape.channels());
    let o = gates + piece(rows * 2 * shape.n_v_heads);
    let inner = o + piece(rows * shape.values());
    let bytes = inner + chunks(rows) * shape.n_v_heads * INNER_BYTES;
    ChunkScratch {
        mixed,
        gates,
        o,
        inner,
        bytes,
    }
}

/// Bytes that [`prefill`] works in; layers may share them, and they need not be zeroed.
pub fn prefill_scratch_bytes(shape: Shape, rows: usize) -> usize {
    layout(shape, rows).bytes
}

/// The kernel of the chunk scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkScanKernel {
    /// Warp-level mma, from compute capability 8.0.
    Mma,
    /// wgmma, compute capability 9.0 only.
    Sm90,
}

impl ChunkScanKernel {
    /// The source file of the scan.
    pub fn file(self) -> &'static str {
        match self {
            ChunkScanKernel::Mma => "gated_delta/prefill_chunk_scan.cu",
            ChunkScanKernel::Sm90 => "gated_delta/prefill_chunk_scan_sm90.cu",
        }
    }
}

/// Addresses of the intermediate results of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChunkBuffers {
    /// Convolved q and k as pairs of bf16, v as f32.
    mixed: u64,
    gates: u64,
    /// [`INNER_BYTES`] per chunk and value head.
    inner: u64,
    o: StridedRows,
}

/// One layer of a chunk of one sequence: convolution, delta rule, output norm.
///
/// The state and the window are advanced past the chunk. `scratch` is the address of
/// [`prefill_scratch_bytes`] bytes.
pub fn prefill(
    kernel: ChunkScanKernel,
    chunk: &ChunkLaunch<'_>,
    scratch: u64,
    out: &GatedNormOutput,
) -> Vec<Launch> {
    let ChunkLaunch { shape, rows, .. } = *chunk;
    assert!(rows > 0, "a prefill chunk has at least a row");
    let parts = layout(shape, rows);
    let place = |offset: usize| scratch + offset as u64;
    let buffers = ChunkBuffers {
        mixed: place(parts.mixed),
        gates: place(parts.gates),
        inner: place(parts.inner),
        o: StridedRows {
            at: place(parts.o),
            stride: shape.values(),
        },
    };
    let source = GatedDeltaRows::Chunk(chunk.chunk);
    let rows_of_norm = [buffers.o, chunk.inputs.z];
    vec![
        conv_chunk(chunk, &buffers),
        chunk_prepare(chunk, &buffers),
        chunk_scan(kernel, chunk, &buffers),
        gated_norm(shape, rows, source, chunk.layer, rows_of_norm, out),
    ]
}

/// Convolution, SiLU, norms of q and k, gates.
fn conv_chunk(chunk: &ChunkLaunch<'_>, buffers: &ChunkBuffers) -> Launch {
    let shape = chunk.shape;
    let args = conv_args(chunk.chunk, chunk.layer, chunk.inputs);
    let args = args.ptr(buffers.mixed).ptr(buffers.gates);
    let heads = 2 * shape.n_k_heads + shape.n_v_heads;
    let grid = [
        heads.div_ceil(CONV_HEADS) + 1,
        chunk.rows.div_ceil(CONV_ROWS),
        1,
    ];
    launch(
        "gated_delta_conv_chunk",
        shape.unit("gated_delta/prefill_conv.cu"),
        grid,
        256,
        args,
    )
}

/// What does not depend on the state: per chunk and value head the inverse and the decayed q k
/// products.
fn chunk_prepare(chunk: &ChunkLaunch<'_>, buffers: &ChunkBuffers) -> Launch {
    let shape = chunk.shape;
    let args = Args::new().ptr(chunk.chunk).ptr(buffers.mixed);
    let args = args.ptr(buffers.gates).ptr(buffers.inner);
    let grid = [chunks(chunk.rows), shape.n_k_heads, 1];
    let unit = shape.unit("gated_delta/prefill_chunk_prepare.cu");
    let mut launch = launch("gated_delta_chunk_prepare", unit, grid, 256, args);
    // q and k, pairs of bf16 [64][128]; after them up to three matrices [64][68] of f32, which need
    // less.
    launch.shared = dim(2 * 4 * CHUNK * DIM);
    launch
}

/// Value columns of a block of the scan: few enough that the blocks fill a gpu.
fn scan_columns(shape: Shape) -> usize {
    if shape.n_v_heads > 32 { 64 } else { 32 }
}

/// Chunk after chunk: outputs, and the state advanced; also slides the window.
fn chunk_scan(kernel: ChunkScanKernel, chunk: &ChunkLaunch<'_>, buffers: &ChunkBuffers) -> Launch {
    let ChunkLaunch {
        shape,
        layer,
        inputs,
        ..
    } = *chunk;
    let args = Args::new().ptr(chunk.chunk).ptr(buffers.mixed);
    let args = slot_args(args.ptr(buffers.inner), layer.state).ptr(buffers.o.at);
    let args = slot_args(row_args(args, inputs.qkv), layer.window);
    // q and k, pairs of bf16 [64][128]; the inverse and the q k products, pairs of [64][64].
    let operands = 2 * 4 * CHUNK * DIM + 2 * 4 * CHUNK * CHUNK;
    let vectors = 2 * 2 * 4 * CHUNK;
    // One row of blocks more slides the window.
    let grid = |columns: usize| [DIM / columns, shape.n_v_heads + 1, 1];
    match kernel {
        ChunkScanKernel::Mma => {
            let columns = scan_columns(shape);
            let unit = shape.unit(kernel.file()).define("COLUMNS", columns);
            let block = dim(2 * columns);
            let mut launch = launch("gated_delta_chunk_scan", unit, grid(columns), block, args);
            launch.shared = dim(operands + vectors);
            launch
        }
        ChunkScanKernel::Sm90 => {
            let unit = shape.unit(kernel.file());
            let mut launch = launch("gated_delta_chunk_scan_sm90", unit, grid(64), 128, args);
            // v beside the operands, in rows of 68, and all of it twice.
            launch.shared = dim(2 * (operands + 4 * CHUNK * 68) + vectors);
            launch
        }
    }
}

/// Multiplications and additions of [`prefill`]'s matrix products for `rows` positions, each
/// counted once.
pub fn flops(shape: Shape, rows: usize) -> f64 {
    // Per value head and chunk: K K^T and Q K^T, the inverse, K S, T R, Q S, (Q K^T) U, K^T U.
    let (c, d) = (CHUNK as f64, DIM as f64);
    let products = 2.0 * c * c * d + c * c * c / 3.0 + 3.0 * c * d * d + 2.0 * c * c * d;
    2.0 * products * shape.n_v_heads as f64 * rows as f64 / c
}
