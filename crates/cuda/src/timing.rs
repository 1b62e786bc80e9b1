//! Launch timing with device events.

use contract::DeviceError;

use crate::compile::Modules;
use crate::driver::{Event, Gpu};
use crate::launch::Launch;

/// Minimum launches in a timed graph, so that the graph's own start matters little.
const GRAPH_LAUNCHES: usize = 40;

/// Microseconds of one pass over a list of launches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Median of all passes.
    pub median_us: f64,
    /// 10th percentile.
    pub low_us: f64,
    /// 90th percentile.
    pub high_us: f64,
}

impl Timing {
    /// Percentiles of measured passes.
    ///
    /// # Panics
    /// If `passes` is empty.
    pub fn of(mut passes: Vec<f64>) -> Timing {
        assert!(!passes.is_empty(), "nothing was timed");
        passes.sort_by(f64::total_cmp);
        let at = |tenths: usize| passes[(passes.len() - 1) * tenths / 10];
        Timing {
            median_us: at(5),
            low_us: at(1),
            high_us: at(9),
        }
    }
}

impl Gpu {
    /// Median microseconds of [`Gpu::time`].
    pub fn time_us(
        &self,
        modules: &Modules,
        launches: &[&Launch],
        warmup: usize,
        reps: usize,
    ) -> Result<f64, DeviceError> {
        Ok(self.time(modules, launches, warmup, reps)?.median_us)
    }

    /// Median microseconds of [`Gpu::time_graph`].
    pub fn time_graph_us(
        &self,
        modules: &Modules,
        launches: &[&Launch],
        warmup: usize,
        reps: usize,
    ) -> Result<f64, DeviceError> {
        Ok(self.time_graph(modules, launches, warmup, reps)?.median_us)
    }

    /// Times one pass over `launches`, queued one by one, gaps included.
    ///
    /// To time a kernel on uncached data, list it several times with different buffers and divide
    /// by the length of the list.
    pub fn time(
        &self,
        modules: &Modules,
        launches: &[&Launch],
        warmup: usize,
        reps: usize,
    ) -> Result<Timing, DeviceError> {
        let ready: Vec<_> = launches
            .iter()
            .map(|launch| Ok((modules.function(self, launch)?, *launch)))
            .collect::<Result<_, DeviceError>>()?;
        let pass = || {
            ready
                .iter()
                .try_for_each(|(function, launch)| self.run_function(function, launch))
        };
        self.passes(warmup, reps, 1.0, pass)
    }

    /// Times one pass over `launches` in a captured graph. The graph repeats the list until its own
    /// start matters little.
    pub fn time_graph(
        &self,
        modules: &Modules,
        launches: &[&Launch],
        warmup: usize,
        reps: usize,
    ) -> Result<Timing, DeviceError> {
        let copies = GRAPH_LAUNCHES.div_ceil(launches.len().max(1));
        let graph = self.capture(|| {
            (0..copies).try_for_each(|_| launches.iter().try_for_each(|l| self.run(modules, l)))
        })?;
        self.passes(warmup, reps, copies as f64, || self.replay(&graph))
    }

    /// Times `reps` calls of `queue` after `warmup` calls, each divided by `copies`.
    pub fn passes(
        &self,
        warmup: usize,
        reps: usize,
        copies: f64,
        queue: impl Fn() -> Result<(), DeviceError>,
    ) -> Result<Timing, DeviceError> {
        (0..warmup).try_for_each(|_| queue())?;
        let events: Vec<Event> = (0..=reps)
            .map(|_| Event::new(self))
            .collect::<Result<_, _>>()?;
        for event in &events[..reps] {
            self.stream().record(event)?;
            queue()?;
        }
        self.stream().record(&events[reps])?;
        self.sync()?;
        let passes = events
            .windows(2)
            .map(|pair| Ok(pair[1].us_since(&pair[0])? / copies))
            .collect::<Result<Vec<_>, DeviceError>>()?;
        Ok(Timing::of(passes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_ignores_a_slow_pass() {
        let timing = Timing::of(vec![3.0, 1.0, 2.0, 900.0, 2.5]);
        assert_eq!(timing.median_us, 2.5);
        assert_eq!(timing.low_us, 1.0);
    }
}
