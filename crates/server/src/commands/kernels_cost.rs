//! `hearth kernels cost`: what a decode step would take on home GPUs, counted from machine code.
//!
//! It counts a step with `--separate-gemms`. Fused layers wait for other blocks within a launch,
//! which instructions do not show; with them a step takes less.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, bail};
use contract::{KvFormat, KvFormats, Limits, LoadConfig};
use cuda::compile::{Compiled, Options, compile};
use cuda::cost::{
    Fit, GpuRates, H100, H200, LaunchCost, MeasuredStep, Sheet, StepTimes, UnitCode, launch_times,
    listing, step_times,
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
/// The constants that `--check` fits to the first of the figures below. The constant of a launch is
/// zero: instructions on the path of each launch account for its end as well.
const FITTED: Fit = Fit {
    efficiency: 0.62,
    path_clocks: 8.8,
    launch_us: 0.0,
};
/// The same where launches overlap, which hides a part of each path.
const OVERLAPPED_LAUNCH_US: f64 = -2.89;
/// Largest errors of `--check` among the steps that are not fitted: of classes whose launches do
/// not overlap, and of those whose launches do.
const CHECKED_ERRORS: [f64; 2] = [0.065, 0.160];
/// Steps of Qwen3.5-27B Q4_K_M that one H100 and one H200 opened as another class measured: class,
/// multiprocessors, rows, milliseconds (`benches/results/home_class.jsonl`, c34ed1f0 and c1b51d3d).
const MEASURED: [(GpuRates, u32, usize, usize, f64); 20] = [
    (H100, 86, 132, 1, 8.78),
    (H100, 86, 132, 32, 12.88),
    (H100, 86, 82, 1, 10.79),
    (H100, 86, 132, 8, 9.21),
    (H100, 86, 132, 16, 10.44),
    (H100, 86, 132, 24, 11.61),
    (H100, 86, 82, 16, 13.20),
    (H100, 86, 82, 24, 15.05),
    (H100, 120, 132, 1, 8.02),
    (H100, 120, 132, 16, 9.34),
    (H100, 120, 132, 24, 9.62),
    (H200, 86, 132, 4, 8.42),
    (H200, 86, 132, 12, 9.87),
    (H200, 86, 132, 20, 11.08),
    (H200, 86, 132, 48, 16.78),
    (H200, 86, 108, 1, 9.11),
    (H200, 86, 108, 8, 9.51),
    (H200, 86, 108, 24, 12.58),
    (H200, 120, 132, 8, 8.12),
    (H200, 120, 132, 32, 9.54),
];
/// The first of them are fitted; of the class whose launches overlap, the first.
const N_FITTED: usize = 3;

pub(super) fn cost(args: &KernelsCostArgs) -> anyhow::Result<()> {
    let counter = Counter::new(args)?;
    let mut out = std::io::stdout().lock();
    if args.check {
        return check(&counter, &mut out);
    }
    for name in &args.arch {
        let arch = arch(name)?;
        let gpu = GpuRates::of_arch(arch.number).with_context(|| {
            format!("--arch {name}: no rates of such a GPU; name sm_86, sm_89 or sm_120")
        })?;
        for &rows in &args.rows {
            let sheet = counter.sheet(&Target::own(arch), gpu.sms, rows)?;
            let fit = constants(arch.has_pdl());
            write_sheet(&mut out, &gpu, &sheet, &fit)?;
        }
    }
    Ok(())
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

    /// The sheet of a step of `rows` rows on a GPU with `sms` multiprocessors.
    fn sheet(&self, target: &Target, sms: usize, rows: usize) -> anyhow::Result<Sheet> {
        let gpu = GpuInfo {
            sm_count: u32::try_from(sms).unwrap_or(u32::MAX),
            ..usual_gpu(target.class)
        };
        let options = cuda::Options {
            separate_gemms: true,
            ..cuda::Options::default()
        };
        let backend = CudaBackend::with_options(gpu, options);
        let launches = backend.step_launches(&self.config, (rows, DEPTH))?;
        let mut options = self.options.clone();
        if target.code != target.class {
            // As a GPU that is opened as one of another class compiles them.
            options.overlap &= target.class.has_pdl();
            options.extra.push("-DNO_WGMMA=1".to_owned());
            if !target.class.has_pdl() {
                options.extra.push("-DNO_SM90=1".to_owned());
            }
        }
        let units = Sheet::units(&launches);
        let compiled = compile(target.code, &units, &options, &mut |_| ())?;
        let mut code: BTreeMap<CompileUnit, UnitCode> = BTreeMap::new();
        for unit in &compiled {
            code.insert(unit.unit.clone(), self.disassembled(unit)?);
        }
        Ok(Sheet::new(rows, &launches, &code)?)
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

/// One line per kernel, then the step.
fn write_sheet(
    out: &mut impl Write,
    gpu: &GpuRates,
    sheet: &Sheet,
    fit: &Fit,
) -> anyhow::Result<()> {
    writeln!(
        out,
        "{} ({} multiprocessors, {} GHz, {} GB/s), {} rows: {} launches (--separate-gemms)",
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
        "  step {:.2} ms with products at their peak, {:.2} ms with the efficiency fitted on an \
         H100, {:.2} ms if nothing overlaps; never run on this GPU, {}",
        times.total(),
        times.slow_total(),
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
        "steps {class} that an H100 and an H200 measured are predicted to {:.1} %, {verdict} the \
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
