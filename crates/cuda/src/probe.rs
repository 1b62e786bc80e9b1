//! The GPUs of this machine, as the driver lists them. Never panics and never keeps a context.

use std::ffi::{CStr, c_int};
use std::fmt;

use cudarc::driver::{result, sys};

use crate::arch::Arch;
use crate::gpu_props::GpuProps;

/// One GPU, as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's number for it, the `0` of `cuda:0`.
    pub ordinal: u32,
    /// The hardware's name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// The compute capability whose kernels and launch features it uses; `None` for its own.
    pub run_as: Option<(u32, u32)>,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Device memory in all, in bytes.
    pub total_bytes: u64,
}

impl GpuInfo {
    /// What launches depend on.
    pub fn props(&self) -> GpuProps {
        let class = self.run_as.unwrap_or(self.capability);
        GpuProps::new(class, self.sm_count as usize)
    }

    /// Whether launches may overlap: the GPU and the class it runs as have programmatic dependent
    /// launch.
    pub fn has_pdl(&self) -> bool {
        let arch = |capability: (u32, u32)| Arch {
            number: capability.0 * 10 + capability.1,
        };
        let class = self.run_as.unwrap_or(self.capability);
        [self.capability, class]
            .map(arch)
            .iter()
            .all(|a| a.has_pdl())
    }

    /// This GPU with the kernels, launch features and shared memory of another class, and
    /// `sm_count` of its multiprocessors (`None` for as many as it has). Kernels are compiled for
    /// its own instructions, so that a class can be checked and timed on a GPU of another.
    ///
    /// # Errors
    /// [`RunAsError`] if the GPU cannot do what the class's kernels need, or has fewer
    /// multiprocessors.
    pub fn as_class(self, class: Arch, sm_count: Option<u32>) -> Result<GpuInfo, RunAsError> {
        let wanted = (class.number / 10, class.number % 10);
        if wanted != self.capability && (wanted < (8, 0) || GpuProps::new(wanted, 1).has_wgmma) {
            return Err(RunAsError::Class { class, gpu: self });
        }
        let sms = sm_count.unwrap_or(self.sm_count);
        if !(1..=self.sm_count).contains(&sms) {
            return Err(RunAsError::Multiprocessors { sms, gpu: self });
        }
        Ok(GpuInfo {
            run_as: Some(wanted).filter(|wanted| *wanted != self.capability),
            sm_count: sms,
            ..self
        })
    }

    /// The exact architecture kernels would be compiled for, such as `sm_90`.
    pub fn arch(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Its address on the bus, such as `0000:9b:00.0`, by which other tools know it; empty where
    /// the driver does not say.
    pub fn bus(&self) -> String {
        let mut text = [0_u8; 32];
        let len = c_int::try_from(text.len()).unwrap_or(0);
        let ordinal = c_int::try_from(self.ordinal).unwrap_or(c_int::MAX);
        // SAFETY: as in `probe`: no other call may come before it.
        let there = unsafe { sys::is_culib_present() };
        let Some(device) = there.then(|| result::device::get(ordinal).ok()).flatten() else {
            return String::new();
        };
        // SAFETY: the buffer has `len` bytes, and the driver ends what it writes with NUL.
        let got = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), len, device) };
        match (got, CStr::from_bytes_until_nul(&text)) {
            (sys::CUresult::CUDA_SUCCESS, Ok(text)) => text.to_string_lossy().into_owned(),
            _ => String::new(),
        }
    }
}

/// Why a GPU cannot run as one of another class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunAsError {
    /// The class is too old, or its kernels need instructions that only it has.
    #[error(
        "{} ({}) cannot run the kernels of {class}; name sm_80, sm_86, sm_89 or sm_120",
        gpu.name, gpu.arch()
    )]
    Class {
        /// The class asked for.
        class: Arch,
        /// The GPU.
        gpu: GpuInfo,
    },
    /// More multiprocessors than there are, or none.
    #[error("{} has {} multiprocessors, so {sms} cannot be used; name 1 to {}", gpu.name, gpu.sm_count, gpu.sm_count)]
    Multiprocessors {
        /// Multiprocessors asked for.
        sms: u32,
        /// The GPU.
        gpu: GpuInfo,
    },
}

/// Why there is no GPU to use, and what would help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoGpuReason {
    /// `libcuda` cannot be opened.
    NoDriver,
    /// The driver is there but sees no GPU.
    NoGpu,
    /// The driver returned an error.
    Driver {
        /// The driver call.
        call: &'static str,
        /// Its message.
        detail: String,
    },
}

impl fmt::Display for NoGpuReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoGpuReason::NoDriver => f.write_str(
                "no CUDA driver (libcuda) was found; install the NVIDIA driver to use a GPU",
            ),
            NoGpuReason::NoGpu => f.write_str(
                "the CUDA driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES",
            ),
            NoGpuReason::Driver { call, detail } => {
                write!(
                    f,
                    "the CUDA driver failed in {call}: {detail}; check nvidia-smi"
                )
            }
        }
    }
}

/// Lists the GPUs.
///
/// # Errors
/// [`NoGpuReason`] if there is none to use.
pub fn probe() -> Result<Vec<GpuInfo>, NoGpuReason> {
    // SAFETY: only tries to open the library by its well-known names; it is sound to call at any
    // time. It must come before any other call, because cudarc panics when the library is absent.
    if !unsafe { sys::is_culib_present() } {
        return Err(NoGpuReason::NoDriver);
    }
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => NoGpuReason::NoGpu,
        _ => failed("cuInit", error),
    })?;
    let count = result::device::get_count().map_err(|error| failed("cuDeviceGetCount", error))?;
    if count <= 0 {
        return Err(NoGpuReason::NoGpu);
    }
    (0..count).map(gpu_info).collect()
}

/// The newest CUDA version that the driver supports, major and minor; `None` without a driver.
pub fn driver_version() -> Option<(u32, u32)> {
    // SAFETY: as in `probe`: no other call may come before it.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let mut version = 0;
    // SAFETY: writes one int; the library is there, and the call needs no initialisation.
    let got = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    let version = u32::try_from(version).unwrap_or(0);
    (got == sys::CUresult::CUDA_SUCCESS && version > 0)
        .then_some((version / 1000, version % 1000 / 10))
}

fn gpu_info(ordinal: c_int) -> Result<GpuInfo, NoGpuReason> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal).map_err(|error| failed("cuDeviceGet", error))?;
    let name = result::device::get_name(device).map_err(|e| failed("cuDeviceGetName", e))?;
    let attribute = |which| {
        // SAFETY: `device` came from `cuDeviceGet` above.
        unsafe { result::device::get_attribute(device, which) }
            .map(|value| u32::try_from(value).unwrap_or(0))
            .map_err(|error| failed("cuDeviceGetAttribute", error))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let sm_count = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: `device` came from `cuDeviceGet` above.
    let total = unsafe { result::device::total_mem(device) }
        .map_err(|error| failed("cuDeviceTotalMem", error))?;
    Ok(GpuInfo {
        ordinal: u32::try_from(ordinal).unwrap_or(0),
        name,
        capability: (major, minor),
        run_as: None,
        sm_count,
        total_bytes: total as u64,
    })
}

fn failed(call: &'static str, error: result::DriverError) -> NoGpuReason {
    NoGpuReason::Driver {
        call,
        detail: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h100() -> GpuInfo {
        GpuInfo {
            ordinal: 0,
            name: "an H100".to_owned(),
            capability: (9, 0),
            run_as: None,
            sm_count: 132,
            total_bytes: 80 << 30,
        }
    }

    #[test]
    fn a_gpu_as_another_class_has_that_class_properties() {
        let arch = |number| Arch { number };
        let own = h100().as_class(arch(90), None).unwrap();
        assert_eq!(own, h100());
        assert!(own.has_pdl());
        let home = h100().as_class(arch(86), Some(82)).unwrap();
        assert_eq!(home.props(), GpuProps::new((8, 6), 82));
        assert_eq!(home.arch(), "sm_90");
        assert!(!home.has_pdl());
        let blackwell = h100().as_class(arch(120), None).unwrap();
        assert!(blackwell.has_pdl() && !blackwell.props().has_wgmma);
        let older = GpuInfo {
            capability: (8, 6),
            ..h100()
        };
        assert!(!older.clone().as_class(arch(120), None).unwrap().has_pdl());
        for (gpu, class) in [(h100(), 75), (older, 90)] {
            let refused = gpu.as_class(arch(class), None);
            assert!(matches!(refused, Err(RunAsError::Class { .. })), "{class}");
        }
        for sms in [0, 133] {
            let refused = h100().as_class(arch(86), Some(sms));
            assert!(matches!(refused, Err(RunAsError::Multiprocessors { .. })));
        }
    }

    #[test]
    fn a_machine_without_a_gpu_names_what_is_missing() {
        match probe() {
            Ok(gpus) => {
                assert!(!gpus.is_empty());
                for gpu in gpus {
                    assert!(gpu.total_bytes > 0 && gpu.capability.0 > 0, "{gpu:?}");
                }
            }
            Err(absence) => {
                let text = absence.to_string();
                assert!(
                    text.contains("install") || text.contains("nvidia-smi"),
                    "{text}"
                );
            }
        }
    }
}
