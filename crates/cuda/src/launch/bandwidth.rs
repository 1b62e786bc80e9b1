//! Reading and copying memory as fast as the GPU can: the measure of every other kernel.

use super::{Args, CompileUnit, Launch};

const THREADS: u32 = 512;

/// What both are compiled from.
pub fn unit() -> CompileUnit {
    CompileUnit::new("common/bandwidth.cu")
}

/// Units that every GPU compiles.
pub fn standard_units() -> Vec<CompileUnit> {
    vec![unit()]
}

/// Numerics `bytes` at `input` into `sums` `[blocks]`, a `u32` a block.
///
/// # Panics
/// If `bytes` is no multiple of 16.
pub fn read(input: u64, sums: u64, bytes: u64, blocks: u32) -> Launch {
    launch("bandwidth_read", input, sums, bytes, blocks)
}

/// Copies `bytes` from `input` to `output`.
///
/// # Panics
/// If `bytes` is no multiple of 16.
pub fn copy(input: u64, output: u64, bytes: u64, blocks: u32) -> Launch {
    launch("bandwidth_copy", input, output, bytes, blocks)
}

fn launch(entry: &'static str, input: u64, output: u64, bytes: u64, blocks: u32) -> Launch {
    assert!(bytes.is_multiple_of(16), "{bytes} bytes");
    Launch {
        entry,
        unit: unit(),
        grid: [blocks, 1, 1],
        block: [THREADS, 1, 1],
        shared: 0,
        args: Args::new().ptr(input).ptr(output).u64(bytes / 16),
        cooperative: false,
        overlap: false,
    }
}
