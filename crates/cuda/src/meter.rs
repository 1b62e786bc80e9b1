//! Clock, power and energy of a GPU, as the driver's management library (NVML) reports them.
//!
//! It is a convenience: without the library, or where a machine does not let us ask, there is no
//! meter and everything else works.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use crate::probe::GpuInfo;

/// What a meter showed at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Reading {
    /// Clock of the multiprocessors, in MHz.
    pub clock_mhz: u32,
    /// Clock of the memory, in MHz.
    pub memory_mhz: u32,
    /// Power drawn now, in watts.
    pub watts: f64,
    /// Energy drawn since the driver was loaded, in joules; 0 where the card does not count it.
    pub joules: f64,
    /// Temperature of the chip, in degrees Celsius.
    pub celsius: u32,
}

/// A card's meter.
#[derive(Debug)]
pub struct Meter {
    nvml: Nvml,
    /// The card's number in NVML's order.
    index: u32,
}

impl Meter {
    /// The meter of `card`, or `None` where there is none.
    pub fn open(card: &GpuInfo) -> Option<Meter> {
        let nvml = match Nvml::init() {
            Ok(nvml) => nvml,
            Err(error) => {
                tracing::debug!(%error, "no NVML, so no clocks and no energy");
                return None;
            }
        };
        // NVML counts cards by bus, CUDA as its variables say: the bus address names the same card
        // in both.
        let count = nvml.device_count().ok()?;
        let wanted = card.bus();
        let same = |index: &u32| {
            let bus = |index: u32| Some(nvml.device_by_index(index).ok()?.pci_info().ok()?.bus_id);
            bus(*index).is_some_and(|bus| same_bus(&bus, &wanted))
        };
        let index = (0..count).find(same)?;
        Some(Meter { nvml, index })
    }

    /// Device memory that nobody has taken, in bytes.
    pub fn free_bytes(&self) -> Option<u64> {
        let device = self.nvml.device_by_index(self.index).ok()?;
        device.memory_info().ok().map(|memory| memory.free)
    }

    /// What it shows now; what the card does not tell is 0.
    pub fn read(&self) -> Reading {
        let Ok(device) = self.nvml.device_by_index(self.index) else {
            return Reading::default();
        };
        Reading {
            clock_mhz: device.clock_info(Clock::SM).unwrap_or(0),
            memory_mhz: device.clock_info(Clock::Memory).unwrap_or(0),
            watts: f64::from(device.power_usage().unwrap_or(0)) / 1e3,
            joules: device.total_energy_consumption().unwrap_or(0) as f64 / 1e3,
            celsius: device.temperature(TemperatureSensor::Gpu).unwrap_or(0),
        }
    }
}

/// Whether two bus addresses are one; the domain has four digits in one library and eight in the
/// other.
fn same_bus(a: &str, b: &str) -> bool {
    let bare = |bus: &str| bus.trim_start_matches('0').to_ascii_lowercase();
    !a.is_empty() && bare(a) == bare(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_is_not_there_has_no_meter() {
        let card = GpuInfo {
            ordinal: 9_999,
            name: "Test GpuInfo".to_owned(),
            capability: (8, 6),
            sm_count: 82,
            total_bytes: 24 << 30,
        };
        assert!(Meter::open(&card).is_none());
    }

    #[test]
    fn the_two_spellings_of_a_bus_address_are_one() {
        assert!(same_bus("00000000:9B:00.0", "0000:9b:00.0"));
        assert!(!same_bus("00000000:9B:00.0", "0000:9c:00.0"));
        assert!(!same_bus("", ""));
    }
}
