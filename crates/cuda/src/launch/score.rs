//! Scoring a prompt: kept key blocks, tail logits, chunk scores (`kernels/score`).

use super::attention::{Cache, Shape, number};
use super::gemm::panels::{ChunkRows, count, int};
use super::{Args, CompileUnit, Launch};

/// Positions of a block, [`contract::BlockSparsity::BLOCK`].
const BLOCK: usize = contract::BlockSparsity::BLOCK;
/// Means of a block of the log-sum-exp launch.
const MEANS: usize = 64;
/// Threads of a block of the launches over tokens.
const TOKEN_THREADS: usize = 256;

/// Device memory of the choice of key blocks, for prompts of up to `max_blocks` blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockBuffers {
    /// Most blocks of a prompt.
    pub max_blocks: usize,
    /// f32 `[n_kv_heads][max_blocks][head_dim]`: mean keys.
    pub means: u64,
    /// f32 `[blocks of a chunk][n_heads][max_blocks]`.
    pub lse: u64,
    /// u32 `[blocks of a chunk][n_heads][words]`: bits of kept blocks.
    pub kept: u64,
}

impl BlockBuffers {
    /// Words of a query block's bits.
    pub fn words(self) -> usize {
        self.max_blocks.div_ceil(32)
    }

    /// Bytes of `means`, `lse` and `kept` for chunks of up to `rows` rows.
    pub fn bytes(shape: &Shape, rows: usize, max_blocks: usize) -> [usize; 3] {
        let lines = rows.div_ceil(BLOCK) * shape.n_heads;
        [
            4 * shape.n_kv_heads * max_blocks * shape.head_dim,
            4 * lines * max_blocks,
            4 * lines * max_blocks.div_ceil(32),
        ]
    }
}

/// Chooses the key blocks that the chunk's query blocks attend to.
///
/// `q` is f32 `[rows][n_heads][q_stride]` and `cache` has the chunk's keys, both rotated by
/// position. The chunk begins at a multiple of 128; its slot is 0. `call` is the address of a
/// `ScoreCall`.
pub fn kept_blocks(
    shape: &Shape,
    chunk: ChunkRows,
    call: u64,
    (q, cache): (u64, Cache),
    to: BlockBuffers,
) -> [Launch; 3] {
    let unit = CompileUnit::new("score/kept_blocks.cu")
        .define("HEAD_DIM", shape.head_dim)
        .define("HEADS", shape.n_heads)
        .define("KV_HEADS", shape.n_kv_heads)
        .define("Q_STRIDE", shape.q_stride())
        .define("K_FORMAT", number(shape.k));
    let blocks = count(chunk.rows.div_ceil(BLOCK));
    let heads = count(shape.n_heads);
    let max_blocks = int(to.max_blocks);
    let means = Args::new()
        .ptr(chunk.header)
        .words(&[cache.k, cache.k_scale])
        .words(&[cache.page_table, cache.max_pages as u64])
        .ptr(to.means)
        .i32(max_blocks);
    let lse = Args::new()
        .ptr(chunk.header)
        .ptr(q)
        .i32(int(shape.n_heads * shape.q_stride()))
        .ptr(to.means)
        .i32(max_blocks)
        .f32(shape.scale)
        .ptr(to.lse);
    let kept = Args::new()
        .ptr(chunk.header)
        .ptr(call)
        .ptr(to.lse)
        .i32(max_blocks)
        .ptr(to.kept)
        .i32(int(to.words()));
    let launch = |entry, grid, threads, args| launch(entry, unit.clone(), (grid, threads), args);
    [
        launch(
            "score_block_means",
            [blocks, count(shape.n_kv_heads), 1],
            count(shape.head_dim),
            means,
        ),
        launch(
            "score_block_lse",
            [count(to.max_blocks.div_ceil(MEANS)), heads, blocks],
            256,
            lse,
        ),
        launch("score_kept_blocks", [heads, blocks, 1], 128, kept),
    ]
}

/// Projections, norms and rotation of one layer's tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailInputs {
    /// f32 `[rows]` of queries `[n_heads][q_stride]`, or of keys `kv_stride` values apart.
    pub rows: u64,
    /// Floats between rows of keys.
    pub kv_stride: usize,
    /// f32 `[head_dim]`; unused without norms.
    pub norm: u64,
    /// What [`Shape::frequencies`] gives, on the GPU.
    pub frequencies: u64,
}

/// Device memory of the tail, for up to `max_tail` queries over up to `max_tokens` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailBuffers {
    /// Most tail queries.
    pub max_tail: usize,
    /// Most tokens.
    pub max_tokens: usize,
    /// f32 `[tail][n_heads][head_dim]`.
    pub queries: u64,
    /// f32 `[tail][n_heads][tokens]`.
    pub logits: u64,
    /// f32 `[tail][n_heads][2]`.
    pub stats: u64,
    /// f32 `[tail][tokens]`: the largest weight of each token so far.
    pub best: u64,
    /// f64 `[tokens]`.
    pub means: u64,
    /// f32 `[tokens]`: the chunk scores.
    pub scores: u64,
}

fn tail_unit(shape: &Shape, kv_stride: usize) -> CompileUnit {
    let unit = CompileUnit::new("score/tail.cu")
        .define("HEAD_DIM", shape.head_dim)
        .define("HEADS", shape.n_heads)
        .define("KV_HEADS", shape.n_kv_heads)
        .define("Q_STRIDE", shape.q_stride())
        .define("KV_STRIDE", kv_stride)
        .define("ROPE", shape.rope.dims)
        .define("QK_NORM", u32::from(shape.normed));
    shape.rope_pairs(unit)
}

fn tail_args(chunk: ChunkRows, call: u64, from: TailInputs, eps: f32) -> Args {
    Args::new()
        .ptr(chunk.header)
        .ptr(call)
        .ptr(from.rows)
        .ptr(from.norm)
        .ptr(from.frequencies)
        .f32(eps)
}

/// Tail queries among the chunk's rows, from their projections.
pub fn tail_queries(
    shape: &Shape,
    chunk: ChunkRows,
    call: u64,
    q: TailInputs,
    to: TailBuffers,
) -> Launch {
    let args = tail_args(chunk, call, q, shape.eps).ptr(to.queries);
    let grid = [count(shape.n_heads.div_ceil(4)), count(chunk.rows), 1];
    let unit = tail_unit(shape, q.kv_stride);
    launch("score_tail_queries", unit, (grid, 128), args)
}

/// Logits of the tail queries over the chunk's keys, from their projections.
pub fn tail_logits(
    shape: &Shape,
    chunk: ChunkRows,
    call: u64,
    k: TailInputs,
    to: TailBuffers,
) -> Launch {
    let args = tail_args(chunk, call, k, shape.eps)
        .ptr(to.queries)
        .f32(shape.scale)
        .ptr(to.logits);
    let grid = [count(chunk.rows.div_ceil(4)), count(shape.n_kv_heads), 1];
    let unit = tail_unit(shape, k.kv_stride);
    launch("score_tail_logits", unit, (grid, 128), args)
}

fn tokens_unit(n_heads: usize) -> CompileUnit {
    CompileUnit::new("score/tokens.cu").define("HEADS", n_heads)
}

/// Raises the best weights to those of a layer with `n_heads` heads, from its complete logits.
pub fn raise(n_heads: usize, call: u64, of: TailBuffers) -> [Launch; 2] {
    let unit = tokens_unit(n_heads);
    let (tail, tokens) = (
        count(of.max_tail),
        count(of.max_tokens.div_ceil(TOKEN_THREADS)),
    );
    let softmax = Args::new().ptr(call).ptr(of.logits).ptr(of.stats);
    let raise = Args::new()
        .ptr(call)
        .ptr(of.logits)
        .ptr(of.stats)
        .ptr(of.best);
    let grid = [count(n_heads), tail, 1];
    [
        launch("score_tail_softmax", unit.clone(), (grid, 512), softmax),
        launch("score_raise", unit, ([tokens, tail, 1], 256), raise),
    ]
}

/// Chunk scores from the best weights. `n_heads` are those of any scored layer, whose unit has the
/// kernels.
pub fn chunk_scores(n_heads: usize, call: u64, of: TailBuffers) -> [Launch; 2] {
    let unit = tokens_unit(n_heads);
    let grid = [count(of.max_tokens.div_ceil(TOKEN_THREADS)), 1, 1];
    let means = Args::new().ptr(call).ptr(of.best).ptr(of.means);
    let chunks = Args::new().ptr(call).ptr(of.means).ptr(of.scores);
    [
        launch("score_means", unit.clone(), (grid, 256), means),
        launch("score_chunks", unit, (grid, 256), chunks),
    ]
}

fn launch(
    entry: &'static str,
    unit: CompileUnit,
    (grid, threads): ([u32; 3], u32),
    args: Args,
) -> Launch {
    Launch {
        entry,
        unit,
        grid,
        block: [threads, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: false,
    }
}

#[cfg(test)]
mod tests {
    use contract::{KvFormat, RopeSpec};

    use super::*;
    use crate::launch::attention::Mask;

    const SHAPE: Shape = Shape {
        n_heads: 8,
        n_kv_heads: 2,
        head_dim: 256,
        rope: RopeSpec::new(64, 1e7),
        gate: true,
        normed: true,
        values_normed: false,
        k: KvFormat::F16,
        v: KvFormat::F16,
        rotated: true,
        eps: 1e-6,
        scale: 0.0625,
        window: 0,
        mask: Mask::Ancestors,
        ring_pages: 0,
    };

    #[test]
    fn grids_cover_the_longest_prompt_and_the_largest_chunk() {
        let chunk = ChunkRows {
            header: 0x100,
            rows: 4096,
        };
        let cache = Cache {
            k: 1,
            k_scale: 0,
            v: 2,
            v_scale: 0,
            page_table: 3,
            max_pages: 512,
        };
        let to = BlockBuffers {
            max_blocks: 1025,
            means: 4,
            lse: 5,
            kept: 6,
        };
        let [means, lse, kept] = kept_blocks(&SHAPE, chunk, 7, (8, cache), to);
        assert_eq!((means.grid, means.block[0]), ([32, 2, 1], 256));
        assert_eq!((lse.grid, lse.block[0]), ([17, 8, 32], 256));
        assert_eq!((kept.grid, kept.block[0]), ([8, 32, 1], 128));
        assert_eq!(to.words(), 33);
        let bytes = BlockBuffers::bytes(&SHAPE, 4096, 1025);
        assert_eq!(bytes, [4 * 2 * 1025 * 256, 4 * 256 * 1025, 4 * 256 * 33]);
        assert_eq!(lse.args.sizes(), [8, 8, 4, 8, 4, 4, 8]);
        assert_eq!(means.args.sizes(), [8, 16, 16, 8, 4]);
        let of = TailBuffers {
            max_tail: 32,
            max_tokens: 131_073,
            queries: 1,
            logits: 2,
            stats: 3,
            best: 4,
            means: 5,
            scores: 6,
        };
        let from = TailInputs {
            rows: 1,
            kv_stride: 512,
            norm: 2,
            frequencies: 3,
        };
        assert_eq!(tail_queries(&SHAPE, chunk, 7, from, of).grid, [2, 4096, 1]);
        assert_eq!(tail_logits(&SHAPE, chunk, 7, from, of).grid, [1024, 2, 1]);
        let [softmax, raise] = raise(8, 7, of);
        assert_eq!((softmax.grid, raise.grid), ([8, 32, 1], [513, 32, 1]));
        assert_eq!(chunk_scores(8, 7, of)[1].grid, [513, 1, 1]);
    }
}
