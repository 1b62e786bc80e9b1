//! The machine in a few lines, for the head of a report.

use std::fmt::Write as _;
use std::fs;

use cuda::compile::{CompileError, Nvrtc, NvrtcSearch};
use cuda::{GpuInfo, NoGpuReason};

use crate::progress::bytes_text;
use crate::version::VERSION;

/// The program, the system, the driver and the GPUs.
pub(super) struct Machine {
    /// The GPUs with the free bytes that NVML reports.
    pub(super) gpus: Result<Vec<(GpuInfo, Option<u64>)>, NoGpuReason>,
    /// The CUDA version that the driver supports.
    pub(super) driver: Option<(u32, u32)>,
    pub(super) nvrtc: Result<Nvrtc, CompileError>,
    /// Names of NVIDIA's display devices on the bus, as the system sees them.
    pub(super) on_bus: usize,
    /// The version of NVIDIA's kernel module, if it is loaded.
    pub(super) module: Option<String>,
    /// The free driver that takes the GPU away from NVIDIA's.
    pub(super) has_nouveau: bool,
    pub(super) is_wsl: bool,
}

impl Machine {
    pub(super) fn read(search: &NvrtcSearch) -> Machine {
        let with_free = |gpu: GpuInfo| {
            let free = cuda::Meter::open(&gpu).and_then(|meter| meter.free_bytes());
            (gpu, free)
        };
        Machine {
            gpus: cuda::probe().map(|gpus| gpus.into_iter().map(with_free).collect()),
            driver: cuda::driver_version(),
            nvrtc: Nvrtc::open(search).cloned(),
            on_bus: nvidia_on_bus(),
            module: kernel_module(),
            has_nouveau: fs::exists("/sys/module/nouveau").unwrap_or(false),
            is_wsl: is_wsl(),
        }
    }

    /// Name and value of each line.
    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = program_and_system();
        let module = self.module.as_deref().unwrap_or("no kernel module");
        lines.push((
            "driver",
            match self.driver {
                Some((major, minor)) => format!("{module}, CUDA {major}.{minor}"),
                None => "none".to_owned(),
            },
        ));
        lines.push((
            "gpu",
            match &self.gpus {
                Ok(gpus) => gpus.iter().map(gpu_text).collect::<Vec<_>>().join("; "),
                Err(_) => "none".to_owned(),
            },
        ));
        lines.push((
            "nvrtc",
            match &self.nvrtc {
                Ok(found) => nvrtc_text(found),
                Err(_) => "none".to_owned(),
            },
        ));
        lines
    }

    pub(super) fn text(&self) -> String {
        text(&self.lines())
    }
}

/// Program and system of this process, without a call to a driver, which may be what failed.
pub(in crate::commands) fn program_and_system() -> Vec<(&'static str, String)> {
    let uname = rustix::system::uname();
    let word = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let system = format!(
        "{} {} {}, {}",
        word(uname.sysname()),
        word(uname.release()),
        word(uname.machine()),
        distribution()
    );
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = match memory() {
        Some((total, free)) => format!(
            ", {} of {} memory free",
            bytes_text(free),
            bytes_text(total)
        ),
        None => String::new(),
    };
    vec![
        ("hearth", VERSION.to_owned()),
        ("system", system),
        ("cpu", format!("{}, {cores} threads{memory}", cpu_name())),
    ]
}

/// The lines as text, names in a column.
pub(in crate::commands) fn text(lines: &[(&'static str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in lines {
        let _ = writeln!(text, "{name:8} {value}");
    }
    text
}

fn gpu_text((gpu, free): &(GpuInfo, Option<u64>)) -> String {
    let free = free.map_or(String::new(), |free| format!("{} of ", bytes_text(free)));
    let total = bytes_text(gpu.total_bytes);
    let memory = if free.is_empty() {
        total
    } else {
        format!("{free}{total} free")
    };
    format!(
        "cuda:{} {} ({}), {memory}",
        gpu.ordinal,
        gpu.name,
        gpu.arch()
    )
}

pub(super) fn nvrtc_text(found: &Nvrtc) -> String {
    let (major, minor) = found.version;
    let place = match &found.path {
        Some(path) => path.display().to_string(),
        None => "by the system's library path".to_owned(),
    };
    format!("{major}.{minor}, {place}")
}

/// The value of a `NAME=value` or `name : value` line of a file.
fn value_of(file: &str, name: &str, separator: char) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(separator)?;
        (key.trim() == name).then(|| value.trim().trim_matches('"').to_owned())
    })
}

fn distribution() -> String {
    let name = value_of("/etc/os-release", "PRETTY_NAME", '=');
    name.unwrap_or_else(|| "unknown distribution".to_owned())
}

fn cpu_name() -> String {
    let name = value_of("/proc/cpuinfo", "model name", ':');
    name.unwrap_or_else(|| "unknown processor".to_owned())
}

/// Total and available bytes of the system's memory.
pub(super) fn memory() -> Option<(u64, u64)> {
    let bytes = |name| {
        let value = value_of("/proc/meminfo", name, ':')?;
        Some(value.split_whitespace().next()?.parse::<u64>().ok()? << 10)
    };
    Some((bytes("MemTotal")?, bytes("MemAvailable")?))
}

/// NVIDIA's display controllers on the PCI bus.
fn nvidia_on_bus() -> usize {
    let devices = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten();
    let is_nvidia = |device: &fs::DirEntry| {
        let file = |name| fs::read_to_string(device.path().join(name)).unwrap_or_default();
        file("vendor").trim() == "0x10de" && file("class").starts_with("0x03")
    };
    devices.flatten().filter(is_nvidia).count()
}

/// The version in the first line of the module's own report, the first word that is a number.
fn kernel_module() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines()
        .next()?
        .split_whitespace()
        .find(is_version)
        .map(str::to_owned)
}

fn is_wsl() -> bool {
    let version = fs::read_to_string("/proc/version").unwrap_or_default();
    version.to_lowercase().contains("microsoft")
}
