//! Classes of GPUs by compute capability: what they are called, whether kernels exist for them, and
//! what was measured on them.

use contract::DeviceError;

use crate::arch::Arch;
use crate::probe::GpuInfo;

/// A class of GPUs of one compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuClass {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// The generation, with well-known products.
    pub name: &'static str,
    /// Why no kernels run on it; `None` if they do.
    pub unsupported: Option<&'static str>,
    /// What was measured on it, or why nothing was.
    pub measured: &'static str,
}

/// Kernels exist; nobody has run them on this class itself.
const HOME: &str = "not timed on this kind yet: its kernels compile in every test run, and ran only \
    on an H100 opened as this kind (--gpu-like)";
/// Kernels compile; nothing else is known.
const COMPILED: &str = "never run on this kind: its kernels compile";
/// No kernels, so nothing to measure.
const NOTHING: &str = "nothing, as no kernels exist for this kind";

impl GpuClass {
    /// The class of a compute capability.
    pub fn of(capability: (u32, u32)) -> GpuClass {
        let (name, unsupported, measured) = match capability {
            (..=5, _) => (
                "Maxwell or older",
                Some("it has no tensor cores, and NVRTC 13 compiles for 7.5 and later only"),
                NOTHING,
            ),
            (6, _) => (
                "Pascal (GTX 10 series, P40, P100)",
                Some("it has no tensor cores, and NVRTC 13 compiles for 7.5 and later only"),
                NOTHING,
            ),
            (7, ..=4) => (
                "Volta (V100)",
                Some(
                    "its tensor cores take other fragments than mma.m16n8k16, it has no ldmatrix, \
                     and NVRTC 13 compiles for 7.5 and later only",
                ),
                NOTHING,
            ),
            (7, _) => (
                "Turing (RTX 20 and GTX 16 series, T4)",
                Some(
                    "it has neither asynchronous copies to shared memory (cp.async) nor the \
                     mma.m16n8k16 that every product uses, and 64 KiB of shared memory, where the \
                     kernels take 99",
                ),
                NOTHING,
            ),
            (8, 0) => ("Ampere (A100, A30)", None, HOME),
            (8, 6) => ("Ampere (RTX 30 series, A10, A40)", None, HOME),
            (8, 7) => ("Ampere (Orin)", None, COMPILED),
            (8, _) => ("Ada (RTX 40 series, L4, L40)", None, HOME),
            (9, 0) => (
                "Hopper (H100, H200, GH200)",
                None,
                "measured on this kind: a hybrid model of 27B in Q4_K_M decodes 166 (H100) to 214 \
                 (H200) tokens/s, and an answer never depends on its batch",
            ),
            (10, _) => ("Blackwell (B100, B200, B300)", None, COMPILED),
            (11, _) => ("Blackwell (Thor)", None, COMPILED),
            (12, 0) => ("Blackwell (RTX 50 series, RTX PRO)", None, HOME),
            (12, _) => ("Blackwell (GB10, DGX Spark)", None, COMPILED),
            _ => (
                "a kind that is newer than this version",
                None,
                "neither timed nor compiled for in tests; the kernels for home GPUs are used",
            ),
        };
        GpuClass {
            capability,
            name,
            unsupported,
            measured,
        }
    }

    /// Name, architecture and what was measured, or why no kernels run, in one line.
    pub fn description(&self) -> String {
        let (major, minor) = self.capability;
        let number = major * 10 + minor;
        let arch = Arch { number };
        match self.unsupported {
            Some(reason) => format!(
                "{} has compute capability {major}.{minor}; the kernels need 8.0: {reason}",
                self.name
            ),
            None => format!("{}, {arch}: {}", self.name, self.measured),
        }
    }
}

impl GpuInfo {
    /// Its class, whatever it runs as.
    pub fn class(&self) -> GpuClass {
        GpuClass::of(self.capability)
    }

    /// Why no model opens on it, if none does; `device` is its name in the message.
    pub(crate) fn refusal(&self, device: String) -> Option<DeviceError> {
        let class = self.class();
        class.unsupported?;
        Some(DeviceError::Unsupported {
            what: "this kind of GPU".to_owned(),
            device,
            instead: format!("{}; use --device cpu", class.description()),
        })
    }

    /// Whether the kernels can be compiled for it: they need cp.async and the MMAs of compute
    /// capability 8.0.
    pub fn runs_kernels(&self) -> bool {
        self.class().unsupported.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_below_compute_capability_8_are_refused_with_the_reason() {
        for (capability, reason) in [
            ((5, 2), "NVRTC"),
            ((6, 1), "no tensor cores"),
            ((7, 0), "no ldmatrix"),
            ((7, 5), "cp.async"),
        ] {
            let text = GpuClass::of(capability).description();
            assert!(text.contains(reason) && text.contains("need 8.0"), "{text}");
        }
        for major in 8..=13 {
            for minor in 0..=9 {
                let class = GpuClass::of((major, minor));
                assert_eq!(class.unsupported, None, "{class:?}");
            }
        }
    }

    #[test]
    fn only_hopper_counts_as_measured() {
        let is_measured = |capability| {
            let class = GpuClass::of(capability);
            class.measured.starts_with("measured on this kind")
        };
        assert!(is_measured((9, 0)));
        for other in [(8, 0), (8, 6), (8, 9), (10, 0), (11, 0), (12, 0), (12, 1)] {
            assert!(!is_measured(other), "{other:?}");
        }
    }
}
