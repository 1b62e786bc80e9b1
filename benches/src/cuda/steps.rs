//! Decode steps measured in device clock cycles, with clock rate and energy.
//!
//! A GPU at its power limit changes its clock constantly. Milliseconds of two runs therefore differ
//! by 5 % for the same work, but cycles of a step by 1 %. After idling, a GPU is below its limit
//! for some steps, so those are timed too.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cuda::Meter;
use cuda::compile::Modules;
use cuda::driver::{Buffer, Graph};
use cuda::launch::{Launch, clocks};
use cuda::timing::Timing;
use serde_json::json;

use super::{Bench, Work};

/// Steps per graph.
const STEPS: usize = 8;
/// Duration of a form's measurement round.
const TURN: Duration = Duration::from_millis(300);
/// Steps of a graph that runs after idling, below the power limit. Also the idle time, and the
/// repetitions per round.
const FEW_STEPS: usize = 3;
const REST: Duration = Duration::from_millis(25);
const RESTS: usize = 8;

/// A graph of several steps, and the figures of each step.
struct Replays {
    graph: Graph,
    steps: usize,
    clocks: Vec<f64>,
    us: Vec<f64>,
}

impl Replays {
    /// Runs the graph once after idling. It was captured with `readings`.
    fn once(&mut self, bench: &Bench, readings: &mut Buffer<u64>, rest: Duration) -> Result<()> {
        readings.upload(&bench.gpu, &vec![0; readings.len()])?;
        std::thread::sleep(rest);
        bench.gpu.replay(&self.graph)?;
        let words = readings.download(&bench.gpu)?;
        let of_step = words.chunks_exact(words.len() / (STEPS + 1));
        let of_step: Vec<&[u64]> = of_step.take(self.steps + 1).collect();
        for pair in of_step.windows(2) {
            let (clocks, ns) = between(pair[0], pair[1]).context("no reading of the clocks")?;
            self.clocks.push(clocks);
            self.us.push(ns / 1e3);
        }
        Ok(())
    }
}

/// A step, timed continuously and after idling.
pub struct Steps {
    /// At the power limit.
    many: Replays,
    /// After idling, as a server runs single steps.
    few: Replays,
    /// `[STEPS + 1][multiprocessors]` readings of two words.
    readings: Buffer<u64>,
    /// Energy of `many`.
    joules: f64,
}

impl Steps {
    /// Captures several repetitions of a step with clock readings between them.
    ///
    /// # Errors
    /// Device errors.
    pub fn new(bench: &Bench, modules: &Modules, launches: &[Launch]) -> Result<Steps> {
        let count = bench.gpu.sm_count();
        let readings = bench
            .gpu
            .filled::<u64>((STEPS + 1) * 2 * count as usize, 0)?;
        let read = |step: usize| {
            let at = readings.ptr_at(step * 2 * count as usize);
            bench.gpu.run(modules, &clocks::read(at, count))
        };
        let capture = |steps: usize| -> Result<Replays> {
            let graph = bench.gpu.capture(|| {
                read(0)?;
                for step in 0..steps {
                    launches
                        .iter()
                        .try_for_each(|launch| bench.gpu.run(modules, launch))?;
                    read(step + 1)?;
                }
                Ok(())
            })?;
            Ok(Replays {
                graph,
                steps,
                clocks: Vec::new(),
                us: Vec::new(),
            })
        };
        Ok(Steps {
            many: capture(STEPS)?,
            few: capture(FEW_STEPS)?,
            readings,
            joules: 0.0,
        })
    }

    /// Runs continuously, discarding the first replay, and then after idling.
    ///
    /// # Errors
    /// Device errors.
    pub fn turn(&mut self, bench: &Bench, meter: Option<&Meter>) -> Result<()> {
        bench.gpu.replay(&self.many.graph)?;
        bench.gpu.sync()?;
        let joules = || meter.map_or(0.0, |meter| meter.read().joules);
        let (start, before) = (Instant::now(), joules());
        while start.elapsed() < TURN {
            self.many.once(bench, &mut self.readings, Duration::ZERO)?;
        }
        self.joules += joules() - before;
        for _ in 0..RESTS {
            self.few.once(bench, &mut self.readings, REST)?;
        }
        Ok(())
    }

    /// Prints the figures of all rounds.
    ///
    /// # Errors
    /// Output errors.
    pub fn report(self, bench: &mut Bench, area: &str, case: &str, work: Work) -> Result<()> {
        let Replays { clocks, us, .. } = self.many;
        let mhz = clocks.iter().zip(&us).map(|(clocks, us)| clocks / us);
        let mhz = spread(mhz.collect());
        let steps = us.len();
        bench.line(area, case, Timing::of(us), 1.0, work)?;
        let clocks = spread(clocks);
        let million = clocks.map(|v| v / 1e6);
        let joules = self.joules / steps.max(1) as f64;
        writeln!(
            std::io::stdout(),
            "{:<52} {:>9.3} million clocks ({:.3}..{:.3}) at {:.0} MHz, {joules:.2} J, {steps} steps",
            "",
            million[0],
            million[1],
            million[2],
            mhz[0],
        )?;
        let [rested_clocks, rested_us] = [self.few.clocks, self.few.us].map(spread);
        writeln!(
            std::io::stdout(),
            "{:<52} {:>9.2} us after a rest ({:.2}..{:.2}), {:.3} million clocks",
            "",
            rested_us[0],
            rested_us[1],
            rested_us[2],
            rested_clocks[0] / 1e6
        )?;
        if let Some(file) = &mut bench.json {
            let line = json!({
                "bench": "cuda_kernels", "area": area, "case": case,
                "million_clocks": million[0], "low": million[1], "high": million[2],
                "mhz": mhz[0], "joules": joules, "steps": steps,
                "rested_us": rested_us[0], "rested_low_us": rested_us[1], "rested_high_us": rested_us[2],
                "rested_million_clocks": rested_clocks[0] / 1e6,
            });
            writeln!(file, "{line}")?;
        }
        Ok(())
    }
}

/// Median, 10th and 90th percentile.
fn spread(values: Vec<f64>) -> [f64; 3] {
    let of = Timing::of(values);
    [of.median_us, of.low_us, of.high_us]
}

/// Cycles and nanoseconds between two readings: medians over the multiprocessors in both.
fn between(before: &[u64], after: &[u64]) -> Option<(f64, f64)> {
    let pairs = before.chunks_exact(2).zip(after.chunks_exact(2));
    let both = pairs.filter(|(a, b)| a[1] != 0 && b[1] != 0);
    let mut taken: Vec<[u64; 2]> = both
        .map(|(a, b)| [b[0].wrapping_sub(a[0]), b[1].wrapping_sub(a[1])])
        .collect();
    taken.sort_unstable();
    let [clocks, ns] = *taken.get(taken.len() / 2)?;
    Some((clocks as f64, ns as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_multiprocessor_missed_does_not_count() {
        let before = [100, 1_000, 0, 0, 500, 1_001];
        let after = [350, 2_000, 900, 2_000, 760, 2_005];
        assert_eq!(between(&before, &after), Some((260.0, 1_004.0)));
        assert_eq!(between(&before[2..4], &after[2..4]), None);
    }
}
