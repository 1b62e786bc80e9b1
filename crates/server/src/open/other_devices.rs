//! Devices that other programs run models on and that have no code here.

/// A kind of device by the names that other programs give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OtherDevice {
    /// Names, each perhaps followed by digits, or by `:` and a number.
    names: &'static [&'static str],
    /// The devices.
    pub kind: &'static str,
    /// What is planned, and what to use instead.
    pub reason: &'static str,
}

const KNOWN: [OtherDevice; 6] = [
    OtherDevice {
        names: &["hip", "rocm", "amd", "amdgpu"],
        kind: "AMD GPUs",
        reason: "all kernels are CUDA; a HIP port is planned once NVIDIA's home GPUs are timed, \
                 without a date; use --device cpu",
    },
    OtherDevice {
        names: &["xpu", "sycl", "intel", "level_zero", "opencl", "openvino"],
        kind: "Intel GPUs and NPUs",
        reason: "all kernels are CUDA and no port is planned; use --device cpu, which has AVX2 and \
                 AVX-512 paths",
    },
    OtherDevice {
        names: &["metal", "mps", "apple", "mlx"],
        kind: "Apple GPUs",
        reason: "all kernels are CUDA and no port is planned; use --device cpu",
    },
    OtherDevice {
        names: &["vulkan", "vk", "webgpu", "directml"],
        kind: "GPUs through a graphics interface",
        reason: "all kernels are CUDA and no port is planned; use --device cuda for an NVIDIA GPU, \
                 else --device cpu",
    },
    OtherDevice {
        names: &["musa", "cann", "ascend", "npu", "tpu", "hpu", "maca"],
        kind: "accelerators of other makers",
        reason: "all kernels are CUDA and no port is planned; use --device cpu",
    },
    OtherDevice {
        names: &["rpc"],
        kind: "devices of other machines",
        reason: "a model runs on one machine; use --device cuda:N or --device cpu",
    },
];

impl OtherDevice {
    /// The kind that a name such as `hip`, `ROCm0` or `hip:0` means.
    pub(super) fn named(name: &str) -> Option<&'static OtherDevice> {
        let kind = name.split_once(':').map_or(name, |(kind, _)| kind);
        let lower = kind.to_lowercase();
        let bare = lower.trim_end_matches(|c: char| c.is_ascii_digit());
        KNOWN.iter().find(|device| device.names.contains(&bare))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_with_any_number() {
        for (name, kind) in [
            ("hip", Some("AMD GPUs")),
            ("hip:1", Some("AMD GPUs")),
            ("ROCm0", Some("AMD GPUs")),
            ("sycl:0", Some("Intel GPUs and NPUs")),
            ("mps", Some("Apple GPUs")),
            ("Vulkan1", Some("GPUs through a graphics interface")),
            ("npu:0", Some("accelerators of other makers")),
            ("rpc:host", Some("devices of other machines")),
            ("cuda", None),
            ("cpu", None),
            ("chip", None),
        ] {
            assert_eq!(OtherDevice::named(name).map(|d| d.kind), kind, "{name}");
        }
    }
}
