//! Device selection by name.
//!
//! Only this module and `open` know the device crates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use contract::Backend;

use crate::open::other_devices::OtherDevice;
use crate::open::placement::PlacementChoice;
use cpu::CpuBackend;
use cuda::CudaBackend;

/// Device selection from the command line.
#[derive(Debug, Clone, Default)]
pub struct DeviceChoice {
    /// `auto`, `cpu`, `cuda` for the first GPU, or `cuda:N`.
    pub name: String,
    /// Several devices instead of `name`.
    pub placement: Option<PlacementChoice>,
    /// Run the scalar reference on the CPU.
    pub cpu_reference: bool,
    /// Threads of the CPU device; `None` for one per core.
    pub threads: Option<usize>,
    /// The class that a GPU runs as; `None` for its own.
    pub run_as: Option<RunAs>,
    /// GPU options.
    pub gpu: cuda::Options,
}

/// A class of GPUs whose kernels another GPU runs, for developers.
#[derive(Debug, Clone, Copy)]
pub struct RunAs {
    /// The class.
    pub class: cuda::driver::Arch,
    /// Multiprocessors to use; `None` for all.
    pub sm_count: Option<u32>,
}

impl DeviceChoice {
    /// The first device alone.
    #[must_use]
    pub fn first(self) -> DeviceChoice {
        let first = self.placement.as_ref().and_then(PlacementChoice::first);
        let name = first.map_or_else(|| self.name.clone(), str::to_owned);
        self.named(&name)
    }

    /// The device of this name alone.
    #[must_use]
    pub fn named(self, name: &str) -> DeviceChoice {
        DeviceChoice {
            name: name.to_owned(),
            placement: None,
            ..self
        }
    }

    /// The CPU instead.
    #[must_use]
    pub fn on_the_cpu(self) -> DeviceChoice {
        DeviceChoice {
            name: "cpu".to_owned(),
            placement: None,
            run_as: None,
            ..self
        }
    }

    /// Options of the CPU device.
    pub fn cpu_options(&self) -> cpu::CpuOptions {
        cpu::CpuOptions {
            reference: self.cpu_reference,
            threads: self.threads,
        }
    }
}

/// Measuring instruments of a GPU.
pub struct GpuInstruments {
    /// Measured read bandwidth in bytes per second.
    pub read_bytes_per_s: f64,
    /// Clock and energy meter, if available.
    pub meter: Option<cuda::Meter>,
}

/// Instruments of the GPU `id`; `None` for the CPU.
///
/// # Errors
/// Same as opening the GPU.
pub fn instruments(id: &str, choice: &DeviceChoice) -> anyhow::Result<Option<GpuInstruments>> {
    let Some(ordinal) = ordinal(id) else {
        return Ok(None);
    };
    let gpus = cuda::probe().map_err(|absence| anyhow::anyhow!("{absence}"))?;
    let Some(gpu) = gpus.iter().find(|gpu| gpu.ordinal == ordinal) else {
        return Ok(None);
    };
    Ok(Some(GpuInstruments {
        read_bytes_per_s: cuda::read_bandwidth(gpu, &choice.gpu.compile)?,
        meter: cuda::Meter::open(gpu),
    }))
}

/// Samples a GPU's free memory and records the minimum.
pub struct MemoryWatch {
    before: u64,
    least: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Sampling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Starts a memory watch of the GPU `id`; `None` for the CPU or without a meter.
///
/// # Errors
/// If the GPU is gone or a thread cannot start.
pub fn watch(id: &str) -> anyhow::Result<Option<MemoryWatch>> {
    let Some(ordinal) = ordinal(id) else {
        return Ok(None);
    };
    let gpus = cuda::probe().map_err(|absence| anyhow::anyhow!("{absence}"))?;
    let gpu = gpus.iter().find(|gpu| gpu.ordinal == ordinal);
    let Some(meter) = gpu.and_then(cuda::Meter::open) else {
        return Ok(None);
    };
    let Some(before) = meter.free_bytes() else {
        return Ok(None);
    };
    let (least, over) = (
        Arc::new(AtomicU64::new(before)),
        Arc::new(AtomicBool::new(false)),
    );
    let shared = (Arc::clone(&least), Arc::clone(&over));
    let work = move || {
        let (least, over) = shared;
        while !over.load(Ordering::Relaxed) {
            if let Some(free) = meter.free_bytes() {
                least.fetch_min(free, Ordering::Relaxed);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    };
    let thread = std::thread::Builder::new().name("memory watch".to_owned());
    Ok(Some(MemoryWatch {
        before,
        least,
        over,
        thread: thread.spawn(work)?,
    }))
}

impl MemoryWatch {
    /// Ends the watch; returns the peak bytes taken since its start.
    pub fn peak_bytes(self) -> Option<u64> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().ok()?;
        Some(
            self.before
                .saturating_sub(self.least.load(Ordering::Relaxed)),
        )
    }
}

/// GPU ordinal in a name.
fn ordinal(name: &str) -> Option<u32> {
    match name.strip_prefix("cuda")? {
        "" => Some(0),
        number => number.strip_prefix(':')?.parse().ok(),
    }
}

/// Error of device selection.
#[derive(Debug, thiserror::Error)]
pub enum DeviceChoiceError {
    /// Unknown device name.
    #[error("--device {0}: unknown device, use auto, cpu or cuda:N")]
    Unknown(String),
    /// A device that other programs know and this one does not.
    #[error("--device {name}: {kind} cannot be used: {reason}")]
    Other {
        /// Requested name.
        name: String,
        /// The devices of that name.
        kind: &'static str,
        /// What is planned, and what to use instead.
        reason: &'static str,
    },
    /// No such GPU.
    #[error("--device {name}: {detail}")]
    NoGpu {
        /// Requested name.
        name: String,
        /// Why it cannot be used, and the GPUs there are.
        detail: String,
    },
    /// The GPU cannot run as the class asked for.
    #[error("--gpu-like: {0}")]
    RunAs(#[from] cuda::RunAsError),
    /// A class without a GPU.
    #[error("--gpu-like needs a GPU, and {0} is used; leave --gpu-like away")]
    RunAsWithoutGpu(String),
    /// The reference runs on the CPU only.
    #[error("--cpu-reference runs on the cpu, not on {0}; leave --device away")]
    ReferenceElsewhere(String),
}

/// Selects a device, or several. `auto` takes the first usable GPU, else the CPU.
pub fn choose(choice: &DeviceChoice) -> anyhow::Result<Box<dyn Backend>> {
    match &choice.placement {
        Some(placement) => Ok(Box::new(
            placement.backend(&|name| Ok(choose_one(name, choice)?))?,
        )),
        None => Ok(choose_one(&choice.name, choice)?),
    }
}

/// Selects one device.
fn choose_one(name: &str, choice: &DeviceChoice) -> Result<Box<dyn Backend>, DeviceChoiceError> {
    if choice.cpu_reference && !matches!(name, "auto" | "cpu") {
        return Err(DeviceChoiceError::ReferenceElsewhere(name.to_owned()));
    }
    match name {
        // Numbers distinguish devices that share the processor, to try a placement.
        "cpu" | "cpu:1" | "cpu:2" | "cpu:3" => cpu_device(choice),
        "auto" => match usable_gpu(choice) {
            Some(gpu) => gpu_device(gpu, choice),
            None => cpu_device(choice),
        },
        _ => {
            let ordinal = ordinal(name).ok_or_else(|| unknown(name))?;
            let no_gpu = |detail: String| DeviceChoiceError::NoGpu {
                name: name.to_owned(),
                detail,
            };
            let gpus = cuda::probe().map_err(|absence| no_gpu(absence.to_string()))?;
            let count = gpus.len();
            let gpu = gpus
                .into_iter()
                .find(|gpu| gpu.ordinal == ordinal)
                .ok_or_else(|| no_gpu(format!("this machine has {count} GPUs")))?;
            gpu_device(gpu, choice)
        }
    }
}

/// Why a name is not a device: it means one of another maker, or nothing.
fn unknown(name: &str) -> DeviceChoiceError {
    match OtherDevice::named(name) {
        Some(device) => DeviceChoiceError::Other {
            name: name.to_owned(),
            kind: device.kind,
            reason: device.reason,
        },
        None => DeviceChoiceError::Unknown(name.to_owned()),
    }
}

/// The first GPU for which kernels can be compiled; logs why not otherwise.
fn usable_gpu(choice: &DeviceChoice) -> Option<cuda::GpuInfo> {
    if choice.cpu_reference {
        return None;
    }
    let gpu = match cuda::probe() {
        Ok(gpus) => gpus.into_iter().next()?,
        Err(cuda::NoGpuReason::NoDriver) => return None,
        Err(absence) => {
            tracing::warn!("no GPU is used: {absence}");
            return None;
        }
    };
    let class = gpu.class();
    if class.unsupported.is_some() {
        tracing::warn!(gpu = %gpu.name, "the GPU is not used: {}", class.description());
        return None;
    }
    match cuda::compile::Nvrtc::open(&choice.gpu.compile.nvrtc) {
        Ok(_) => Some(gpu),
        Err(error) => {
            tracing::warn!(gpu = %gpu.name, "the GPU is not used: {error}");
            None
        }
    }
}

fn gpu_device(
    gpu: cuda::GpuInfo,
    choice: &DeviceChoice,
) -> Result<Box<dyn Backend>, DeviceChoiceError> {
    let gpu = match choice.run_as {
        Some(run_as) => gpu.as_class(run_as.class, run_as.sm_count)?,
        None => gpu,
    };
    Ok(Box::new(CudaBackend::with_options(gpu, choice.gpu.clone())))
}

fn cpu_device(choice: &DeviceChoice) -> Result<Box<dyn Backend>, DeviceChoiceError> {
    if choice.run_as.is_some() {
        return Err(DeviceChoiceError::RunAsWithoutGpu("the CPU".to_owned()));
    }
    Ok(Box::new(
        CpuBackend::new(choice.cpu_options()).with_rotation(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(name: &str) -> DeviceChoice {
        DeviceChoice {
            name: name.to_owned(),
            ..DeviceChoice::default()
        }
    }

    #[test]
    fn unknown_device_names_are_rejected_with_alternatives() {
        for name in ["gpu", "cudax", "cuda:x", ""] {
            let error = choose_one(name, &choice(name)).err().unwrap();
            assert!(
                error.to_string().contains("use auto, cpu or cuda:N"),
                "{error}"
            );
        }
    }

    #[test]
    fn devices_of_other_makers_are_refused_by_name() {
        for (name, kind) in [("hip:0", "AMD"), ("xpu", "Intel"), ("Metal", "Apple")] {
            let error = choose_one(name, &choice(name)).err().unwrap().to_string();
            assert!(error.contains(name) && error.contains(kind), "{error}");
            assert!(error.contains("--device cpu"), "{error}");
        }
    }

    #[test]
    fn missing_gpu_is_named_in_the_error() {
        let error = choose_one("cuda:977", &choice("cuda:977")).err().unwrap();
        assert!(
            error.to_string().starts_with("--device cuda:977: "),
            "{error}"
        );
    }

    #[test]
    fn a_class_without_a_gpu_is_refused() {
        let mut wrong = choice("cpu");
        wrong.run_as = Some(RunAs {
            class: cuda::driver::Arch { number: 86 },
            sm_count: None,
        });
        assert!(matches!(
            choose_one(&wrong.name, &wrong),
            Err(DeviceChoiceError::RunAsWithoutGpu(_))
        ));
    }

    #[test]
    fn the_reference_runs_on_the_cpu_only() {
        let mut wrong = choice("cuda:0");
        wrong.cpu_reference = true;
        assert!(matches!(
            choose_one(&wrong.name, &wrong),
            Err(DeviceChoiceError::ReferenceElsewhere(_))
        ));
    }
}
