//! Attention of a chunk of a prompt over the cache, its own keys and values included.

use super::{Cache, Shape, number};
use crate::launch::gemm::panels::{ChunkRows, Panels, PrefillActivations, count, int};
use crate::launch::{Args, CompileUnit, Launch};

/// Eights of rows of a block of `attention_across_sm90.cu`, the first that fits beside the cache's
/// format.
const SWAPPED_N8_TILES: [usize; 2] = [16, 8];
/// Shared memory of a block on the GPUs that run it.
const SWAPPED_SHARED: usize = 227 << 10;
/// Floats between rows on their way out of it.
const OUT_STRIDE: usize = 260;

/// The kernel of prefill attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillAttention {
    /// `prefill_f32.cu`: f32 throughout, for KV kept as f32.
    F32,
    /// `prefill.cu`: warp-level mma.
    Mma,
    /// `prefill_sm90.cu`: wgmma over f16 KV, heads of 256.
    Sm90,
    /// `prefill_swapped_sm90.cu`: wgmma with swapped operands (S^T) over any other KV, heads of
    /// 256.
    SwappedSm90,
}

impl PrefillAttention {
    /// The source file.
    pub fn file(self) -> &'static str {
        match self {
            PrefillAttention::F32 => "attention/prefill_f32.cu",
            PrefillAttention::Mma => "attention/prefill.cu",
            PrefillAttention::Sm90 => "attention/prefill_sm90.cu",
            PrefillAttention::SwappedSm90 => "attention/prefill_swapped_sm90.cu",
        }
    }
}

/// Causal attention of the rows of a chunk, within the window if there is one, gate included.
///
/// [`qk_norm_rope_append`](super::qk_norm_rope_append) with `f16_queries` 0 runs before it: it
/// normalises and rotates `q` in place and writes keys and values.
///
/// `q` is f32 `[rows][n_heads][head_dim, or twice that with a gate]`; the result has `n_heads *
/// head_dim` columns.
pub fn prefill(
    kernel: PrefillAttention,
    shape: &Shape,
    chunk: ChunkRows,
    q: u64,
    cache: Cache,
    to: PrefillActivations,
) -> Launch {
    assert!(
        to != PrefillActivations::default(),
        "a launch without a result"
    );
    let has_windows = matches!(kernel, PrefillAttention::F32 | PrefillAttention::Mma);
    assert!(
        (shape.window == 0 || has_windows) && shape.ring_pages == 0,
        "{kernel:?} attends to every position: {shape:?}"
    );
    let form = PrefillTile::of(kernel, shape);
    let unit = match form.swapped {
        Some((n8_tiles, stages)) => CompileUnit::new(kernel.file())
            .define("N8_TILES", n8_tiles)
            .define("STAGES", stages),
        None => CompileUnit::new(kernel.file()),
    };
    let unit = match shape.window {
        0 => unit,
        window => unit.define("WINDOW", window),
    };
    Launch {
        entry: form.entry,
        unit: unit
            .define("HEAD_DIM", shape.head_dim)
            .define("HEADS", shape.n_heads)
            .define("KV_HEADS", shape.n_kv_heads)
            .define("GATED", u32::from(shape.gate))
            .define("PANELS_OUT", u32::from(to.panels != 0))
            .define("F32_OUT", u32::from(to.f32 != 0))
            .define("K_FORMAT", number(shape.k))
            .define("V_FORMAT", number(shape.v))
            .define("KV_ROTATED", u32::from(shape.rotated)),
        grid: [
            count(shape.n_heads),
            count(chunk.rows.div_ceil(form.tile)),
            1,
        ],
        block: [form.threads, 1, 1],
        shared: count(form.shared),
        args: Args::new()
            .ptr(q)
            .i32(int(shape.n_heads * shape.q_stride()))
            .ptr(chunk.header)
            .words(&[cache.page_table, cache.max_pages as u64])
            .words(&[cache.k, cache.k_scale])
            .words(&[cache.v, cache.v_scale])
            .f32(shape.scale)
            .ptr(to.panels)
            .i32(int(Panels::new(0, chunk.rows).rows))
            .ptr(to.f32),
        cooperative: false,
        overlap: false,
    }
}

/// Bits of the key blocks that the query blocks of a chunk keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptBlocks {
    /// u32 `[query blocks][n_heads][words]`.
    pub at: u64,
    /// Words of a query block and head.
    pub words: usize,
}

/// As [`prefill()`], over the kept blocks of 128 keys alone. The chunk begins at a multiple of 128.
///
/// # Panics
/// If `kernel` is for Hopper only: those attend to every key.
pub fn prefill_block_sparse(
    kernel: PrefillAttention,
    shape: &Shape,
    chunk: ChunkRows,
    (q, cache): (u64, Cache),
    kept: KeptBlocks,
    to: PrefillActivations,
) -> Launch {
    assert!(
        matches!(kernel, PrefillAttention::F32 | PrefillAttention::Mma),
        "{kernel:?} attends to every key"
    );
    let mut launch = prefill(kernel, shape, chunk, q, cache, to);
    launch.unit = launch.unit.define("BLOCK_SPARSE", 1);
    launch.args = launch.args.ptr(kept.at).i32(int(kept.words));
    launch
}

/// How a kernel is launched.
struct PrefillTile {
    entry: &'static str,
    /// Rows of a block.
    tile: usize,
    threads: u32,
    /// Bytes of shared memory.
    shared: usize,
    /// Tiles of 8 rows and pipeline stages, for swapped operands.
    swapped: Option<(usize, usize)>,
}

impl PrefillTile {
    fn of(kernel: PrefillAttention, shape: &Shape) -> PrefillTile {
        // Shared memory: rows of queries, two or one stages of keys and values, and barriers.
        match kernel {
            PrefillAttention::F32 => PrefillTile {
                entry: "attn_prefill_f32",
                tile: 16,
                threads: 128,
                shared: 0,
                swapped: None,
            },
            PrefillAttention::Sm90 => PrefillTile {
                entry: "attn_prefill",
                tile: 128,
                threads: 384,
                shared: (128 + 4 * 64) * 2 * shape.head_dim + 128,
                swapped: None,
            },
            PrefillAttention::SwappedSm90 => {
                let fits = |tiles: &usize| shape.swapped_stages(*tiles, 0).1 <= SWAPPED_SHARED;
                let tiles = SWAPPED_N8_TILES.into_iter().find(fits).unwrap_or(1);
                let (stages, shared) = shape.swapped_stages(tiles, SWAPPED_SHARED);
                PrefillTile {
                    entry: "attn_prefill",
                    tile: 8 * tiles,
                    threads: 256,
                    shared: shared.max(8 * tiles * OUT_STRIDE * 4),
                    swapped: Some((tiles, stages)),
                }
            }
            PrefillAttention::Mma => PrefillTile {
                entry: "attn_prefill",
                tile: 64,
                threads: 256,
                shared: (64 + 2 * 64) * 2 * shape.head_dim,
                swapped: None,
            },
        }
    }
}
