//! `hearth kernels cost`: what a decode step would take on home GPUs, counted from machine code.
//!
//! It counts a step as it runs by default, with fused layers where the model and the GPU have them.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, bail};
use contract::{KvFormat, KvFormats, Limits, LoadConfig};
use cuda::compile::{Compiled, Options, compile};
use cuda::cost::{
    Fit, GpuRates, H100, H200, LaunchCost, MeasuredStep, PromptFit, PromptSheet, Sheet, StepTimes,
    UnitCode, launch_times, listing, step_times,
};
use cuda::driver::Arch;
use cuda::launch::CompileUnit;
use cuda::{CudaBackend, GpuInfo};
use model::synth::SynthSpec;

use super::kernel_targets::{LIMITS, arch, usual_gpu};
use crate::cli::KernelsCostArgs;
use crate::config;
use crate::open;
use crate::open::model_path::is_remote;

/// Tokens before the step, as in the measurements.
const DEPTH: usize = 512;
/// Share by which a prediction may be off before it counts as wrong.
const TOLERANCE: f64 = 0.15;
/// The constants that `--check` fits to the first of the figures below.
const FITTED: Fit = Fit {
    efficiency: 0.88,
    path_clocks: 3.6,
    launch_us: 1.5,
};
/// The constant of a launch where launches overlap.
const OVERLAPPED_LAUNCH_US: f64 = 1.53;
/// Constants of the GEMMs of prompts, fitted to the five of a 27B that an H200 measured one by one:
/// -6 to +4 %.
const PROMPT_FIT: PromptFit = PromptFit {
    efficiency: 0.88,
    path_clocks: 7.2,
};
/// Milliseconds of a prompt of 2,048 tokens besides GEMMs and dequantisation, on all of an H200's
/// multiprocessors at 1.98 GHz: what counts leave of the 379.3 ms that 82 of them took.
const PROMPT_OTHERS_MS: f64 = 28.0;
/// Largest errors of `--check` among the steps that are not fitted: of classes whose launches do
/// not overlap, and of those whose launches do.
const CHECKED_ERRORS: [f64; 2] = [0.067, 0.132];
/// Steps of Qwen3.5-27B Q4_K_M that H200s opened as another class measured, with fused layers:
/// class, multiprocessors, rows, milliseconds (`benches/results/home_class.jsonl`, 16eb3c5e and
/// 0f4f488b).
const MEASURED: [(GpuRates, u32, usize, usize, f64); 16] = [
    (H200, 86, 132, 1, 5.64),
    (H200, 86, 132, 32, 9.26),
    (H200, 86, 82, 1, 7.89),
    (H200, 86, 132, 8, 6.02),
    (H200, 86, 132, 16, 6.82),
    (H200, 86, 132, 24, 7.84),
    (H200, 86, 132, 40, 10.71),
    (H200, 86, 132, 48, 12.71),
    (H200, 86, 132, 64, 14.93),
    (H200, 86, 82, 16, 9.63),
    (H200, 86, 82, 24, 11.18),
    (H200, 120, 132, 1, 5.64),
    (H200, 120, 132, 16, 6.47),
    (H200, 120, 132, 24, 7.45),
    (H200, 120, 132, 32, 8.76),
    (H200, 120, 132, 64, 13.98),
];
/// The first of them are fitted; of the class whose launches overlap, the first.
const N_FITTED: usize = 3;

pub(super) fn cost(args: &KernelsCostArgs) -> anyhow::Result<()> {
    let counter = Counter::new(args)?;
    let mut out = std::io::stdout().lock();
    if args.check {
        return check(&counter, &mut out);
    }
    if args.prompt {
        return prompts(&counter, args, &mut out);
    }
    for name in &args.arch {
        let arch = arch(name)?;
        let gpu = rates(name, arch)?;
        for &rows in &args.rows {
            let sheet = counter.sheet(&Target::own(arch), gpu.sms, rows)?;
            let fit = constants(arch.has_pdl());
            write_sheet(&mut out, &gpu, &sheet, &fit)?;
        }
    }
    Ok(())
}

fn rates(name: &str, arch: Arch) -> anyhow::Result<GpuRates> {
    GpuRates::of_arch(arch.number).with_context(|| {
        format!("--arch {name}: no rates of such a GPU; name sm_86, sm_89 or sm_120")
    })
}

/// The stored constants, for launches that overlap or do not.
fn constants(overlap: bool) -> Fit {
    let launch_us = if overlap {
        OVERLAPPED_LAUNCH_US
    } else {
        FITTED.launch_us
    };
    Fit {
        launch_us,
        ..FITTED
    }
}

/// What kernels are compiled for.
struct Target {
    /// Whose plan.
    class: Arch,
    /// Whose instructions.
    code: Arch,
}

impl Target {
    fn own(arch: Arch) -> Target {
        Target {
            class: arch,
            code: arch,
        }
    }
}

/// Compiles and disassembles the kernels of decode steps.
struct Counter<'a> {
    config: LoadConfig,
    options: Options,
    nvdisasm: &'a Path,
}

impl Counter<'_> {
    fn new(args: &KernelsCostArgs) -> anyhow::Result<Counter<'_>> {
        let path = Path::new(&args.model);
        let loaded = if path.exists() || is_remote(&args.model) {
            open::load(path)?
        } else {
            SynthSpec::parse(&args.model)?.load()?
        };
        let kv = KvFormat::Q8_0;
        Ok(Counter {
            config: LoadConfig {
                target: Arc::clone(&loaded.spec),
                weights: Arc::clone(&loaded.weights),
                draft: None,
                batch_invariant: false,
                kv: KvFormats { k: kv, v: kv },
                limits: Limits {
                    context: 4096,
                    ..LIMITS
                },
            },
            options: config::kernels::options(&args.compiler),
            nvdisasm: &args.nvdisasm,
        })
    }

    /// The plans of a GPU with `sms` multiprocessors.
    fn backend(target: &Target, sms: usize) -> CudaBackend {
        let gpu = GpuInfo {
            sm_count: u32::try_from(sms).unwrap_or(u32::MAX),
            ..usual_gpu(target.class)
        };
        CudaBackend::with_options(gpu, cuda::Options::default())
    }

    /// The sheet of a step of `rows` rows on a GPU with `sms` multiprocessors.
    fn sheet(&self, target: &Target, sms: usize, rows: usize) -> anyhow::Result<Sheet> {
        let backend = Counter::backend(target, sms);
        let launches = backend.step_launches(&self.config, (rows, DEPTH))?;
        let code = self.code(target, &Sheet::units(&launches))?;
        Ok(Sheet::new(rows, &launches, &code)?)
    }

    /// The sheet of the longest chunk of a prompt.
    fn prompt_sheet(&self, target: &Target, sms: usize) -> anyhow::Result<PromptSheet> {
        let launches = Counter::backend(target, sms).chunk_launches(&self.config)?;
        let code = self.code(target, &PromptSheet::units(&launches))?;
        let rows = self.config.limits.prefill_chunk;
        Ok(PromptSheet::new(rows, &launches, &code)?)
    }

    /// Compiles and disassembles units.
    fn code(
        &self,
        target: &Target,
        units: &[CompileUnit],
    ) -> anyhow::Result<BTreeMap<CompileUnit, UnitCode>> {
        let mut options = self.options.clone();
        if target.code != target.class {
            // As a GPU that is opened as one of another class compiles them.
            options.overlap &= target.class.has_pdl();
            options.extra.push("-DNO_WGMMA=1".to_owned());
            if !target.class.has_pdl() {
                options.extra.push("-DNO_SM90=1".to_owned());
            }
        }
        let compiled = compile(target.code, units, &options, &mut |_| ())?;
        let mut code: BTreeMap<CompileUnit, UnitCode> = BTreeMap::new();
        for unit in &compiled {
            code.insert(unit.unit.clone(), self.disassembled(unit)?);
        }
        Ok(code)
    }

    fn disassembled(&self, compiled: &Compiled) -> anyhow::Result<UnitCode> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(&compiled.cubin)?;
        let run = Command::new(self.nvdisasm)
            .arg("-c")
            .arg(file.path())
            .output();
        let run = run.with_context(|| {
            format!(
                "cannot run {}; install it with `pip install nvidia-cuda-nvdisasm` and name the file \
                 with --nvdisasm",
                self.nvdisasm.display()
            )
        })?;
        if !run.status.success() {
            let error = String::from_utf8_lossy(&run.stderr);
            bail!(
                "{} of {}: {}",
                self.nvdisasm.display(),
                compiled.unit,
                error.trim()
            );
        }
        Ok(UnitCode {
            kernels: listing::kernels(&String::from_utf8_lossy(&run.stdout)),
            reports: compiled.entries.clone(),
        })
    }
}

/// A chunk of a prompt on each GPU, and on an H100.
fn prompts(
    counter: &Counter<'_>,
    args: &KernelsCostArgs,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let home = Arch { number: 86 };
    let mut targets = vec![(
        H100,
        Target {
            class: home,
            code: Arch { number: 90 },
        },
    )];
    for name in &args.arch {
        let arch = arch(name)?;
        targets.push((rates(name, arch)?, Target::own(arch)));
    }
    for (gpu, target) in targets {
        let sheet = counter.prompt_sheet(&target, gpu.sms)?;
        let times = sheet.times(&gpu, &PROMPT_FIT);
        let others = PROMPT_OTHERS_MS * (H100.sms as f64 * H100.ghz) / (gpu.sms as f64 * gpu.ghz);
        let total = times.gemms + times.dequantize + others;
        writeln!(
            out,
            "{} as {}, prompt of {} tokens: {total:.0} ms, {:.0} tokens/s, \
             {:.2} of the {:.0} ms that products take at their peak; GEMMs {:.1}, dequantisation \
             {:.1}, the rest {others:.1} ms (an H200's, by multiprocessors and clock)",
            gpu.name,
            target.class,
            sheet.rows,
            sheet.rows as f64 / total * 1e3,
            total / times.floor,
            times.floor,
            times.gemms,
            times.dequantize,
        )?;
    }
    Ok(())
}

/// One line per kernel, then the step.
fn write_sheet(
    out: &mut impl Write,
    gpu: &GpuRates,
    sheet: &Sheet,
    fit: &Fit,
) -> anyhow::Result<()> {
    writeln!(
        out,
        "{} ({} multiprocessors, {} GHz, {} GB/s), {} rows: {} launches",
        gpu.name,
        gpu.sms,
        gpu.ghz,
        gpu.read_gb_s,
        sheet.rows,
        sheet.n_launches()
    )?;
    for launch in &sheet.launches {
        let ms = launch_times(launch, gpu, fit).total() * launch.count as f64;
        let per_sm = gpu.blocks_per_sm(launch.threads, launch.registers, launch.shared_bytes);
        writeln!(
            out,
            "  {:>3} x {:<24} {:>7.3} ms  {:>3} regs {:>3} spilled, {} x {:>3} threads, {} a \
             multiprocessor, path {:.0}",
            launch.count,
            launch.entry,
            ms,
            launch.registers,
            launch.spill_bytes,
            launch.blocks,
            launch.threads,
            per_sm,
            launch.path
        )?;
        write_products(out, launch)?;
    }
    let times = step_times(sheet, gpu, fit);
    let overlaps = Arch { number: gpu.arch }.has_pdl();
    write_times(out, &times)?;
    writeln!(
        out,
        "  step {:.2} ms, {:.2} ms if products overlapped with all else, {:.2} ms if nothing \
         overlaps; never run on this GPU, {}",
        times.total(),
        times.overlapped_total(),
        times.sum(),
        check_words(CHECKED_ERRORS[usize::from(overlaps)], overlaps)
    )?;
    Ok(())
}

/// How far predictions of measured steps are off, for classes without and with launches that
/// overlap.
fn check_words(worst: f64, overlaps: bool) -> String {
    let verdict = if worst <= TOLERANCE {
        "within"
    } else {
        "beyond"
    };
    let class = if overlaps {
        "with launches that overlap (sm_120)"
    } else {
        "without overlapping launches (sm_86)"
    };
    format!(
        "steps {class} that H200s measured are predicted to {:.1} %, {verdict} the \
         {:.0} % that are allowed",
        worst * 100.0,
        TOLERANCE * 100.0
    )
}

fn write_products(out: &mut impl Write, launch: &LaunchCost) -> anyhow::Result<()> {
    for products in &launch.products {
        let classes = products.per_unit.classes();
        let shown = classes.iter().filter(|(_, count)| *count > 0);
        let shown: Vec<String> = shown
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        writeln!(
            out,
            "        {:?}, {} units: {}; shared memory {} clocks",
            products.kind,
            products.units,
            shown.join(" "),
            products.per_unit.shared_clocks
        )?;
    }
    Ok(())
}

fn write_times(out: &mut impl Write, times: &StepTimes) -> anyhow::Result<()> {
    writeln!(
        out,
        "  main loops: memory {:.2}, products {:.2}, issue {:.2}, integer {:.2}, shared memory \
         {:.2}; together {:.2}; paths {:.2}, launches {:.2} ms",
        times.dram,
        times.tensor,
        times.issue,
        times.integer,
        times.shared,
        times.loops,
        times.path,
        times.ends
    )?;
    Ok(())
}

/// Fits the constants to the first steps and predicts the others.
fn check(counter: &Counter<'_>, out: &mut impl Write) -> anyhow::Result<()> {
    let code = Arch { number: 90 };
    let mut steps = Vec::new();
    for (gpu, class, sms, rows, ms) in MEASURED {
        let target = Target {
            class: Arch { number: class },
            code,
        };
        let gpu = GpuRates { sms, ..gpu };
        steps.push((class, gpu, counter.sheet(&target, sms, rows)?, ms));
    }
    let measured = |i: usize| {
        let (_, gpu, sheet, ms) = &steps[i];
        MeasuredStep {
            sheet,
            gpu: *gpu,
            ms: *ms,
        }
    };
    let fit = Fit::solve(&[0, 1, 2].map(measured));
    let overlapped = steps
        .iter()
        .position(|(class, ..)| Arch { number: *class }.has_pdl());
    let overlapped_us = overlapped.map(|i| {
        let (_, gpu, sheet, ms) = &steps[i];
        let rest = step_times(sheet, gpu, &fit).total() - step_times(sheet, gpu, &fit).ends;
        (ms - rest) * 1e3 / sheet.n_launches() as f64
    });
    writeln!(
        out,
        "fitted: efficiency {:.2}, {:.3} clocks an instruction outside main loops, {:.2} us a \
         launch, {:.2} us where launches overlap (stored: {:.2}, {:.3}, {:.2}, {:.2})",
        fit.efficiency,
        fit.path_clocks,
        fit.launch_us,
        overlapped_us.unwrap_or(0.0),
        FITTED.efficiency,
        FITTED.path_clocks,
        FITTED.launch_us,
        OVERLAPPED_LAUNCH_US,
    )?;
    let mut worst = [0.0_f64; 2];
    for (i, (class, gpu, sheet, ms)) in steps.iter().enumerate() {
        let class = Arch { number: *class };
        let own = Fit {
            launch_us: overlapped_us
                .filter(|_| class.has_pdl())
                .unwrap_or(fit.launch_us),
            ..fit
        };
        let times = step_times(sheet, gpu, &own);
        let off = times.total() / ms - 1.0;
        let is_fitted = i < N_FITTED || Some(i) == overlapped;
        if !is_fitted {
            let worst = &mut worst[usize::from(class.has_pdl())];
            *worst = worst.max(off.abs());
        }
        writeln!(
            out,
            "{} as {class}, {} multiprocessors, {} rows: predicted {:.2}, measured {ms:.2} ms, \
             {:+.1} % ({})",
            gpu.name,
            gpu.sms,
            sheet.rows,
            times.total(),
            off * 100.0,
            if is_fitted { "fitted" } else { "predicted" }
        )?;
        write_times(out, &times)?;
    }
    for (worst, overlaps) in worst.into_iter().zip([false, true]) {
        writeln!(out, "{}", check_words(worst, overlaps))?;
    }
    Ok(())
}
