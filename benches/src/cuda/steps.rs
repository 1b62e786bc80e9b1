//! Steps of many launches, timed by the card's own clocks: how many of them a step takes, at what rate, and with what energy.
//!
//! Cards at their power limit change their clock all the time, so milliseconds of two sittings, or of two forms in turn, differ
//! by 5 % for the same work; clocks of a step differ by 1 %. After a rest a card is not at its limit for some steps, so those
//! are timed too.

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

/// Steps of a graph.
const STEPS: usize = 8;
/// How long a form runs when its turn comes.
const TURN: Duration = Duration::from_millis(300);
/// Steps of a graph that runs after a rest, before the card comes to its power limit; how long it rests, and how often in a turn.
const FEW_STEPS: usize = 3;
const REST: Duration = Duration::from_millis(25);
const RESTS: usize = 8;

/// A graph of so many steps, and what each step has taken so far.
struct Replays {
    graph: Graph,
    steps: usize,
    clocks: Vec<f64>,
    us: Vec<f64>,
}

impl Replays {
    /// Runs the graph once, after a rest. `readings` is what it was captured with.
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

/// A step, run over and over and after rests.
pub struct Steps {
    /// Come to the card's power limit.
    many: Replays,
    /// After rests, as single steps of a server are run.
    few: Replays,
    /// `[STEPS + 1][multiprocessors]` readings of two words.
    readings: Buffer<u64>,
    /// Of `many`.
    joules: f64,
}

impl Steps {
    /// Captures the launches of a step, several times and readings of the clocks between.
    ///
    /// # Errors
    /// Those of the card.
    pub fn new(bench: &Bench, modules: &Modules, launches: &[Launch]) -> Result<Steps> {
        let count = bench.gpu.multiprocessors();
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

    /// Runs for a while, of which the first replay warms up and does not count, and then after rests.
    ///
    /// # Errors
    /// Those of the card.
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

    /// Prints the figures of all turns.
    ///
    /// # Errors
    /// When a line cannot be written.
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

/// The middle of the values, and what one in ten is below and above.
fn spread(values: Vec<f64>) -> [f64; 3] {
    let of = Timing::of(values);
    [of.median_us, of.low_us, of.high_us]
}

/// Clocks and nanoseconds from one reading to the next: the middle of all multiprocessors that both have.
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
