//! The table and the JSON lines of the benchmarks.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use contract::DeviceInfo;
use cuda::Reading;
use serde_json::json;

use crate::open::devices::GpuInstruments;

/// Runs of at least this length are long compared with the period of the energy counter.
const MIN_COUNTED: Duration = Duration::from_millis(500);

/// The measurement of a case.
#[derive(Debug, Clone)]
pub(super) struct ReportLine {
    /// The case's name, such as `verify 24`.
    pub(super) case: String,
    /// Committed tokens before the case.
    pub(super) depth: usize,
    /// Milliseconds of each run.
    pub(super) ms: Vec<f64>,
    /// Processor time of all threads in each run, in milliseconds; may be empty.
    pub(super) cpu_ms: Vec<f64>,
    /// Tokens, nodes or positions of one run.
    pub(super) tokens: usize,
    /// Bytes that a run must read, or 0 if it is bound by operations.
    pub(super) bytes: f64,
    /// Operations of a run, or 0 if it is bound by bytes.
    pub(super) flops: f64,
    /// Energy of all runs together.
    pub(super) energy: Energy,
}

/// Energy of runs, by the GPU's power meter.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Energy {
    joules: f64,
    clock_mhz: u32,
    limit_watts: f64,
}

impl Energy {
    /// Adds the energy of a run between two readings.
    ///
    /// The GPU updates its energy counter ten times a second, so a short run counts as power times
    /// time.
    pub(super) fn add(&mut self, before: Reading, after: Reading, took: Duration) {
        let counted = after.joules - before.joules;
        self.joules += if took >= MIN_COUNTED && counted > 0.0 {
            counted
        } else {
            after.watts * took.as_secs_f64()
        };
        self.clock_mhz = after.clock_mhz;
        self.limit_watts = after.limit_watts;
    }
}

/// Writes measurements as a table and as JSON lines.
pub(super) struct Report {
    instruments: Option<GpuInstruments>,
    json: Option<File>,
    model: String,
    device: String,
    /// KV cache types, if lines report them.
    kv: Option<(&'static str, &'static str)>,
}

impl Report {
    /// Opens the file of JSON lines and prints the table's header.
    pub(super) fn new(
        json: Option<&Path>,
        loaded: &model::LoadedModel,
        device: &DeviceInfo,
        instruments: Option<GpuInstruments>,
    ) -> anyhow::Result<Report> {
        let json = match json {
            Some(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                Some(file.with_context(|| format!("--json {}", path.display()))?)
            }
            None => None,
        };
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{} on {} ({})",
            loaded.info.name,
            device.name,
            device.features.join(", ")
        )?;
        for share in &loaded.info.types {
            let gb = share.bytes as f64 / 1e9;
            writeln!(
                out,
                "  {:<8} {:>4} tensors {gb:>8.3} GB",
                share.ty.name(),
                share.tensors
            )?;
        }
        if let Some(instruments) = &instruments {
            let gb = instruments.read_bytes_per_s / 1e9;
            writeln!(
                out,
                "peak bandwidth, measured before the model was loaded: {gb:.0} GB/s"
            )?;
        }
        writeln!(
            out,
            "{:<28} {:>7} {:>9} {:>17} {:>9} {:>8} {:>7} {:>6} {:>8} {:>6} {:>8}",
            "case",
            "depth",
            "ms",
            "spread ms",
            "tok/s",
            "GB read",
            "GB/s",
            "peak",
            "TFLOP/s",
            "MHz",
            "J/token"
        )?;
        Ok(Report {
            instruments,
            json,
            model: loaded.info.name.clone(),
            device: device.name.clone(),
            kv: None,
        })
    }

    /// Reports the KV cache types in every line.
    pub(super) fn with_kv(mut self, kv: (&'static str, &'static str)) -> Report {
        self.kv = Some(kv);
        self
    }

    /// Reports the peak memory, with the CUDA context and modules, and the planned memory.
    pub(super) fn memory(&mut self, peak: u64, planned: u64, context: usize) -> anyhow::Result<()> {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        writeln!(
            std::io::stdout(),
            "peak memory by the driver's free memory: {:.3} GiB of {:.3} planned, context of {context}",
            gib(peak),
            gib(planned)
        )?;
        if let Some(file) = &mut self.json {
            let line = json!({
                "bench": "depth", "model": self.model, "device": self.device, "case": "memory", "kv": self.kv,
                "context": context, "taken_bytes": peak, "taken_gib": gib(peak), "planned_bytes": planned,
            });
            writeln!(file, "{line}").context("the file of --json")?;
        }
        Ok(())
    }

    /// The power meter's reading, if there is a meter.
    pub(super) fn meter_reading(&self) -> Option<Reading> {
        let meter = self.instruments.as_ref()?.meter.as_ref()?;
        Some(meter.read())
    }

    /// Prints a measurement and appends it to the file.
    pub(super) fn line(&mut self, line: &ReportLine) -> anyhow::Result<()> {
        let mut sorted = line.ms.clone();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[0], sorted[sorted.len() - 1]);
        let ms = sorted[sorted.len() / 2];
        let mut cpu_ms = line.cpu_ms.clone();
        cpu_ms.sort_by(f64::total_cmp);
        let cpu_ms = cpu_ms.get(cpu_ms.len() / 2).copied();
        let seconds = ms / 1e3;
        // A difference of two times can be zero within noise; then there is no rate.
        let per_s = if ms > 0.0 {
            line.tokens as f64 / seconds
        } else {
            0.0
        };
        let gb_per_s = per_s * line.bytes / line.tokens as f64 / 1e9;
        let share = self
            .instruments
            .as_ref()
            .map(|instruments| gb_per_s * 1e9 / instruments.read_bytes_per_s);
        let tflops = per_s * line.flops / line.tokens as f64 / 1e12;
        let energy = line.energy;
        let mhz = energy.clock_mhz;
        let joules = energy.joules / (line.tokens * line.ms.len()) as f64;
        let shown = |value: f64, text: String| if value > 0.0 { text } else { "-".to_owned() };
        let share = share.filter(|_| line.bytes > 0.0);
        writeln!(
            std::io::stdout(),
            "{:<28} {:>7} {ms:>9.3} {:>17} {per_s:>9.1} {:>8} {:>7} {:>6} {:>8} {:>6} {:>8}",
            line.case,
            line.depth,
            format!("{low:.3}..{high:.3}"),
            shown(line.bytes, format!("{:.3}", line.bytes / 1e9)),
            shown(line.bytes, format!("{gb_per_s:.0}")),
            share.map_or("-".to_owned(), |share| format!("{:.1}%", share * 100.0)),
            shown(line.flops, format!("{tflops:.1}")),
            shown(f64::from(mhz), mhz.to_string()),
            shown(joules, format!("{joules:.3}")),
        )?;
        if let Some(file) = &mut self.json {
            let read = self.instruments.as_ref().map(|i| i.read_bytes_per_s / 1e9);
            let line = json!({
                "bench": "step", "model": self.model, "device": self.device, "case": line.case,
                "depth": line.depth, "ms": ms, "low_ms": low, "high_ms": high, "runs": line.ms.len(), "cpu_ms": cpu_ms,
                "tokens": line.tokens, "tokens_per_s": per_s, "bytes": line.bytes,
                "gb_per_s": gb_per_s, "share_of_roofline": share, "read_gb_per_s": read,
                "tflop_per_s": tflops, "sm_mhz": mhz, "joules_per_token": joules,
                "power_limit_w": energy.limit_watts, "kv": self.kv, "version": env!("CARGO_PKG_VERSION"),
            });
            writeln!(file, "{line}").context("the file of --json")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_are_counted_and_short_runs_are_power_times_time() {
        let reading = |joules: f64| Reading {
            joules,
            watts: 300.0,
            limit_watts: 350.0,
            ..Reading::default()
        };
        let joules_of = |before: f64, after: f64, ms: u64| {
            let mut energy = Energy::default();
            energy.add(reading(before), reading(after), Duration::from_millis(ms));
            assert_eq!(energy.limit_watts, 350.0);
            energy.joules
        };
        assert_eq!(joules_of(1000.0, 1250.0, 1000), 250.0);
        assert_eq!(joules_of(1000.0, 1010.0, 100), 30.0);
        assert_eq!(joules_of(0.0, 0.0, 1000), 300.0, "a GPU without a counter");
    }
}
