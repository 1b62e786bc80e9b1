//! The GPUs and limits that kernels are compiled and explained for.

use anyhow::Context;
use contract::Limits;
use cuda::GpuInfo;
use cuda::driver::Arch;

/// Multiprocessors of a usual GPU of an architecture, on which some kernels depend.
const USUAL: [(u32, u32); 9] = [
    (75, 68),
    (80, 108),
    (86, 82),
    (87, 16),
    (89, 128),
    (90, 132),
    (110, 20),
    (120, 170),
    (121, 48),
];
/// Usual limits of a server.
pub(super) const LIMITS: Limits = Limits {
    sequences: 4,
    context: 32_768,
    tree_nodes: 64,
    prefill_chunk: 2048,
    pool_tokens: None,
};

/// A usual GPU of an architecture.
pub(super) fn usual_gpu(arch: Arch) -> GpuInfo {
    let usual = USUAL.iter().find(|(number, _)| *number == arch.number);
    GpuInfo {
        ordinal: 0,
        name: arch.to_string(),
        capability: (arch.number / 10, arch.number % 10),
        run_as: None,
        sm_count: usual.map_or(80, |(_, count)| *count),
        total_bytes: 0,
    }
}

pub(super) fn arch(text: &str) -> anyhow::Result<Arch> {
    Arch::parse(text.trim()).with_context(|| {
        format!("--arch {text}: no architecture; use names such as sm_86 or sm_90a")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_architecture_is_refused_by_name() {
        let error = arch("ampere").unwrap_err().to_string();
        assert!(
            error.contains("ampere") && error.contains("sm_86"),
            "{error}"
        );
        assert_eq!(arch(" 86").unwrap(), arch("sm_86").unwrap());
    }
}
