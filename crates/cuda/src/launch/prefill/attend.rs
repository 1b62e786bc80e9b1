//! Attention of a chunk of a prompt over the cache, its own keys and values included.

use contract::KvFormat;

use super::{Out, Panels, count, int};
use crate::launch::attention::{Cache, Shape};
use crate::launch::{Args, Launch, Unit};

/// Query rows of a block of the fast kernel.
const QUERIES: usize = 64;

/// Whether the cache is attended to in f32 throughout: where keys or values are kept as F32.
pub fn attention_is_exact(shape: &Shape) -> bool {
    shape.k == KvFormat::F32 || shape.v == KvFormat::F32
}

/// The define of `kernels/attn/kv.cuh`.
fn number(format: KvFormat) -> u32 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Q8_0 => 2,
        KvFormat::Q4_0 => 3,
        other => panic!(
            "a cache in {}: the plan should have been refused",
            other.name()
        ),
    }
}

/// Causal attention of the rows of a chunk, gate included, after [`prepare`](crate::launch::attention::prepare)
/// with `q16` 0 has normed and rotated `q` in place and written keys and values.
///
/// `q` is f32 `[rows][n_heads][head_dim, or twice that with a gate]`; the result has `n_heads * head_dim` columns.
pub fn attention(
    shape: &Shape,
    rows: usize,
    (chunk, q): (u64, u64),
    cache: Cache,
    to: Out,
) -> Launch {
    assert!(to != Out::default(), "a launch without a result");
    assert!(
        shape.window == 0 && shape.ring_pages == 0,
        "prefill attends to every position: {shape:?}"
    );
    let exact = attention_is_exact(shape);
    let (file, entry, tile, threads, shared) = match exact {
        true => (
            "prefill/attention_f32.cu",
            "prefill_attention_f32",
            16,
            128,
            0,
        ),
        false => (
            "prefill/attention.cu",
            "prefill_attention",
            QUERIES,
            256,
            3 * QUERIES * 2 * shape.head_dim,
        ),
    };
    Launch {
        entry,
        unit: Unit::new(file)
            .define("DIM", shape.head_dim)
            .define("HEADS", shape.n_heads)
            .define("KV_HEADS", shape.n_kv_heads)
            .define("GATED", u32::from(shape.gate))
            .define("K_FORMAT", number(shape.k))
            .define("V_FORMAT", number(shape.v)),
        grid: [count(shape.n_heads), count(rows.div_ceil(tile)), 1],
        block: [threads, 1, 1],
        shared: count(shared),
        args: Args::new()
            .ptr(q)
            .i32(int(shape.n_heads * shape.q_stride()))
            .ptr(chunk)
            .words(&[cache.page_table, cache.max_pages as u64])
            .words(&[cache.k, cache.k_scale])
            .words(&[cache.v, cache.v_scale])
            .f32(shape.scale)
            .ptr(to.panels)
            .i32(int(Panels::new(0, rows).rows))
            .ptr(to.f32),
        cooperative: false,
        overlap: false,
    }
}
