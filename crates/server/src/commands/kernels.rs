//! `hearth kernels`: the CUDA kernels, compiled ahead of time, and what each takes of a GPU.
//!
//! Opening a model compiles what it needs by itself and keeps it; this is for machines without a
//! compiler, for a first start without a wait, and for the gate.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use contract::{DeviceError, KvFormat, KvFormats, LoadConfig};
use cuda::compile::{Compiled, Options, compile, min_arch, uniform_copies};
use cuda::driver::Arch;
use cuda::launch::{CompileUnit, standard_units};
use cuda::{CudaBackend, GpuInfo};
use model::synth::SynthSpec;
use serde_json::json;

use super::kernel_targets::{LIMITS, arch, usual_gpu};
use super::{compressing, kernels_cost, kernels_explain, spill_record};
use crate::cli::{KernelsArgs, KernelsBuildArgs, KernelsCommand, KernelsListArgs};
use crate::config;
use crate::open;
use crate::open::model_path::is_remote;
use crate::progress::TaskProgress;

/// Models compiled if none is named, with their KV type.
const WELL_KNOWN: [(&str, KvFormat); 5] = [
    ("qwen3.5-27b:q4_k_m-published", KvFormat::F16),
    ("qwen3.5-27b:q4_k_m-published", KvFormat::Q8_0),
    ("qwen3.5-27b:q4_k_m-published", KvFormat::Q4_0),
    ("qwen3.5-27b:q4_k_m-published", KvFormat::Tq3_0),
    ("qwen3.5-0.8b:bf16-published", KvFormat::F16),
];
/// The first architecture that runs models.
const OLDEST: u32 = 80;

pub(super) fn kernels(args: &KernelsArgs) -> anyhow::Result<()> {
    match &args.what {
        KernelsCommand::Build(args) => build(args),
        KernelsCommand::List(args) => list(args),
        KernelsCommand::Explain(args) => kernels_explain::explain(args),
        KernelsCommand::Cost(args) => kernels_cost::cost(args),
    }
}

fn build(args: &KernelsBuildArgs) -> anyhow::Result<()> {
    let mut options = config::kernels::options(&args.compiler);
    if let Some(threads) = args.threads {
        options.threads = threads;
    }
    let archs = if args.arch.is_empty() {
        gpu_archs()?
    } else {
        let parsed: anyhow::Result<Vec<Arch>> = args.arch.iter().map(|text| arch(text)).collect();
        parsed?
    };
    let mut changes = Vec::new();
    for arch in archs {
        let start = Instant::now();
        let wanted = Wanted {
            models: &args.models,
            widths: &args.widths,
            numerics: args.numerics.map(open::numerics),
        };
        let compiled = compiled(arch, wanted, &options)?;
        let cached = compiled.iter().filter(|unit| unit.cached.is_some()).count();
        let entries = compiled.iter().flat_map(|unit| &unit.entries);
        let spilling = entries.filter(|entry| entry.spill_bytes > 0).count();
        let bytes: usize = compiled.iter().map(|unit| unit.cubin.len()).sum();
        writeln!(
            std::io::stdout(),
            "{arch}: {} units, {cached} of them from the cache, {} KiB, {} spilling, {:.1} s",
            compiled.len(),
            bytes / 1024,
            spilling,
            start.elapsed().as_secs_f64(),
        )?;
        changes.extend(spill_record::changes(arch, &compiled));
        let is_faulty = |unit: &&Compiled| uniform_copies(&unit.cubin) != Some(0);
        if let Some(faulty) = compiled.iter().find(is_faulty) {
            bail!(
                "{arch}: {} has copies to shared memory by uniform registers, which this compiler \
                 leaves unset; in the kernel, count each thread's shared address along",
                faulty.unit
            );
        }
    }
    let lines: Vec<String> = changes.iter().map(ToString::to_string).collect();
    if args.deny_spills && !lines.is_empty() {
        bail!("spills differ from the record:\n{}", lines.join("\n"));
    }
    lines.iter().for_each(|line| tracing::info!("{line}"));
    Ok(())
}

fn list(args: &KernelsListArgs) -> anyhow::Result<()> {
    let options = config::kernels::options(&args.compiler);
    let arch = match &args.arch {
        Some(text) => arch(text)?,
        None => *gpu_archs()?
            .first()
            .context("no CUDA GPU; name an architecture with --arch, such as --arch sm_86")?,
    };
    let wanted = Wanted {
        models: &args.models,
        widths: &[],
        numerics: args.numerics.map(open::numerics),
    };
    let compiled = compiled(arch, wanted, &options)?;
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

/// Which kernels are requested.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    /// Models; the well-known ones if empty.
    models: &'a [String],
    /// Row counts of units that have one; all if empty.
    widths: &'a [usize],
    /// Numerics of decode steps, if not the default.
    numerics: Option<cuda::Numerics>,
}

/// Compiles what is `wanted` for `arch`.
fn compiled(arch: Arch, wanted: Wanted<'_>, options: &Options) -> anyhow::Result<Vec<Compiled>> {
    let Wanted {
        models,
        widths,
        numerics,
    } = wanted;
    let mut units: BTreeSet<CompileUnit> = standard_units().into_iter().collect();
    // Older GPUs run no model. The kernels that they can run are compiled all the same.
    let runs_models = arch.number >= OLDEST;
    if models.is_empty() && runs_models {
        for (name, format) in WELL_KNOWN {
            let loaded = SynthSpec::parse(name)?.load()?;
            units.extend(of_model(&loaded, arch, numerics, format)?);
            units.extend(of_scorer(&loaded, arch)?);
        }
    }
    for name in models.iter().filter(|_| runs_models) {
        let path = Path::new(name);
        let loaded = if path.exists() || is_remote(name) {
            open::load(path)?
        } else {
            SynthSpec::parse(name)?.load()?
        };
        for format in [KvFormat::F16, KvFormat::Q8_0] {
            units.extend(of_model(&loaded, arch, numerics, format)?);
        }
        units.extend(of_scorer(&loaded, arch)?);
    }
    let units: Vec<CompileUnit> = units
        .into_iter()
        .filter(|unit| min_arch(unit.file) <= arch && arch.runs(unit.file))
        .filter(|unit| widths.is_empty() || width(unit).is_none_or(|rows| widths.contains(&rows)))
        .collect();
    if units.is_empty() {
        bail!("no kernel runs on {arch}; sm_80 and later have all of them");
    }
    let progress = TaskProgress::counting(format!("compiling kernels for {arch}"));
    let report = &mut |step: cuda::compile::CompileProgress| {
        progress.set(step.done as u64, step.total as u64);
    };
    let compiled = compile(arch, &units, options, report)?;
    for unit in compiled.iter().filter(|unit| unit.cached.is_none()) {
        tracing::debug!(ms = unit.took.as_millis() as u64, unit = %unit.unit, "compiled");
    }
    Ok(compiled)
}

/// The maximum rows of a unit, if it is compiled per row count.
fn width(unit: &CompileUnit) -> Option<usize> {
    let rows = unit.defines.iter().find(|(name, _)| *name == "ROWS");
    rows.and_then(|(_, rows)| rows.parse().ok())
}

/// The units that opening a model on a GPU of `arch` compiles, with `numerics` or the default.
fn of_model(
    loaded: &model::LoadedModel,
    arch: Arch,
    numerics: Option<cuda::Numerics>,
    format: KvFormat,
) -> anyhow::Result<Vec<CompileUnit>> {
    let config = LoadConfig {
        target: Arc::clone(&loaded.spec),
        weights: Arc::clone(&loaded.weights),
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: LIMITS,
    };
    let options = cuda::Options {
        numerics,
        ..cuda::Options::default()
    };
    Ok(CudaBackend::with_options(gpu_of(arch), options).units(&config)?)
}

/// The units that opening a model as a scorer of prompts compiles; none if it is too large, or if
/// only the CPU can score with it.
fn of_scorer(loaded: &model::LoadedModel, arch: Arch) -> anyhow::Result<Vec<CompileUnit>> {
    if !compressing::scores_itself(loaded.info.parameters) {
        return Ok(Vec::new());
    }
    let (config, _) = compressing::config(loaded, None);
    match CudaBackend::new(gpu_of(arch)).scorer_units(&config) {
        Err(DeviceError::Unsupported { .. }) => Ok(Vec::new()),
        units => Ok(units?),
    }
}

/// This machine's GPU of an architecture, or a usual one.
fn gpu_of(arch: Arch) -> GpuInfo {
    let here = cuda::probe().unwrap_or_default();
    let this = |gpu: &GpuInfo| gpu.capability == (arch.number / 10, arch.number % 10);
    here.into_iter()
        .find(this)
        .unwrap_or_else(|| usual_gpu(arch))
}

/// Architectures of this machine's GPUs, each once.
fn gpu_archs() -> anyhow::Result<Vec<Arch>> {
    let gpus = match cuda::probe() {
        Ok(gpus) => gpus,
        Err(absence) => {
            bail!(
                "{absence}; without a GPU, name an architecture with --arch, such as --arch sm_86"
            )
        }
    };
    let mut archs: Vec<Arch> = gpus
        .iter()
        .map(|gpu| Arch {
            number: gpu.capability.0 * 10 + gpu.capability.1,
        })
        .collect();
    archs.sort();
    archs.dedup();
    Ok(archs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_for_one_architecture_are_left_out_elsewhere() {
        let only = |file: &str, number| Arch { number }.runs(file);
        assert!(only("gemm/prefill_gemm_sm90.cu", 90) && !only("gemm/prefill_gemm_sm90.cu", 86));
        assert!(!only("gemm/prefill_gemm_sm90.cu", 120));
        assert!(only("gemm/prefill_gemm.cu", 86) && only("gemm/prefill_gemm.cu", 120));
    }
}
