//! Which devices this machine has, and which of them a name on the command line means.
//!
//! The only place of the server that knows the device crates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use contract::Backend;
use cpu::CpuBackend;
use cuda::CudaBackend;

/// What was asked for on the command line.
#[derive(Debug, Clone, Default)]
pub struct DeviceChoice {
    /// `auto`, `cpu`, `cuda` for the first card, or `cuda:N`.
    pub name: String,
    /// Run the scalar reference on the CPU.
    pub cpu_reference: bool,
    /// Threads of the CPU device; `None` for one per core.
    pub threads: Option<usize>,
    /// How a card is used.
    pub gpu: cuda::Options,
}

/// A card beside the runner on it: what measuring needs.
pub struct GpuInstruments {
    /// Measured bytes a second of reading its memory.
    pub read_bytes_per_s: f64,
    /// Clock and energy, where they can be had.
    pub meter: Option<cuda::Meter>,
}

/// What measures the card that `id` names; `None` for the CPU.
///
/// # Errors
/// As opening the card.
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

/// Looks again and again at what is free on a card, and remembers the least.
pub struct MemoryWatch {
    before: u64,
    least: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// How often a watch looks.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Watches the memory of the card that `id` names, from now on; `None` for the CPU, and where nobody tells.
///
/// # Errors
/// Where the card has gone, or no thread can be had.
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
    /// Ends it: bytes by which the card had less free than at its beginning, at most.
    pub fn peak_bytes(self) -> Option<u64> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().ok()?;
        Some(
            self.before
                .saturating_sub(self.least.load(Ordering::Relaxed)),
        )
    }
}

/// The number of a card by its name.
fn ordinal(name: &str) -> Option<u32> {
    match name.strip_prefix("cuda")? {
        "" => Some(0),
        number => number.strip_prefix(':')?.parse().ok(),
    }
}

/// Why a name means no device of this machine.
#[derive(Debug, thiserror::Error)]
pub enum DeviceChoiceError {
    /// Not a name of any kind of device.
    #[error("--device {0}: unknown device, use auto, cpu or cuda:N")]
    Unknown(String),
    /// A card that is not there.
    #[error("--device {name}: {detail}")]
    NoGpu {
        /// What was asked for.
        name: String,
        /// What was found instead.
        detail: String,
    },
    /// The reference is a CPU path.
    #[error("--cpu-reference runs on the cpu, not on {0}; leave --device away")]
    ReferenceElsewhere(String),
}

/// Finds the device that `choice` means. `auto` takes the first card that can run a model, else the CPU.
pub fn choose(choice: &DeviceChoice) -> Result<Box<dyn Backend>, DeviceChoiceError> {
    let name = choice.name.as_str();
    if choice.cpu_reference && !matches!(name, "auto" | "cpu") {
        return Err(DeviceChoiceError::ReferenceElsewhere(name.to_owned()));
    }
    match name {
        "cpu" => Ok(cpu_device(choice)),
        "auto" => {
            if let Some(gpu) = usable_gpu(choice) {
                let backend = CudaBackend::with_options(gpu, choice.gpu.clone());
                return Ok(Box::new(backend));
            }
            Ok(cpu_device(choice))
        }
        _ => {
            let ordinal =
                ordinal(name).ok_or_else(|| DeviceChoiceError::Unknown(name.to_owned()))?;
            let no_gpu = |detail: String| DeviceChoiceError::NoGpu {
                name: name.to_owned(),
                detail,
            };
            let gpus = cuda::probe().map_err(|absence| no_gpu(absence.to_string()))?;
            let count = gpus.len();
            let gpu = gpus
                .into_iter()
                .find(|gpu| gpu.ordinal == ordinal)
                .ok_or_else(|| no_gpu(format!("this machine has {count} cards")))?;
            Ok(Box::new(CudaBackend::with_options(gpu, choice.gpu.clone())))
        }
    }
}

/// The first card, if kernels can be compiled for it. Why not is a warning: the CPU serves.
fn usable_gpu(choice: &DeviceChoice) -> Option<cuda::GpuInfo> {
    if choice.cpu_reference {
        return None;
    }
    let gpu = match cuda::probe() {
        Ok(gpus) => gpus.into_iter().next()?,
        Err(cuda::Absence::NoDriver) => return None,
        Err(absence) => {
            tracing::warn!("no card is used: {absence}");
            return None;
        }
    };
    if !gpu.runs_kernels() {
        let (major, minor) = gpu.capability;
        tracing::warn!(
            gpu = %gpu.name,
            "the card is not used: its compute capability is {major}.{minor}, the kernels need 8.0"
        );
        return None;
    }
    match cuda::compile::Nvrtc::open(&choice.gpu.compile.nvrtc) {
        Ok(_) => Some(gpu),
        Err(error) => {
            tracing::warn!(gpu = %gpu.name, "the card is not used: {error}");
            None
        }
    }
}

fn cpu_device(choice: &DeviceChoice) -> Box<dyn Backend> {
    let backend = CpuBackend::new(cpu::CpuOptions {
        reference: choice.cpu_reference,
        threads: choice.threads,
    });
    Box::new(backend.turning())
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
    fn unknown_names_are_refused_with_what_to_use() {
        for name in ["gpu", "cudax", "cuda:x", "metal"] {
            let error = choose(&choice(name)).err().unwrap();
            assert!(
                error.to_string().contains("use auto, cpu or cuda:N"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_card_that_is_not_there_is_named() {
        let error = choose(&choice("cuda:977")).err().unwrap();
        assert!(
            error.to_string().starts_with("--device cuda:977: "),
            "{error}"
        );
    }

    #[test]
    fn the_reference_runs_on_the_cpu_only() {
        let mut wrong = choice("cuda:0");
        wrong.cpu_reference = true;
        assert!(matches!(
            choose(&wrong),
            Err(DeviceChoiceError::ReferenceElsewhere(_))
        ));
    }
}
