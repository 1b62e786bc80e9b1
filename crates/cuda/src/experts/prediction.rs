//! What a step of one row costs, before anything is loaded, where experts lie in host memory.

use contract::ExpertPlacement;

/// The share of peak bandwidth at which weights are read, and the time of a layer beyond it: a step
/// of 35B-A3B Q4_K_M with all experts on an H100 reads 1.8 GB in 1.73 ms (`kernels/moe/NOTES.md`).
const PEAK_SHARE: f64 = 0.85;
const LAYER_US: f64 = 27.0;

/// What a step of one row reads, and where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepReads {
    /// Layers of the model.
    pub(crate) layers: usize,
    /// Layers with experts, and experts of each.
    pub(crate) expert_layers: usize,
    pub(crate) n_experts: usize,
    /// Experts of a row.
    pub(crate) n_used: usize,
    /// Experts of each layer with a slot.
    pub(crate) n_slots: usize,
    /// Bytes of one expert of every layer.
    pub(crate) expert_bytes: u64,
    /// Bytes of all other weights that a step reads.
    pub(crate) other_bytes: u64,
}

/// Where experts lie, and the time of a step of one row whose experts are chosen uniformly.
pub(crate) fn placement(reads: StepReads, capability: (u32, u32)) -> ExpertPlacement {
    let (peak, bus) = rates(capability);
    let chosen = (reads.n_used as u64 * reads.expert_bytes) as f64;
    let outside = 1.0 - reads.n_slots as f64 / reads.n_experts as f64;
    let on_device = reads.other_bytes as f64 + chosen * (1.0 - outside);
    let us = on_device / (PEAK_SHARE * peak) * 1e6
        + LAYER_US * reads.layers as f64
        + chosen * outside / bus * 1e6;
    ExpertPlacement {
        layers: reads.expert_layers,
        n_experts: reads.n_experts,
        on_device: reads.n_slots,
        outside_bytes: (reads.n_experts - reads.n_slots) as u64 * reads.expert_bytes,
        step_us: us as u64,
        bus_bytes_per_s: bus as u64,
    }
}

/// Bytes per second of device memory and of the bus, as products of a compute capability state
/// them, the bus less a tenth of protocol: PCIe 4.0 x16 up to Ada, 5.0 x16 from Hopper on.
fn rates((major, minor): (u32, u32)) -> (f64, f64) {
    match (major, minor) {
        (8, 0) => (1.55e12, 25e9),
        (8, 9) => (1.01e12, 25e9),
        (8, _) => (0.94e12, 25e9),
        (9, _) => (3.35e12, 50e9),
        _ => (1.79e12, 50e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 35B-A3B Q4_K_M: 2.03 MB an expert, 1.3 GB of other weights.
    fn reads(n_slots: usize) -> StepReads {
        StepReads {
            layers: 40,
            expert_layers: 40,
            n_experts: 256,
            n_used: 8,
            n_slots,
            expert_bytes: 40 * 2_030_000,
            other_bytes: 1_300_000_000,
        }
    }

    #[test]
    fn all_experts_on_the_device_take_the_measured_step() {
        let all = placement(reads(256), (9, 0));
        assert!((1_600..1_900).contains(&all.step_us), "{}", all.step_us);
        assert_eq!(all.outside_bytes, 0);
    }

    #[test]
    fn experts_outside_cost_their_share_of_the_bus() {
        let some = placement(reads(176), (9, 0));
        // 80 of 256 outside: 203 MB at 50 GB/s, 4.1 ms.
        let all = placement(reads(256), (9, 0));
        let more = some.step_us - all.step_us;
        assert!((3_900..4_100).contains(&more), "{more}");
        assert_eq!(some.outside_bytes, 80 * 40 * 2_030_000);
        assert!(placement(reads(176), (8, 6)).step_us > some.step_us + 4_000);
    }
}
