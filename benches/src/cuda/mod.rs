//! CUDA kernel benches, relative to the memory bandwidth measured in the same run.
//!
//! Each file has one area. Its `run` makes launches and passes them to [`Bench::case`]. A case that
//! should read device memory lists launches over distinct buffers that together exceed the L2
//! cache.

pub mod attention;
pub mod fused_layer;
pub mod gated_delta;
pub mod gemm_small_batch;
pub mod prefill;
pub mod rows;
pub mod steps;

use std::fs::File;
use std::io::Write;

use anyhow::{Context, Result};
use cuda::compile::{Modules, Options};
use cuda::driver::Gpu;
use cuda::launch::{CompileUnit, Launch, bandwidth};
use cuda::timing::Timing;
use serde_json::json;

/// Buffer size of the bandwidth measurement, far above any cache.
const BANDWIDTH_BYTES: usize = 2 << 30;
/// Timed passes, after the warm-up passes.
const PASSES: usize = 30;
const WARMUP: usize = 5;

/// Additional defines of a kernel form.
pub type Defines = Vec<(&'static str, String)>;

/// One benchmark run on one GPU.
pub struct Bench {
    /// The device.
    pub gpu: Gpu,
    /// Measured copy bandwidth in 1e9 bytes per second, read plus write.
    pub copy_gb_per_s: f64,
    /// Measured read bandwidth in 1e9 bytes per second.
    pub read_gb_per_s: f64,
    /// Row counts of timed steps. Empty selects the area's own list.
    pub rows: Vec<usize>,
    /// Kernel forms to time beside the shipped one.
    pub forms: Vec<Defines>,
    json: Option<File>,
}

/// Bytes and operations of one launch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// Minimum bus traffic in bytes: each input once, each output once.
    pub bytes: f64,
    /// Multiplications and additions.
    pub flops: f64,
}

impl Bench {
    /// Opens GPU 0, measures its memory and prints the table head. Lines also go to `json`.
    ///
    /// # Errors
    /// No GPU, or a device error.
    pub fn open(json: Option<File>) -> Result<Bench> {
        let gpu = Gpu::open(0)?;
        let mut bench = Bench {
            gpu,
            copy_gb_per_s: 0.0,
            read_gb_per_s: 0.0,
            rows: Vec::new(),
            forms: Vec::new(),
            json,
        };
        bench.measure_memory()?;
        let info = bench.gpu.info();
        writeln!(
            std::io::stdout(),
            "{}, {}, {} multiprocessors, driver {}: copy {:.0} GB/s, read {:.0} GB/s\n\
             {:<52} {:>9} {:>15} {:>8} {:>6} {:>8}",
            info.name,
            bench.gpu.arch(),
            info.sm_count,
            bench.gpu.driver_version(),
            bench.copy_gb_per_s,
            bench.read_gb_per_s,
            "case",
            "us",
            "spread us",
            "GB/s",
            "share",
            "TFLOP/s"
        )?;
        Ok(bench)
    }

    /// Compiles units.
    ///
    /// # Errors
    /// Compiler errors with file and line.
    pub fn modules(&self, units: &[CompileUnit]) -> Result<Modules> {
        Modules::compile(&self.gpu, units, &Options::default(), &mut |_| ())
            .context("compiling kernels")
    }

    /// Times `launches` in sequence in a replayed graph and prints the figures of one. `share` is
    /// relative to the measured read bandwidth. Returns microseconds per launch.
    ///
    /// # Errors
    /// Device errors.
    pub fn case(
        &mut self,
        area: &str,
        case: &str,
        modules: &Modules,
        launches: &[&Launch],
        work: Work,
    ) -> Result<f64> {
        let timing = self.gpu.time_graph(modules, launches, WARMUP, PASSES)?;
        self.line(area, case, timing, launches.len() as f64, work)
    }

    /// As [`Bench::case`] for a launch sequence. `work` and the figures cover the whole sequence.
    ///
    /// # Errors
    /// Device errors.
    pub fn sequence(
        &mut self,
        area: &str,
        case: &str,
        modules: &Modules,
        launches: &[&Launch],
        work: Work,
    ) -> Result<f64> {
        let timing = self.gpu.time_graph(modules, launches, WARMUP, PASSES)?;
        self.line(area, case, timing, 1.0, work)
    }

    fn line(
        &mut self,
        area: &str,
        case: &str,
        timing: Timing,
        launches: f64,
        work: Work,
    ) -> Result<f64> {
        let us = timing.median_us / launches;
        let (low, high) = (timing.low_us / launches, timing.high_us / launches);
        let gb_per_s = work.bytes / us / 1e3;
        let share = gb_per_s / self.read_gb_per_s;
        let tflops = work.flops / us / 1e6;
        let name = format!("{area} {case}");
        writeln!(
            std::io::stdout(),
            "{name:<52} {us:>9.2} {:>15} {gb_per_s:>8.0} {:>5.1}% {tflops:>8.1}",
            format!("{low:.2}..{high:.2}"),
            share * 100.0,
        )?;
        if let Some(file) = &mut self.json {
            let line = json!({
                "bench": "cuda_kernels", "area": area, "case": case,
                "card": self.gpu.info().name, "arch": self.gpu.arch().to_string(),
                "driver": self.gpu.driver_version(),
                "us": us, "low_us": low, "high_us": high,
                "gb_per_s": gb_per_s, "share_of_read": share, "tflop_per_s": tflops,
                "read_gb_per_s": self.read_gb_per_s, "copy_gb_per_s": self.copy_gb_per_s,
            });
            writeln!(file, "{line}")?;
        }
        Ok(us)
    }

    /// Measures copy and read bandwidth with several grids and keeps the best of each.
    fn measure_memory(&mut self) -> Result<()> {
        let modules = self.modules(&[bandwidth::unit()])?;
        let input = self.gpu.filled::<u8>(BANDWIDTH_BYTES, 0x5a)?;
        let output = self.gpu.alloc::<u8>(BANDWIDTH_BYTES)?;
        let bytes = BANDWIDTH_BYTES as u64;
        let multiprocessors = self.gpu.sm_count();
        for blocks in [1, 2, 4].map(|n| n * multiprocessors) {
            let copy = bandwidth::copy(input.ptr(), output.ptr(), bytes, blocks);
            let us = self.gpu.time_us(&modules, &[&copy], 2, 10)?;
            self.copy_gb_per_s = self.copy_gb_per_s.max(2.0 * bytes as f64 / us / 1e3);
            let read = bandwidth::read(input.ptr(), output.ptr(), bytes, blocks);
            let us = self.gpu.time_us(&modules, &[&read], 2, 10)?;
            self.read_gb_per_s = self.read_gb_per_s.max(bytes as f64 / us / 1e3);
        }
        Ok(())
    }
}
