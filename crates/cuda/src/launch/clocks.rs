//! Reading the GPU's clocks on the GPU: how many of them something takes, whatever their rate is.

use super::{Args, CompileUnit, Launch};

const THREADS: u32 = 1024;

/// What it is compiled from.
pub fn unit() -> CompileUnit {
    CompileUnit::new("common/clocks.cu")
}

/// Writes `[clocks, nanoseconds]` as `u64` of each of `multiprocessors` to `out`; begins when all
/// before it has ended.
pub fn read(out: u64, multiprocessors: u32) -> Launch {
    Launch {
        entry: "clocks_read",
        unit: unit(),
        grid: [multiprocessors, 1, 1],
        block: [THREADS, 1, 1],
        shared: 0,
        args: Args::new().ptr(out).u32(multiprocessors),
        cooperative: false,
        overlap: false,
    }
}
