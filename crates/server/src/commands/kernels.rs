//! `hearth kernels`: the CUDA kernels, compiled ahead of time, and what each takes of a card.
//!
//! What is compiled is the standard list: the shapes of well-known models and of the tests. Opening a model
//! compiles what it needs by itself; this is for machines without a compiler, and for the gate.

use std::io::Write;
use std::time::Instant;

use anyhow::{Context, bail};
use cuda::compile::{Compiled, EntryReport, Options, compile, hot, lowest};
use cuda::driver::Arch;
use cuda::launch::{Unit, standard_units};
use serde_json::json;

use crate::cli::{KernelsArgs, KernelsBuildArgs, KernelsCommand, KernelsListArgs};
use crate::commands::progress::Progress;
use crate::config;

pub(super) fn kernels(args: &KernelsArgs) -> anyhow::Result<()> {
    match &args.what {
        KernelsCommand::Build(args) => build(args),
        KernelsCommand::List(args) => list(args),
    }
}

fn build(args: &KernelsBuildArgs) -> anyhow::Result<()> {
    let mut options = config::kernels::options(&args.compiler);
    if let Some(threads) = args.threads {
        options.threads = threads;
    }
    let archs = if args.arch.is_empty() {
        cards()?
    } else {
        let parsed: anyhow::Result<Vec<Arch>> = args.arch.iter().map(|text| arch(text)).collect();
        parsed?
    };
    let mut spilling = Vec::new();
    for arch in archs {
        let start = Instant::now();
        let compiled = compiled(arch, &options)?;
        let cached = compiled.iter().filter(|unit| unit.cached.is_some()).count();
        let spills = spills(&compiled);
        let bytes: usize = compiled.iter().map(|unit| unit.cubin.len()).sum();
        writeln!(
            std::io::stdout(),
            "{arch}: {} units, {cached} of them from the cache, {} KiB, {} spilling, {:.1} s",
            compiled.len(),
            bytes / 1024,
            spills.len(),
            start.elapsed().as_secs_f64(),
        )?;
        for (unit, entry) in spills {
            let line = format!(
                "{arch} {unit}: {} spills {} bytes",
                entry.entry, entry.spill_bytes
            );
            if hot(unit.file) {
                spilling.push(line);
            } else {
                tracing::info!("{line}, which may be: no step waits for it");
            }
        }
    }
    if args.deny_spills && !spilling.is_empty() {
        bail!("these kernels must not spill:\n{}", spilling.join("\n"));
    }
    spilling.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(())
}

fn list(args: &KernelsListArgs) -> anyhow::Result<()> {
    let options = config::kernels::options(&args.compiler);
    let arch = match &args.arch {
        Some(text) => arch(text)?,
        None => *cards()?.first().context("no card")?,
    };
    let compiled = compiled(arch, &options)?;
    let mut out = std::io::stdout().lock();
    if !args.json {
        writeln!(
            out,
            "{:<28} {:>5} {:>6} {:>6} {:>7}  unit ({arch})",
            "entry", "regs", "spills", "stack", "shared"
        )?;
    }
    for unit in &compiled {
        for entry in &unit.entries {
            if args.json {
                let line = json!({
                    "arch": arch.to_string(), "unit": unit.unit.to_string(), "entry": entry.entry,
                    "registers": entry.registers, "spill_bytes": entry.spill_bytes,
                    "stack_bytes": entry.stack_bytes, "shared_bytes": entry.shared_bytes,
                    "hot": hot(unit.unit.file),
                });
                writeln!(out, "{line}")?;
            } else {
                writeln!(
                    out,
                    "{:<28} {:>5} {:>6} {:>6} {:>7}  {}",
                    entry.entry,
                    entry.registers,
                    entry.spill_bytes,
                    entry.stack_bytes,
                    entry.shared_bytes,
                    unit.unit
                )?;
            }
        }
    }
    Ok(())
}

/// The standard units that `arch` can run.
fn compiled(arch: Arch, options: &Options) -> anyhow::Result<Vec<Compiled>> {
    let units: Vec<Unit> = standard_units()
        .into_iter()
        .filter(|unit| lowest(unit.file) <= arch && arch.runs(unit.file))
        .collect();
    if units.is_empty() {
        bail!("no kernel runs on {arch}; sm_80 and later have all of them");
    }
    let progress = Progress::new(format!("compiling kernels for {arch}"));
    let told = &mut |step: cuda::compile::Progress| {
        progress.set(step.done as u64, step.total as u64);
    };
    Ok(compile(arch, &units, options, told)?)
}

/// Entries that spill, with their units.
fn spills(compiled: &[Compiled]) -> Vec<(&Unit, &EntryReport)> {
    compiled
        .iter()
        .flat_map(|unit| unit.entries.iter().map(|entry| (&unit.unit, entry)))
        .filter(|(_, entry)| entry.spill_bytes > 0)
        .collect()
}

/// Architectures of this machine's cards, each once.
fn cards() -> anyhow::Result<Vec<Arch>> {
    let cards = match cuda::probe() {
        Ok(cards) => cards,
        Err(absence) => {
            bail!("{absence}; without a card, say for which with --arch, such as --arch sm_86")
        }
    };
    let mut archs: Vec<Arch> = cards
        .iter()
        .map(|card| Arch {
            number: card.capability.0 * 10 + card.capability.1,
        })
        .collect();
    archs.sort();
    archs.dedup();
    Ok(archs)
}

fn arch(text: &str) -> anyhow::Result<Arch> {
    Arch::parse(text.trim()).with_context(|| {
        format!("--arch {text}: no architecture; use names such as sm_86 or sm_90a")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_architecture_is_refused_by_name() {
        let error = arch("ampere").unwrap_err().to_string();
        assert!(
            error.contains("ampere") && error.contains("sm_86"),
            "{error}"
        );
        assert_eq!(arch(" 86").unwrap(), arch("sm_86").unwrap());
    }

    #[test]
    fn variants_for_one_architecture_are_left_out_elsewhere() {
        let only = |file: &str, number| Arch { number }.runs(file);
        assert!(only("prefill/gemm_sm90.cu", 90) && !only("prefill/gemm_sm90.cu", 86));
        assert!(!only("prefill/gemm_sm90.cu", 120));
        assert!(only("prefill/gemm.cu", 86) && only("prefill/gemm.cu", 120));
    }
}
