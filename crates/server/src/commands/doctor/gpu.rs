//! The driver, the GPUs, NVRTC, and the device that `serve` would choose.

use contract::{Backend, DeviceInfo};
use cuda::{GpuInfo, NoGpuReason};

use super::finding::{Finding, Severity};
use super::machine::{Machine, memory, nvrtc_text};
use crate::config::surroundings::Surroundings;
use crate::open::devices::{self, DeviceChoice};
use crate::progress::bytes_text;

/// Free share of a GPU's memory below which another program is likely to use it.
const FREE_SHARE: f64 = 0.8;

pub(super) fn findings(
    machine: &Machine,
    choice: &DeviceChoice,
    surroundings: &Surroundings,
) -> Vec<Finding> {
    let wants_gpu = choice.name.starts_with("cuda");
    let mut found = Vec::new();
    match &machine.gpus {
        Ok(gpus) => {
            found.extend(gpus.iter().map(|(gpu, free)| of_gpu(gpu, *free)));
            found.push(nvrtc(machine, wants_gpu));
            found.extend(newer_than_driver(machine));
            if gpus.len() > 1 {
                let what = format!("{} GPUs: a server uses one", gpus.len());
                let chosen = "the first is used; --device cuda:N chooses another";
                found.push(Finding::new("gpu", Severity::Note, what).action(chosen));
            }
        }
        Err(reason) => found.push(no_gpu(machine, surroundings, (reason, wants_gpu))),
    }
    found.push(device(choice));
    found
}

/// Why no GPU is there, and the likeliest remedy.
fn no_gpu(
    machine: &Machine,
    surroundings: &Surroundings,
    (reason, wanted): (&NoGpuReason, bool),
) -> Finding {
    let severity = match (wanted, machine.on_bus > 0 || machine.module.is_some()) {
        (true, _) => Severity::Problem,
        (false, true) => Severity::Warning,
        (false, false) => Severity::Note,
    };
    let finding = |what: String, place: &str, action: String| {
        Finding::new("driver", severity, what)
            .at(place)
            .action(action)
    };
    if let Some(visible) = &surroundings.visible_gpus
        && *reason == NoGpuReason::NoGpu
    {
        return finding(
            format!("CUDA_VISIBLE_DEVICES={visible} hides every GPU"),
            "environment",
            "unset CUDA_VISIBLE_DEVICES, or give the number of a GPU".to_owned(),
        );
    }
    let (place, action) = match reason {
        NoGpuReason::NoDriver if machine.is_wsl => (
            "libcuda",
            "install NVIDIA's driver in Windows, none in Linux; then restart WSL".to_owned(),
        ),
        NoGpuReason::NoDriver if machine.module.is_some() => (
            "libcuda",
            "the kernel module is loaded but libcuda is missing; in a container, pass the GPU with \
             `--device nvidia.com/gpu=all`, else install the driver's libcuda package"
                .to_owned(),
        ),
        NoGpuReason::NoDriver if machine.has_nouveau => (
            "/sys/module/nouveau",
            "install NVIDIA's driver and restart; nouveau has the GPU now".to_owned(),
        ),
        NoGpuReason::NoDriver if machine.on_bus == 0 => {
            return finding(
                "no NVIDIA GPU on this machine".to_owned(),
                "",
                String::new(),
            );
        }
        NoGpuReason::NoDriver => ("libcuda", "install the NVIDIA driver and restart".to_owned()),
        NoGpuReason::NoGpu => (
            "nvidia-smi",
            "look whether `nvidia-smi` lists the GPU; in a container, pass it with \
             `--device nvidia.com/gpu=all`"
                .to_owned(),
        ),
        NoGpuReason::Driver { .. } => (
            "nvidia-smi",
            "run `nvidia-smi`; after an update of the driver, restart the machine".to_owned(),
        ),
    };
    finding(reason.to_string(), place, action)
}

/// One GPU: whether it is used, and what was measured on its kind.
fn of_gpu(gpu: &GpuInfo, free: Option<u64>) -> Finding {
    let class = gpu.class();
    let what = format!(
        "cuda:{}: {}: {}",
        gpu.ordinal,
        gpu.name,
        class.description()
    );
    if class.unsupported.is_some() {
        let action = "use --device cpu, or a GPU of the RTX 30 series or newer";
        return Finding::new("gpu", Severity::Warning, what).action(action);
    }
    match free {
        Some(free) if (free as f64) < FREE_SHARE * gpu.total_bytes as f64 => {
            let (free, total) = (bytes_text(free), bytes_text(gpu.total_bytes));
            Finding::new(
                "gpu",
                Severity::Note,
                format!("{what}; {free} of {total} are free"),
            )
            .action("`nvidia-smi` lists the programs that use the rest")
        }
        _ => Finding::new("gpu", Severity::Ok, what),
    }
}

fn nvrtc(machine: &Machine, wanted: bool) -> Finding {
    match &machine.nvrtc {
        Ok(found) => Finding::new("nvrtc", Severity::Ok, nvrtc_text(found)),
        Err(_) => {
            let severity = if wanted {
                Severity::Problem
            } else {
                Severity::Warning
            };
            Finding::new(
                "nvrtc",
                severity,
                "the kernel compiler (libnvrtc) was not found, so the GPU is not used",
            )
            .at("beside hearth, the system's libraries, CUDA toolkits, ~/.venv and other environments, /opt/hearth/venv")
            .action(
                "python3 -m venv ~/.venv && ~/.venv/bin/pip install nvidia-cuda-nvrtc; or name the file \
                 with --nvrtc",
            )
        }
    }
}

/// A compiler whose machine code the driver may refuse.
fn newer_than_driver(machine: &Machine) -> Option<Finding> {
    let (nvrtc, driver) = (machine.nvrtc.as_ref().ok()?, machine.driver?);
    let (major, minor) = nvrtc.version;
    if u32::try_from(major).unwrap_or(0) <= driver.0 {
        return None;
    }
    let what = format!(
        "NVRTC {major}.{minor} is newer than the driver (CUDA {}.{}), which may refuse its kernels",
        driver.0, driver.1
    );
    let action = format!(
        "update the driver, or install an older compiler: pip install 'nvidia-cuda-nvrtc-cu{}'",
        driver.0
    );
    Some(Finding::new("nvrtc", Severity::Warning, what).action(action))
}

/// The device of the flags.
fn device(choice: &DeviceChoice) -> Finding {
    let chosen = devices::choose(choice);
    match chosen.and_then(|backend| Ok(Backend::probe(backend.as_ref())?)) {
        Ok(info) => of_device(&info),
        Err(error) => Finding::new("device", Severity::Problem, format!("{error:#}"))
            .at(format!("--device {}", choice.name))
            .action("use --device auto or cpu, or remove what the other lines name"),
    }
}

fn of_device(info: &DeviceInfo) -> Finding {
    let what = format!("{}: {} ({})", info.id, info.name, info.features.join(", "));
    let is_slow = info.id == "cpu"
        && cfg!(target_arch = "x86_64")
        && !info.features.iter().any(|feature| feature.contains("avx"));
    if is_slow {
        return Finding::new("device", Severity::Warning, what)
            .action("this processor has no AVX2, so answers are slow; use a GPU or a small model");
    }
    let memory = match memory() {
        Some((_, free)) if info.id == "cpu" => format!("; {} are free", bytes_text(free)),
        _ => String::new(),
    };
    Finding::new("device", Severity::Ok, what + &memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda::compile::{CompileError, Nvrtc};

    fn machine() -> Machine {
        Machine {
            gpus: Err(NoGpuReason::NoDriver),
            driver: None,
            nvrtc: Err(CompileError::NvrtcNotFound {
                searched: Vec::new(),
            }),
            on_bus: 0,
            module: None,
            has_nouveau: false,
            is_wsl: false,
        }
    }

    fn gpu(capability: (u32, u32)) -> GpuInfo {
        GpuInfo {
            ordinal: 0,
            name: "A GPU".to_owned(),
            capability,
            run_as: None,
            sm_count: 82,
            total_bytes: 24 << 30,
        }
    }

    fn cpu() -> DeviceChoice {
        DeviceChoice {
            name: "cpu".to_owned(),
            ..DeviceChoice::default()
        }
    }

    fn driver_finding(machine: &Machine, device: &str, visible: Option<&str>) -> Finding {
        let surroundings = Surroundings {
            visible_gpus: visible.map(str::to_owned),
            ..Surroundings::default()
        };
        let choice = DeviceChoice {
            name: device.to_owned(),
            ..DeviceChoice::default()
        };
        findings(machine, &choice, &surroundings).remove(0)
    }

    #[test]
    fn missing_driver_matters_as_much_as_the_gpu_is_wanted_or_there() {
        let none = machine();
        assert_eq!(driver_finding(&none, "cpu", None).severity, Severity::Note);
        assert_eq!(
            driver_finding(&none, "cuda", None).severity,
            Severity::Problem
        );
        let mut there = machine();
        there.on_bus = 1;
        let finding = driver_finding(&there, "auto", None);
        assert_eq!(finding.severity, Severity::Warning);
        assert!(
            finding.action.contains("install the NVIDIA driver"),
            "{finding:?}"
        );
        there.has_nouveau = true;
        assert!(
            driver_finding(&there, "auto", None)
                .action
                .contains("nouveau")
        );
        there.module = Some("580.1".to_owned());
        assert!(
            driver_finding(&there, "auto", None)
                .action
                .contains("nvidia.com/gpu")
        );
        there.is_wsl = true;
        assert!(
            driver_finding(&there, "auto", None)
                .action
                .contains("Windows")
        );
    }

    #[test]
    fn hidden_gpus_are_blamed_on_the_variable() {
        let mut hidden = machine();
        hidden.gpus = Err(NoGpuReason::NoGpu);
        let finding = driver_finding(&hidden, "cuda", Some("-1"));
        assert!(
            finding.what.contains("CUDA_VISIBLE_DEVICES=-1"),
            "{finding:?}"
        );
        assert!(
            driver_finding(&hidden, "cuda", None)
                .place
                .contains("nvidia-smi")
        );
    }

    #[test]
    fn gpus_are_described_by_what_was_measured() {
        let of = |capability| of_gpu(&gpu(capability), None);
        assert!(of((9, 0)).what.contains("measured on this kind"));
        for home in [(8, 6), (8, 9), (12, 0)] {
            assert!(of(home).what.contains("not timed on this kind"), "{home:?}");
        }
        let old = of((7, 5));
        assert_eq!(old.severity, Severity::Warning);
        assert!(old.what.contains("cp.async"), "{old:?}");
        let full = of_gpu(&gpu((8, 6)), Some(2 << 30));
        assert_eq!(full.severity, Severity::Note);
        assert!(full.what.contains("2.00 GiB of 24.00 GiB"), "{full:?}");
    }

    #[test]
    fn compilers_are_missing_found_or_newer_than_the_driver() {
        let mut with_gpu = machine();
        with_gpu.gpus = Ok(vec![(gpu((8, 6)), None)]);
        with_gpu.driver = Some((12, 4));
        let of = |machine: &Machine| {
            let all = findings(machine, &cpu(), &Surroundings::default());
            let nvrtc = all.into_iter().filter(|finding| finding.check == "nvrtc");
            nvrtc.collect::<Vec<Finding>>()
        };
        let missing = of(&with_gpu);
        assert_eq!(missing[0].severity, Severity::Warning);
        assert!(missing[0].action.contains("pip install nvidia-cuda-nvrtc"));
        let version = |version| Nvrtc {
            path: Some("/x/libnvrtc.so".into()),
            version,
        };
        with_gpu.nvrtc = Ok(version((12, 9)));
        let found = of(&with_gpu);
        assert_eq!((found.len(), found[0].severity), (1, Severity::Ok));
        with_gpu.nvrtc = Ok(version((13, 0)));
        let newer = of(&with_gpu);
        assert_eq!(newer[1].severity, Severity::Warning);
        assert!(
            newer[1].action.contains("nvidia-cuda-nvrtc-cu12"),
            "{newer:?}"
        );
    }
}
