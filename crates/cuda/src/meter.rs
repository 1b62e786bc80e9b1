//! Clock, power and energy of a GPU, as the driver's management library (NVML) reports them.
//!
//! It is optional: without the library, or without permission to query it, there is no meter and
//! everything else works.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use crate::probe::GpuInfo;

/// A meter's values at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Reading {
    /// Clock of the multiprocessors, in MHz.
    pub clock_mhz: u32,
    /// Clock of the memory, in MHz.
    pub memory_mhz: u32,
    /// Power drawn now, in watts.
    pub watts: f64,
    /// Energy drawn since the driver was loaded, in joules; 0 where the GPU does not count it.
    pub joules: f64,
    /// Power limit in force, in watts; 0 where the GPU has none.
    pub limit_watts: f64,
    /// Temperature of the chip, in degrees Celsius.
    pub celsius: u32,
}

/// A GPU's meter.
#[derive(Debug)]
pub struct Meter {
    nvml: Nvml,
    /// The GPU's number in NVML's order.
    index: u32,
}

impl Meter {
    /// The meter of a GPU, or `None` where NVML or the GPU is missing.
    pub fn open(info: &GpuInfo) -> Option<Meter> {
        let nvml = match Nvml::init() {
            Ok(nvml) => nvml,
            Err(error) => {
                tracing::debug!(%error, "no NVML, so no clocks and no energy");
                return None;
            }
        };
        // NVML orders GPUs by bus, CUDA by its environment variables. The bus address identifies
        // the GPU in both.
        let count = nvml.device_count().ok()?;
        let wanted = info.bus();
        let same = |index: &u32| {
            let bus = |index: u32| Some(nvml.device_by_index(index).ok()?.pci_info().ok()?.bus_id);
            bus(*index).is_some_and(|bus| same_bus(&bus, &wanted))
        };
        let index = (0..count).find(same)?;
        Some(Meter { nvml, index })
    }

    /// Free device memory, in bytes; `None` where NVML does not report it.
    pub fn free_bytes(&self) -> Option<u64> {
        let device = self.nvml.device_by_index(self.index).ok()?;
        device.memory_info().ok().map(|memory| memory.free)
    }

    /// The values now; 0 for those that the GPU does not report.
    pub fn read(&self) -> Reading {
        let Ok(device) = self.nvml.device_by_index(self.index) else {
            return Reading::default();
        };
        Reading {
            clock_mhz: device.clock_info(Clock::SM).unwrap_or(0),
            memory_mhz: device.clock_info(Clock::Memory).unwrap_or(0),
            watts: f64::from(device.power_usage().unwrap_or(0)) / 1e3,
            joules: device.total_energy_consumption().unwrap_or(0) as f64 / 1e3,
            limit_watts: f64::from(device.enforced_power_limit().unwrap_or(0)) / 1e3,
            celsius: device.temperature(TemperatureSensor::Gpu).unwrap_or(0),
        }
    }
}

/// Whether two bus addresses are equal; the domain has four digits in CUDA and eight in NVML.
fn same_bus(a: &str, b: &str) -> bool {
    let bare = |bus: &str| bus.trim_start_matches('0').to_ascii_lowercase();
    !a.is_empty() && bare(a) == bare(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_gpu_has_no_meter() {
        let info = GpuInfo {
            ordinal: 9_999,
            name: "Test GPU".to_owned(),
            capability: (8, 6),
            run_as: None,
            sm_count: 82,
            total_bytes: 24 << 30,
        };
        assert!(Meter::open(&info).is_none());
    }

    #[test]
    fn bus_addresses_with_4_and_8_domain_digits_are_equal() {
        assert!(same_bus("00000000:9B:00.0", "0000:9b:00.0"));
        assert!(!same_bus("00000000:9B:00.0", "0000:9c:00.0"));
        assert!(!same_bus("", ""));
    }
}
