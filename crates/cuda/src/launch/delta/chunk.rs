//! Chunks of a prompt: the delta rule in chunk form, 64 positions at a time, state and window brought along.

use super::norm::{Out, Source, gated_norm};
use super::{DIM, Inputs, Layer, Rows, Shape, launch, row_args, slot_args};
use crate::launch::{Args, Launch};

/// Positions of a chunk; chunks begin at absolute multiples of it.
const CHUNK: usize = 64;
/// Heads of a block of the convolution launch, a warp each.
const CONV_HEADS: usize = 8;
/// Rows that a warp of the convolution takes one after the other.
const CONV_ROWS: usize = 16;

/// Where the parts of the scratch begin, in bytes, and how long it is.
struct Scratch {
    /// q and k as pairs of bf16, v as f32.
    mixed: usize,
    gates: usize,
    o: usize,
    /// Per chunk and value head: the inverse and the decayed q k products, pairs of bf16.
    inner: usize,
    bytes: usize,
}

fn chunks(rows: usize) -> usize {
    // A chunk that begins off a multiple of 64 is cut once more.
    rows.div_ceil(CHUNK) + 1
}

fn scratch(shape: Shape, rows: usize) -> Scratch {
    let piece = |floats: usize| (4 * floats).next_multiple_of(256);
    let mixed = 0;
    let gates = mixed + piece(rows * shape.channels());
    let o = gates + piece(rows * 2 * shape.n_v_heads);
    let inner = o + piece(rows * shape.values());
    let bytes = inner + piece(chunks(rows) * shape.n_v_heads * 2 * CHUNK * CHUNK);
    Scratch {
        mixed,
        gates,
        o,
        inner,
        bytes,
    }
}

/// Bytes that [`prefill`] works in; layers may share them, and they need not be zeroed.
pub fn prefill_scratch_bytes(shape: Shape, rows: usize) -> usize {
    scratch(shape, rows).bytes
}

/// One layer of a chunk of up to `rows` positions of one sequence: convolution, delta rule, output norm.
///
/// The state and the window are brought past the chunk. `chunk` is the address of the `Chunk`, `at` that of
/// [`prefill_scratch_bytes`] bytes.
pub fn prefill(
    shape: Shape,
    rows: usize,
    chunk: u64,
    layer: &Layer,
    inputs: &Inputs,
    at: u64,
    out: &Out,
) -> Vec<Launch> {
    assert!(rows > 0, "a prefill chunk has at least a row");
    let parts = scratch(shape, rows);
    let place = |offset: usize| at + offset as u64;
    let (mixed, gates, inner) = (place(parts.mixed), place(parts.gates), place(parts.inner));
    let o = Rows {
        at: place(parts.o),
        stride: shape.values(),
    };
    vec![
        conv_chunk(shape, rows, chunk, layer, inputs, [mixed, gates]),
        chunk_prepare(shape, rows, chunk, [mixed, gates, inner]),
        chunk_scan(shape, chunk, layer, inputs, [mixed, gates, inner, o.at]),
        gated_norm(shape, rows, Source::Chunk(chunk), layer, [o, inputs.z], out),
    ]
}

/// Convolution, SiLU, norms of q and k, gates.
///
/// `buffers` are `mixed` and `gates`.
pub fn conv_chunk(
    shape: Shape,
    rows: usize,
    chunk: u64,
    layer: &Layer,
    inputs: &Inputs,
    [mixed, gates]: [u64; 2],
) -> Launch {
    let args = row_args(Args::new().ptr(chunk), inputs.qkv);
    let args = row_args(row_args(args, inputs.alpha), inputs.beta);
    let args = slot_args(args, layer.window);
    let args = args.ptr(layer.conv).ptr(layer.a).ptr(layer.dt);
    let args = args.ptr(mixed).ptr(gates);
    let heads = 2 * shape.n_k_heads + shape.n_v_heads;
    let grid = [heads.div_ceil(CONV_HEADS) + 1, rows.div_ceil(CONV_ROWS), 1];
    launch(
        "conv_chunk",
        shape.unit("ssm/conv_chunk.cu"),
        grid,
        256,
        args,
    )
}

/// What does not depend on the state: per chunk and value head the inverse and the decayed q k products.
///
/// `buffers` are `mixed`, `gates` and `inner`.
pub fn chunk_prepare(
    shape: Shape,
    rows: usize,
    chunk: u64,
    [mixed, gates, inner]: [u64; 3],
) -> Launch {
    let args = Args::new().ptr(chunk).ptr(mixed).ptr(gates).ptr(inner);
    let grid = [chunks(rows), shape.n_k_heads, 1];
    launch(
        "chunk_prepare",
        shape.unit("delta/chunk_prepare.cu"),
        grid,
        256,
        args,
    )
}

/// Chunk after chunk: outputs, and the state brought along; also slides the window.
///
/// `buffers` are `mixed`, `gates`, `inner` and the output `[rows][n_v_heads * 128]`.
pub fn chunk_scan(
    shape: Shape,
    chunk: u64,
    layer: &Layer,
    inputs: &Inputs,
    [mixed, gates, inner, o]: [u64; 4],
) -> Launch {
    let columns = 64;
    let args = Args::new().ptr(chunk).ptr(mixed).ptr(gates).ptr(inner);
    let args = slot_args(args, layer.state).ptr(o);
    let args = slot_args(row_args(args, inputs.qkv), layer.window);
    let unit = shape.unit("delta/chunk_scan.cu").define("COLUMNS", columns);
    // One block row more slides the window.
    let grid = [DIM / columns, shape.n_v_heads + 1, 1];
    launch("chunk_scan", unit, grid, 128, args)
}
