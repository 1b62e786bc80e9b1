//! Launches of a multi-token-prediction head beside those that its layer shares with the trunk.
//!
//! `kernels/mtp/hidden_rows.cuh` has the pool of hidden rows that the head reads.

use super::gemm::panels::{Panels, PrefillActivations, count};
use super::norm::ActivationBuffers;
use super::{Args, CompileUnit, Launch};
use crate::step::TREES;

/// Threads of a block, which holds one row.
const THREADS: u32 = 256;

/// Hidden rows of all slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenPool {
    /// f32 `[slots][rows_per_slot][width]`.
    pub at: u64,
    /// Values of a row, a multiple of 32.
    pub width: usize,
    /// Rows of a slot: that of the last committed position, then those of nodes or drafted rows.
    pub rows_per_slot: usize,
}

impl HiddenPool {
    fn unit(self, file: &'static str) -> CompileUnit {
        assert!(
            self.width.is_multiple_of(32) && self.rows_per_slot > 1,
            "hidden rows of {self:?}"
        );
        CompileUnit::new(file)
            .define("HIDDEN", self.width)
            .define("HIDDEN_ROWS", self.rows_per_slot)
    }
}

/// What [`join`] and [`join_chunk`] read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JoinInputs {
    /// The tokens' embeddings, f32 `[rows][width]`.
    pub embedding: u64,
    /// Hidden rows.
    pub pool: HiddenPool,
    /// f32 `[width]`: norm of the embedding.
    pub embedding_norm: u64,
    /// f32 `[width]`: norm of the hidden row.
    pub hidden_norm: u64,
    /// Epsilon of all norms.
    pub eps: f32,
}

/// The rows of a chunk, whose hidden rows come from the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkStream {
    /// The `Chunk`.
    pub header: u64,
    /// f32 `[rows][width]`.
    pub residual: u64,
    /// f32 `[width]`: the model's final norm.
    pub final_norm: u64,
}

fn arguments(header: u64, from: JoinInputs, (residual, final_norm): (u64, u64)) -> Args {
    Args::new()
        .ptr(header)
        .ptr(from.embedding)
        .ptr(residual)
        .ptr(from.pool.at)
        .ptr(final_norm)
        .ptr(from.embedding_norm)
        .ptr(from.hidden_norm)
        .f32(from.eps)
}

fn row_launch(entry: &'static str, unit: CompileUnit, rows: usize, args: Args) -> Launch {
    Launch {
        entry,
        unit,
        grid: [count(rows), 1, 1],
        block: [THREADS, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: true,
    }
}

/// Joins the normed embedding and hidden row of each row of the `MtpStep` at `step`, `[rows][2 *
/// width]`, in the forms of `out`.
pub fn join(rows: usize, step: u64, from: JoinInputs, out: ActivationBuffers) -> Launch {
    assert!(
        out != ActivationBuffers::default(),
        "a launch without a result"
    );
    let unit = from.pool.unit("mtp/join.cu");
    let unit = unit.define("FROM_CHUNK", 0).define("PANELS", 0);
    let unit = out.define(unit, 2 * from.pool.width, rows);
    let args = arguments(step, from, (0, 0)).words(&out.words());
    row_launch("mtp_join", unit, rows, args)
}

/// As [`join`], for the rows of a chunk with the decode kernels.
pub fn join_chunk(
    rows: usize,
    chunk: ChunkStream,
    from: JoinInputs,
    out: ActivationBuffers,
) -> Launch {
    assert!(
        out != ActivationBuffers::default(),
        "a launch without a result"
    );
    let unit = from.pool.unit("mtp/join.cu");
    let unit = unit.define("FROM_CHUNK", 1).define("PANELS", 0);
    let unit = out.define(unit, 2 * from.pool.width, rows);
    let stream = (chunk.residual, chunk.final_norm);
    let args = arguments(chunk.header, from, stream).words(&out.words());
    row_launch("mtp_join", unit, rows, args)
}

/// As [`join`], for the rows of a chunk with the prefill kernels.
pub fn join_prefill(
    rows: usize,
    chunk: ChunkStream,
    from: JoinInputs,
    out: PrefillActivations,
) -> Launch {
    assert!(
        out != PrefillActivations::default(),
        "a launch without a result"
    );
    let unit = from.pool.unit("mtp/join.cu");
    let unit = unit.define("FROM_CHUNK", 1).define("PANELS", 1);
    let stream = (chunk.residual, chunk.final_norm);
    let rows_cap = Panels::new(0, rows).rows as u64;
    let args = arguments(chunk.header, from, stream).words(&[out.panels, out.f32, rows_cap]);
    Launch {
        overlap: false,
        ..row_launch("mtp_join", unit, rows, args)
    }
}

/// Which rows [`keep_hidden`] keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptRows {
    /// All rows of the `Step` at this address, as nodes of their trees.
    Nodes(u64),
    /// All rows of the `MtpStep` at this address, as drafted rows.
    Drafted(u64),
    /// The last row of the `Chunk` at this address, as that of the last committed position.
    LastOfChunk(u64),
}

/// Writes rows of the residual stream `x` f32 `[rows][width]`, after the norm `(weight, eps)`, to
/// the pool.
pub fn keep_hidden(
    rows: usize,
    kept: KeptRows,
    x: u64,
    (weight, eps): (u64, f32),
    pool: HiddenPool,
) -> Launch {
    let (number, header, rows) = match kept {
        KeptRows::Nodes(at) => (0, at, rows),
        KeptRows::Drafted(at) => (1, at, rows),
        KeptRows::LastOfChunk(at) => (2, at, 1),
    };
    let unit = pool.unit("mtp/keep_hidden.cu").define("ROWS_OF", number);
    let args = Args::new()
        .ptr(header)
        .ptr(x)
        .ptr(weight)
        .f32(eps)
        .ptr(pool.at);
    row_launch("mtp_keep_hidden", unit, rows, args)
}

/// Makes the hidden row of the last node of each path of the `MtpStep` at `step` that of the last
/// committed position.
pub fn commit_hidden(step: u64, pool: HiddenPool) -> Launch {
    Launch {
        grid: [
            count(pool.width.div_ceil(4 * THREADS as usize)),
            count(TREES),
            1,
        ],
        ..row_launch(
            "mtp_commit_hidden",
            pool.unit("mtp/commit_hidden.cu"),
            1,
            Args::new().ptr(step).ptr(pool.at),
        )
    }
}
