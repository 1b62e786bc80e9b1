//! Device memory layout: one region per purpose, planned before allocation.
//!
//! The layout code runs twice: at address 0 to get the size for the memory plan, then at the
//! allocated address. Both runs give the same sizes, so the plan is exact.

use contract::{DeviceError, MemoryPlan};

/// Alignment of every device array in bytes.
pub(crate) const ALIGN: u64 = 256;
/// Alignment of every region in bytes.
pub(crate) const REGION_ALIGN: u64 = 1024;

/// Allocates consecutive ranges of a region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BumpAllocator {
    base: u64,
    at: u64,
}

impl BumpAllocator {
    /// Allocates from address `base`, a multiple of [`REGION_ALIGN`].
    pub(crate) fn new(base: u64) -> BumpAllocator {
        BumpAllocator { base, at: 0 }
    }

    /// Allocates `bytes` bytes and returns the address.
    pub(crate) fn take(&mut self, bytes: usize) -> u64 {
        let address = self.base + self.at;
        self.at = (self.at + bytes as u64).next_multiple_of(ALIGN);
        address
    }

    /// As [`BumpAllocator::take`] at a multiple of `align`, a power of two that divides
    /// [`REGION_ALIGN`].
    pub(crate) fn take_aligned(&mut self, bytes: usize, align: u64) -> u64 {
        self.at = self.at.next_multiple_of(align);
        self.take(bytes)
    }

    /// Bytes allocated so far.
    pub(crate) fn used(&self) -> u64 {
        self.at
    }
}

/// The device memory that a model may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryBudget {
    /// Free device memory before the context was created, in bytes.
    pub(crate) free: u64,
    /// The user's limit in bytes.
    pub(crate) limit: Option<u64>,
}

/// Memory of an empty context in bytes: 527 MiB on an H200 with driver 580, less on smaller
/// devices.
pub(crate) const CONTEXT_BYTES: u64 = 528 << 20;
/// Reserve for the context, module code, graphs and local memory, in bytes. Every estimate includes
/// it.
pub(crate) const DRIVER_BYTES: u64 = CONTEXT_BYTES + (256 << 20);

impl MemoryBudget {
    /// Bytes available to a model.
    pub(crate) fn bytes(self) -> u64 {
        self.limit.map_or(self.free, |limit| self.free.min(limit))
    }

    /// Rejects an estimate that does not fit. The error names the longest context that fits.
    ///
    /// `estimate` gives the bytes of the same model with another context.
    pub(crate) fn require(
        self,
        memory: &MemoryPlan,
        context: usize,
        device: &str,
        estimate: impl Fn(usize) -> u64,
    ) -> Result<(), DeviceError> {
        let (wanted, allowed) = (memory.total_bytes(), self.bytes());
        if wanted <= allowed {
            return Ok(());
        }
        let what = format!(
            "a context of {context} tokens, which takes {wanted} bytes of the {allowed} that may be used,"
        );
        let instead = match longest_context(context, |n| estimate(n) <= allowed) {
            Some(fits) => format!("a context of {fits} tokens fits"),
            None => "no context fits beside the weights: use a smaller model, fewer sequences or a higher \
                     --vram-limit"
                .to_owned(),
        };
        Err(DeviceError::Unsupported {
            what,
            device: device.to_owned(),
            instead,
        })
    }
}

/// The longest context below `context` that fits, in steps of 256. Memory grows with the context.
fn longest_context(context: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    const STEP: usize = 256;
    let (mut low, mut high) = (0, context / STEP);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle * STEP) {
            low = middle
        } else {
            high = middle - 1
        }
    }
    (low > 0).then_some(low * STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_aligned_and_disjoint() {
        let mut arena = BumpAllocator::new(0x1000);
        assert_eq!(arena.take(1), 0x1000);
        assert_eq!(arena.take(256), 0x1100);
        assert_eq!(arena.take(0), 0x1200);
        assert_eq!(arena.used(), 512);
    }

    #[test]
    fn budget_error_names_the_longest_context_that_fits() {
        let budget = MemoryBudget {
            free: 10 << 30,
            limit: Some(1 << 20),
        };
        let plan = |context: usize| 100 * context as u64;
        let memory = MemoryPlan {
            kv_bytes: plan(50_000),
            ..MemoryPlan::default()
        };
        let refusal = budget.require(&memory, 50_000, "cuda:0", plan);
        let text = refusal.unwrap_err().to_string();
        // 1 MiB / 100 bytes is 10,485 tokens, which rounds down to 40 steps of 256.
        assert!(text.contains("a context of 10240 tokens fits"), "{text}");
        assert!(budget.require(&memory, 50_000, "cuda:0", plan).is_err());
        let small = MemoryPlan::default();
        assert!(budget.require(&small, 50_000, "cuda:0", plan).is_ok());
        let text = budget.require(&memory, 50_000, "cuda:0", |_| u64::MAX);
        assert!(text.unwrap_err().to_string().contains("no context fits"));
    }
}
