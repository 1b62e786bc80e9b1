//! The hardware facts that decide which kernel runs and how it is launched.

/// One GPU, as far as launches depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProps {
    /// Streaming multiprocessors.
    pub sm_count: usize,
    /// Maximum dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Whether it has the warpgroup matrix products (wgmma) and clusters of compute capability 9.0.
    pub has_wgmma: bool,
    /// Whether a launch may begin before the one ahead of it has ended (programmatic dependent
    /// launch).
    pub launches_overlap: bool,
}

/// Dynamic shared memory of a block by compute capability, where it is not the 99 KiB of home
/// GPUs.
const SHARED_BYTES: [((u32, u32), usize); 3] = [
    ((8, 0), 163 << 10),
    ((8, 7), 163 << 10),
    ((9, 0), 227 << 10),
];

impl GpuProps {
    /// A GPU of this compute capability with `sm_count` multiprocessors.
    pub fn new(capability: (u32, u32), sm_count: usize) -> GpuProps {
        let known = SHARED_BYTES.iter().find(|(known, _)| *known == capability);
        GpuProps {
            sm_count,
            shared_bytes: known.map_or(99 << 10, |(_, bytes)| *bytes),
            has_wgmma: capability == (9, 0),
            launches_overlap: capability >= (9, 0),
        }
    }
}
