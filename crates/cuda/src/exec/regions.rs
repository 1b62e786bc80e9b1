//! The memory a loaded model lives in: one allocation by purpose, all but the table's on the GPU.

use contract::DeviceError;

use crate::driver::{Buffer, Gpu, Pinned};
use crate::memory::REGION_ALIGN;

/// Bytes that are written at once.
const STAGE: usize = 64 << 20;

/// Allocations, freed on drop.
pub(crate) struct Regions {
    pub(crate) weights: Buffer<u8>,
    pub(crate) kv: Buffer<u8>,
    pub(crate) states: Buffer<u8>,
    pub(crate) scratch: Buffer<u8>,
    pub(crate) draft: Buffer<u8>,
    /// Page-locked memory of the host; empty where nothing stays there.
    pub(crate) table: Pinned<u8>,
}

impl Regions {
    /// Allocates regions of these sizes in bytes, [`REGION_ALIGN`] of which may go to alignment.
    /// Everything but the weights is filled with `byte`.
    pub(crate) fn new(
        gpu: &Gpu,
        [weights, kv, states, scratch, draft, table]: [u64; 6],
        byte: u8,
    ) -> Result<Regions, DeviceError> {
        let alloc = |bytes: u64| {
            let bytes = usize::try_from(bytes).expect("what fits a GPU fits an address");
            gpu.alloc::<u8>(bytes)
        };
        let mut regions = Regions {
            weights: alloc(weights)?,
            kv: alloc(kv)?,
            states: alloc(states)?,
            scratch: alloc(scratch)?,
            draft: alloc(draft)?,
            table: gpu.pinned(usize::try_from(table).expect("a table fits an address"))?,
        };
        for buffer in [
            &mut regions.kv,
            &mut regions.states,
            &mut regions.scratch,
            &mut regions.draft,
        ] {
            buffer.fill(gpu, byte)?;
        }
        Ok(regions)
    }

    /// First addresses, in the order of [`Regions::new`].
    pub(crate) fn bases(&self) -> [u64; 6] {
        let [a, b, c, d, e] = self.all().map(Buffer::ptr);
        let table = self.table.device_ptr();
        [a, b, c, d, e, table].map(|address| address.next_multiple_of(REGION_ALIGN))
    }

    fn all(&self) -> [&Buffer<u8>; 5] {
        [
            &self.weights,
            &self.kv,
            &self.states,
            &self.scratch,
            &self.draft,
        ]
    }

    /// The region that holds `bytes` bytes at `address`, and where they begin in it.
    ///
    /// # Panics
    /// If no region holds them all.
    fn find(&self, address: u64, bytes: usize) -> (&Buffer<u8>, usize) {
        let found = self.all().into_iter().find_map(|buffer| {
            let at = usize::try_from(address.checked_sub(buffer.ptr())?).ok()?;
            (at + bytes <= buffer.len()).then_some((buffer, at))
        });
        found.expect("addresses come from layouts of these regions")
    }

    /// The bytes at an address, after everything queued on the main stream.
    #[cfg(feature = "inspect")]
    pub(crate) fn read(
        &self,
        gpu: &Gpu,
        address: u64,
        bytes: usize,
    ) -> Result<Vec<u8>, DeviceError> {
        let (buffer, at) = self.find(address, bytes);
        buffer.download_range(gpu, at..at + bytes)
    }

    /// Writes bytes at an address, after everything queued on the main stream, and waits.
    pub(crate) fn write(&self, gpu: &Gpu, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.find(address, bytes.len());
        // In pieces, so that little memory is needed beside the regions.
        let mut at = address;
        for piece in bytes.chunks(STAGE) {
            let staged = gpu.upload(piece)?;
            gpu.copy_bytes(at, staged.ptr(), piece.len())?;
            gpu.sync()?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Sets bytes at an address to zero; does not wait.
    pub(crate) fn zero(&self, gpu: &Gpu, address: u64, bytes: usize) -> Result<(), DeviceError> {
        self.find(address, bytes);
        gpu.zero_bytes(address, bytes)
    }
}
