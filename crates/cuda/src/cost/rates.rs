//! What the GPUs that people own can do in a clock, as their makers publish it.

/// The rates of one GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuRates {
    /// Product.
    pub name: &'static str,
    /// Its architecture, as [`crate::driver::Arch`] has it.
    pub arch: u32,
    /// Multiprocessors.
    pub sms: usize,
    /// Boost clock in GHz.
    pub ghz: f64,
    /// Memory that can be read in a second, in GB: 92 % of the stated bandwidth, or measured.
    pub read_gb_s: f64,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_bytes: usize,
    /// Warps that a multiprocessor holds.
    pub warps: usize,
    /// Clocks of a scheduler's integer pipe for an instruction of a warp.
    pub integer_clocks: f64,
    /// Clocks of a scheduler's tensor core for `HMMA.16816.F32`.
    pub hmma_clocks: f64,
    /// The same for other products: `IMMA.16832`.
    pub imma_clocks: f64,
}

/// GeForce RTX 3090.
pub const RTX_3090: GpuRates = GpuRates {
    name: "RTX 3090",
    arch: 86,
    sms: 82,
    ghz: 1.70,
    read_gb_s: 861.0,
    shared_bytes: 100 << 10,
    warps: 48,
    integer_clocks: 2.0,
    hmma_clocks: 32.0,
    imma_clocks: 16.0,
};
/// GeForce RTX 4090.
pub const RTX_4090: GpuRates = GpuRates {
    name: "RTX 4090",
    arch: 89,
    sms: 128,
    ghz: 2.52,
    read_gb_s: 927.0,
    ..RTX_3090
};
/// GeForce RTX 5090, whose integer pipe is as wide as the f32 pipe.
pub const RTX_5090: GpuRates = GpuRates {
    name: "RTX 5090",
    arch: 120,
    sms: 170,
    ghz: 2.41,
    read_gb_s: 1649.0,
    integer_clocks: 1.0,
    ..RTX_3090
};
/// H100 of the measurements: its read bandwidth is measured, and `mma.sync` reaches about 60 % of
/// its tensor cores.
pub const H100: GpuRates = GpuRates {
    name: "H100",
    arch: 90,
    sms: 132,
    ghz: 1.98,
    read_gb_s: 3085.0,
    shared_bytes: 228 << 10,
    warps: 64,
    integer_clocks: 2.0,
    hmma_clocks: 6.7,
    imma_clocks: 6.7,
};
/// H200: an H100 with other memory.
pub const H200: GpuRates = GpuRates {
    name: "H200",
    read_gb_s: 4480.0,
    ..H100
};

impl GpuRates {
    /// The home GPU of an architecture.
    pub fn of_arch(number: u32) -> Option<GpuRates> {
        let home = [RTX_3090, RTX_4090, RTX_5090];
        home.into_iter().find(|gpu| gpu.arch == number)
    }

    /// Blocks that a multiprocessor holds at once; 1 if not even one fits.
    pub fn blocks_per_sm(&self, threads: usize, registers: usize, shared_bytes: usize) -> usize {
        const REGISTERS: usize = 65_536;
        // The driver keeps 1 KiB of shared memory for itself.
        let by_shared = self.shared_bytes / (shared_bytes + 1024);
        let by_registers = REGISTERS / (registers.next_multiple_of(8).max(8) * threads.max(1));
        let by_warps = self.warps / threads.div_ceil(32).max(1);
        by_shared.min(by_registers).min(by_warps).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_multiprocessor_follow_from_what_runs_out_first() {
        assert_eq!(RTX_3090.blocks_per_sm(256, 32, 0), 6, "warps");
        assert_eq!(RTX_3090.blocks_per_sm(256, 118, 0), 2, "registers");
        assert_eq!(
            RTX_3090.blocks_per_sm(128, 32, 48 << 10),
            2,
            "shared memory"
        );
        assert_eq!(RTX_3090.blocks_per_sm(288, 168, 98 << 10), 1);
        assert_eq!(GpuRates::of_arch(89).map(|gpu| gpu.name), Some("RTX 4090"));
        assert_eq!(GpuRates::of_arch(75), None);
    }
}
