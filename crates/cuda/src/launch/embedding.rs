//! Embedding rows, read in the file's own format.

use contract::QuantType;

use super::norm::RowSource;
use super::{Args, CompileUnit, Launch};

/// Rows of `table` for the tokens of a step or chunk, into f32 `out` `[rows][width]`.
///
/// `table` holds `[vocab]` rows of `width` values as a GGUF file has them, from a 16-byte boundary
/// on.
pub fn gather(
    ty: QuantType,
    width: usize,
    rows: usize,
    source: RowSource,
    (table, out): (u64, u64),
) -> Launch {
    assert!(
        source.number() < 2 && width.is_multiple_of(ty.block_values()),
        "embedding rows of {width} {} values for {source:?}",
        ty.name()
    );
    Launch {
        entry: "embedding_gather",
        unit: CompileUnit::new("embedding/gather.cu")
            .define("SOURCE", source.number())
            .define("TYPE", ty.id())
            .define("WIDTH", width)
            .define("ROW_BYTES", ty.row_bytes(width)),
        grid: [width.div_ceil(1024) as u32, rows as u32, 1],
        block: [256, 1, 1],
        shared: 0,
        args: Args::new().ptr(source.header()).ptr(table).ptr(out),
        cooperative: false,
        overlap: true,
    }
}
