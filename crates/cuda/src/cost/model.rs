//! From instructions to milliseconds.
//!
//! A launch takes the longer of what memory needs and what a multiprocessor needs, then the
//! instructions outside its main loops one after the other, then a constant. A multiprocessor needs
//! the longer of what shared memory needs, and of issue slots or integer pipes and then tensor
//! cores: two warps a scheduler expand weights and multiply by turns, as measured steps show. A
//! step has a second time, as if products overlapped with all else.
//! Three constants are fitted to three measured steps; the others are published rates.

use super::rates::GpuRates;
use super::sheet::{LaunchCost, Sheet};

/// Schedulers of a multiprocessor, each with a tensor core and an integer pipe.
const SCHEDULERS: f64 = 4.0;
/// Warps of a block that multiply.
const MATH_WARPS: f64 = 8.0;

/// Constants that are fitted to measured steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Fit {
    /// Share of the stated rates of a multiprocessor that main loops reach: two warps a scheduler
    /// do not hide every wait.
    pub efficiency: f64,
    /// Clocks of an instruction outside main loops, on the way from the first to the last, waits
    /// for memory and for other blocks included.
    pub path_clocks: f64,
    /// Microseconds that each launch takes besides; below zero, what overlapping launches hide.
    pub launch_us: f64,
}

/// A step that was measured.
#[derive(Debug, Clone)]
pub struct MeasuredStep<'a> {
    /// Its launches.
    pub sheet: &'a Sheet,
    /// The GPU, with the multiprocessors in use.
    pub gpu: GpuRates,
    /// Milliseconds.
    pub ms: f64,
}

/// Milliseconds of a step by what needs them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTimes {
    /// Reading weights.
    pub dram: f64,
    /// Tensor cores, in main loops as the following.
    pub tensor: f64,
    /// Issue slots.
    pub issue: f64,
    /// Integer pipes.
    pub integer: f64,
    /// Shared memory.
    pub shared: f64,
    /// Main loops: of each launch the longest of memory, shared memory, and instructions with
    /// products behind them; all but memory by the fitted efficiency.
    pub loops: f64,
    /// The same as if products overlapped with instructions, at their peak.
    pub overlapped_loops: f64,
    /// Instructions outside main loops.
    pub path: f64,
    /// Constants of launches.
    pub ends: f64,
}

impl StepTimes {
    /// The step.
    pub fn total(&self) -> f64 {
        self.loops + self.path + self.ends
    }

    /// The step, as if products overlapped with all else in main loops.
    pub fn overlapped_total(&self) -> f64 {
        self.overlapped_loops + self.path + self.ends
    }

    /// Everything one after the other, each at its stated rate.
    pub fn sum(&self) -> f64 {
        let on_chip = self.tensor + self.issue.max(self.integer) + self.shared;
        self.dram + on_chip + self.path + self.ends
    }

    fn plus(self, other: StepTimes, times: f64) -> StepTimes {
        StepTimes {
            dram: self.dram + times * other.dram,
            tensor: self.tensor + times * other.tensor,
            issue: self.issue + times * other.issue,
            integer: self.integer + times * other.integer,
            shared: self.shared + times * other.shared,
            loops: self.loops + times * other.loops,
            overlapped_loops: self.overlapped_loops + times * other.overlapped_loops,
            path: self.path + times * other.path,
            ends: self.ends + times * other.ends,
        }
    }
}

/// The times of a step on a GPU.
pub fn step_times(sheet: &Sheet, gpu: &GpuRates, fit: &Fit) -> StepTimes {
    let launches = sheet.launches.iter();
    launches.fold(StepTimes::default(), |sum, launch| {
        sum.plus(launch_times(launch, gpu, fit), launch.count as f64)
    })
}

/// The times of one launch, in milliseconds.
pub fn launch_times(launch: &LaunchCost, gpu: &GpuRates, fit: &Fit) -> StepTimes {
    let clock_ms = 1e-6 / gpu.ghz;
    let mut times = StepTimes::default();
    for products in &launch.products {
        let per_sm = products.units as f64 * MATH_WARPS / gpu.sms as f64;
        let per_scheduler = per_sm / SCHEDULERS * clock_ms;
        let counts = &products.per_unit;
        times.dram += products.weight_bytes as f64 / gpu.read_gb_s * 1e-6;
        times.tensor += per_scheduler
            * (counts.tensor_f16 as f64 * gpu.hmma_clocks
                + counts.tensor_other as f64 * gpu.imma_clocks);
        times.issue += per_scheduler * counts.total() as f64;
        times.integer += per_scheduler * counts.integer as f64 * gpu.integer_clocks;
        times.shared += per_sm * counts.shared_clocks as f64 * clock_ms;
    }
    let expansion = times.issue.max(times.integer);
    let on_chip = times.shared.max(expansion + times.tensor);
    let overlapped = times.shared.max(expansion) / fit.efficiency;
    times.loops = times.dram.max(on_chip / fit.efficiency);
    times.overlapped_loops = times.dram.max(overlapped).max(times.tensor);
    let at_once =
        gpu.sms * gpu.blocks_per_sm(launch.threads, launch.registers, launch.shared_bytes);
    let waves = launch.blocks.div_ceil(at_once);
    times.path = waves as f64 * launch.path * fit.path_clocks * clock_ms;
    times.ends = fit.launch_us * 1e-3;
    times
}

impl Fit {
    /// The constants that give measured steps with the least squares of relative errors, of a grid:
    /// an efficiency of 20 to 100 %, at most 20 clocks, at most 10 us.
    pub fn solve(measured: &[MeasuredStep<'_>]) -> Fit {
        let mut best = (f64::INFINITY, Fit::default());
        for percent in 20..=100 {
            let unit = Fit {
                efficiency: f64::from(percent) / 100.0,
                path_clocks: 1.0,
                launch_us: 1.0,
            };
            let of = |step: &MeasuredStep<'_>| (step_times(step.sheet, &step.gpu, &unit), step.ms);
            let steps: Vec<(StepTimes, f64)> = measured.iter().map(of).collect();
            for (clocks, us) in (0..=200).flat_map(|clocks| (0..=40).map(move |us| (clocks, us))) {
                let fit = Fit {
                    path_clocks: f64::from(clocks) / 10.0,
                    launch_us: f64::from(us) / 4.0,
                    ..unit
                };
                let error = |(times, ms): &(StepTimes, f64)| {
                    let path = times.path * fit.path_clocks + times.ends * fit.launch_us;
                    ((times.loops + path) / ms - 1.0).powi(2)
                };
                let errors = steps.iter().map(error).sum();
                if errors < best.0 {
                    best = (errors, fit);
                }
            }
        }
        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::counts::Counts;
    use crate::cost::rates::H100;
    use crate::cost::sheet::Products;
    use crate::pack::WeightKind;

    fn sheet(path: f64) -> Sheet {
        let per_unit = Counts {
            tensor_f16: 32,
            integer: 400,
            control: 500,
            shared_clocks: 200,
            ..Counts::default()
        };
        Sheet {
            rows: 1,
            launches: vec![LaunchCost {
                entry: "gemm_small_batch",
                file: "gemm/decode_gemm_small_batch.cu",
                count: 100,
                blocks: 132,
                threads: 288,
                registers: 128,
                spill_bytes: 0,
                shared_bytes: 98 << 10,
                products: vec![Products {
                    kind: WeightKind::Q4K,
                    units: 4_000,
                    weight_bytes: 4_000 * 36_864,
                    per_unit,
                }],
                path,
            }],
        }
    }

    #[test]
    fn a_launch_takes_its_longest_part_then_its_path_and_its_end() {
        let fit = Fit {
            efficiency: 0.5,
            path_clocks: 2.0,
            launch_us: 3.0,
        };
        let times = step_times(&sheet(990.0), &H100, &fit);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-3 * b, "{a} {b}");
        near(times.dram, 100.0 * 147.456e6 / 3085e9 * 1e3);
        near(times.issue, 100.0 * 4_000.0 * 8.0 * 932.0 / 528.0 / 1.98e6);
        near(times.integer, times.issue * 800.0 / 932.0);
        near(times.shared, times.issue * 4.0 * 200.0 / 932.0);
        near(
            times.loops,
            times.dram.max((times.issue + times.tensor) / 0.5),
        );
        near(times.overlapped_loops, times.dram.max(times.issue / 0.5));
        assert!(times.overlapped_total() < times.total());
        near(times.path, 100.0 * 990.0 * 2.0 / 1.98e6);
        near(times.ends, 0.3);
        near(
            times.sum(),
            times.dram + times.tensor + times.issue + times.shared + times.path + times.ends,
        );
    }

    #[test]
    fn constants_that_made_three_steps_are_found_again() {
        let made = Fit {
            efficiency: 0.7,
            path_clocks: 2.5,
            launch_us: 4.0,
        };
        let (short, long) = (sheet(1_000.0), sheet(4_000.0));
        let few = GpuRates { sms: 60, ..H100 };
        let measured = |sheet, gpu| MeasuredStep {
            sheet,
            gpu,
            ms: step_times(sheet, &gpu, &made).total(),
        };
        let steps = [
            measured(&short, H100),
            measured(&long, H100),
            measured(&short, few),
        ];
        assert_eq!(Fit::solve(&steps), made);
    }
}
