//! What a card's memory can do: the roof that figures are held against.

use contract::DeviceError;

use crate::compile::{Modules, Options};
use crate::driver::Gpu;
use crate::launch::bandwidth;
use crate::probe::GpuInfo;

/// Bytes that are read: far more than any cache, and little of any card.
const BYTES: u64 = 1 << 30;

/// Bytes a second of reading device memory once, the best of a few grids; takes milliseconds and 1
/// GiB.
///
/// # Errors
/// As opening a card and compiling a kernel.
pub fn read_bandwidth(card: &GpuInfo, options: &Options) -> Result<f64, DeviceError> {
    let gpu = Gpu::open(card.ordinal)?;
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
