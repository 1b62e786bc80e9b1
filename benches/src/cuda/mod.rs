//! Kernels on the card, each beside what the card's memory can do, measured in the same sitting.
//!
//! A file per area has `run`, which makes launches and hands them to [`Bench::case`]. A case that is to be
//! timed from device memory lists launches over distinct buffers, more in all than the second-level cache.

pub mod attention;
pub mod chain;
pub mod delta;
pub mod matmul;
pub mod prefill;
pub mod rows;
pub mod steps;

use std::fs::File;
use std::io::Write;

use anyhow::{Context, Result};
use cuda::compile::{Modules, Options};
use cuda::driver::Gpu;
use cuda::launch::{Launch, Unit, bandwidth};
use cuda::timing::Timing;
use serde_json::json;

/// Bytes of the buffers that bandwidth is measured on: far more than any cache.
const BANDWIDTH_BYTES: usize = 2 << 30;
/// Passes of a timing, after a few to warm up.
const PASSES: usize = 30;
const WARMUP: usize = 5;

/// What a form of a kernel is compiled with besides: names and values.
pub type Defines = Vec<(&'static str, String)>;

/// One sitting on one card.
pub struct Bench {
    /// The card.
    pub gpu: Gpu,
    /// Measured bytes a second, in 1e9, of a copy: read plus written.
    pub copy_gb_per_s: f64,
    /// Measured bytes a second, in 1e9, of reading alone.
    pub read_gb_per_s: f64,
    /// Rows of the steps that are timed, where an area has a choice; by default its own list.
    pub rows: Vec<usize>,
    /// Forms of a kernel that are timed beside the one that ships, where an area has them.
    pub forms: Vec<Defines>,
    json: Option<File>,
}

/// What one launch of a case moves and computes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// Bytes that must cross the memory bus: each input once, each output once.
    pub bytes: f64,
    /// Multiplications and additions.
    pub flops: f64,
}

impl Bench {
    /// Opens card 0, measures its memory and prints the head of the table. Lines go to `json` too.
    ///
    /// # Errors
    /// Without a card, and those of the card.
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
        let card = bench.gpu.card();
        writeln!(
            std::io::stdout(),
            "{}, {}, {} multiprocessors, driver {}: copy {:.0} GB/s, read {:.0} GB/s\n\
             {:<52} {:>9} {:>15} {:>8} {:>6} {:>8}",
            card.name,
            bench.gpu.arch(),
            card.multiprocessors,
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
    /// Those of the compiler, with file and line.
    pub fn modules(&self, units: &[Unit]) -> Result<Modules> {
        Modules::compile(&self.gpu, units, &Options::default(), &mut |_| ())
            .context("compiling kernels")
    }

    /// Times `launches` one after the other in a replayed graph and prints the figures of one of them.
    /// `share` is of the measured read bandwidth. Gives microseconds of one launch.
    ///
    /// # Errors
    /// Those of the card.
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

    /// As [`Bench::case`] for a sequence of launches that belong together: `work` and the figures are of
    /// the whole sequence.
    ///
    /// # Errors
    /// Those of the card.
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
                "card": self.gpu.card().name, "arch": self.gpu.arch().to_string(),
                "driver": self.gpu.driver_version(),
                "us": us, "low_us": low, "high_us": high,
                "gb_per_s": gb_per_s, "share_of_read": share, "tflop_per_s": tflops,
                "read_gb_per_s": self.read_gb_per_s, "copy_gb_per_s": self.copy_gb_per_s,
            });
            writeln!(file, "{line}")?;
        }
        Ok(us)
    }

    /// Copies and reads two large buffers with several grids, and keeps the best of each.
    fn measure_memory(&mut self) -> Result<()> {
        let modules = self.modules(&[bandwidth::unit()])?;
        let input = self.gpu.filled::<u8>(BANDWIDTH_BYTES, 0x5a)?;
        let output = self.gpu.alloc::<u8>(BANDWIDTH_BYTES)?;
        let bytes = BANDWIDTH_BYTES as u64;
        let multiprocessors = self.gpu.multiprocessors();
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
