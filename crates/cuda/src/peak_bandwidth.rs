//! Peak read bandwidth of device memory, which benchmarks compare kernels with.

use contract::DeviceError;

use crate::compile::{Modules, Options};
use crate::driver::Gpu;
use crate::launch::bandwidth;
use crate::probe::GpuInfo;

/// Bytes that are read: far more than any cache, and little of any GPU's memory.
const BYTES: u64 = 1 << 30;

/// Bytes per second of reading device memory once, the best of three grid sizes. Takes milliseconds
/// and 1 GiB of device memory.
///
/// # Errors
/// Those of opening a GPU and of compiling a kernel.
pub fn read_bandwidth(info: &GpuInfo, options: &Options) -> Result<f64, DeviceError> {
    let gpu = Gpu::open(info.ordinal)?;
    let modules = Modules::compile(&gpu, &[bandwidth::unit()], options, &mut |_| ())?;
    let input = gpu.filled::<u8>(usize::try_from(BYTES).unwrap_or(0), 0x5a)?;
    let sums = gpu.alloc::<u32>(4 * gpu.sm_count() as usize)?;
    let mut best = f64::INFINITY;
    for blocks in [1, 2, 4].map(|n| n * gpu.sm_count()) {
        let read = bandwidth::read(input.ptr(), sums.ptr(), BYTES, blocks);
        best = best.min(gpu.time_us(&modules, &[&read], 2, 10)?);
    }
    Ok(BYTES as f64 / best * 1e6)
}
