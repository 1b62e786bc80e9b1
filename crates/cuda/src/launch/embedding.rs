//! Embedding rows, read in the file's own format.

use contract::QuantType;

use super::norm::RowSource;
use super::{Args, CompileUnit, Launch};

/// The embedding table: `[vocab]` rows as a GGUF file has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingTable {
    /// Their format.
    pub ty: QuantType,
    /// Values of a row.
    pub width: usize,
    /// Device address, 16-byte aligned.
    pub at: u64,
}

/// Rows of `table` for the tokens of a step or chunk, into f32 `out` `[rows][width]`.
pub fn gather(table: EmbeddingTable, rows: usize, source: RowSource, out: u64) -> Launch {
    scaled(table, rows, source, out, 1.0)
}

/// As [`gather`], multiplied by `scale`.
pub fn scaled(
    table: EmbeddingTable,
    rows: usize,
    source: RowSource,
    out: u64,
    scale: f32,
) -> Launch {
    let EmbeddingTable { ty, width, at } = table;
    assert!(
        source.number() < 2 && width.is_multiple_of(ty.block_values()),
        "embedding rows of {width} {} values for {source:?}",
        ty.name()
    );
    let unit = CompileUnit::new("embedding/gather.cu")
        .define("SOURCE", source.number())
        .define("TYPE", ty.id())
        .define("WIDTH", width)
        .define("ROW_BYTES", ty.row_bytes(width));
    let args = Args::new().ptr(source.header()).ptr(at).ptr(out);
    let (unit, args) = if scale == 1.0 {
        (unit, args)
    } else {
        (unit.define("SCALED", 1), args.f32(scale))
    };
    Launch {
        entry: "embedding_gather",
        unit,
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args,
        cooperative: false,
        overlap: true,
    }
}
