//! What the shards of a tensor split know of each other: the addresses of the memory that each
//! writes in the others' GPUs.

use contract::DeviceError;

use crate::driver::{CopyEngine, Gpu, Pinned};
use crate::launch::all_reduce::ExchangeShape;
use crate::plan::Plans;

/// One shard's end of an exchange.
#[derive(Debug, Clone)]
pub(crate) struct ExchangeEnd {
    shape: ExchangeShape,
    /// Device address of its exchange.
    at: u64,
    copy_engine: CopyEngine,
    /// The device's name, for messages.
    device: String,
}

impl ExchangeEnd {
    /// Of a shard whose plans are built; `None` for a model that is not split.
    pub(super) fn new(gpu: &Gpu, plans: &Plans) -> Option<ExchangeEnd> {
        Some(ExchangeEnd {
            shape: plans.exchange?,
            at: plans.addresses.exchange,
            copy_engine: gpu.copy_engine(),
            device: format!("cuda:{}", gpu.info().ordinal),
        })
    }

    /// Writes the pointers of shard `rank`, which is at this end.
    fn write_table(&self, rank: usize, exchanges: &[u64]) -> Result<(), DeviceError> {
        let table = self.shape.table(rank, exchanges);
        let mut host: Pinned<u8> = self.copy_engine.pinned(table.len())?;
        host.as_mut_slice().copy_from_slice(&table);
        let stream = self.copy_engine.stream()?;
        // SAFETY: the exchange begins with room for the table, and the copy is waited for.
        unsafe {
            self.copy_engine
                .copy(&stream, self.at, host.device_ptr(), table.len())
        }?;
        stream.sync()
    }

    /// Lets two shards, `other` before this one, write in each other's memory.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for GPUs that do not reach each other's memory, and for shards
    /// on one GPU.
    pub(super) fn connect(&self, other: &ExchangeEnd) -> Result<(), DeviceError> {
        if self.shape != other.shape {
            return Err(self.unsupported(
                format!("a tensor split with {}, whose passes differ,", other.device),
                "name GPUs of one kind with --target-devices, or use --split-mode layer",
            ));
        }
        if self.copy_engine.is_same_device(&other.copy_engine) {
            return Err(self.unsupported(
                "both shards of a tensor split".to_owned(),
                "name two GPUs with --target-devices, or use --split-mode layer",
            ));
        }
        let reach = self.copy_engine.enable_peer_access(&other.copy_engine)?
            && other.copy_engine.enable_peer_access(&self.copy_engine)?;
        if !reach {
            return Err(self.unsupported(
                format!(
                    "a tensor split with {}, whose memory it does not reach,",
                    other.device
                ),
                "use --split-mode layer, whose rows go through host memory",
            ));
        }
        let exchanges = [other.at, self.at];
        other.write_table(0, &exchanges)?;
        self.write_table(1, &exchanges)?;
        tracing::info!(
            device = %self.device,
            with = %other.device,
            bytes = self.shape.bytes(),
            "shards of a tensor split exchange partial sums by peer access"
        );
        Ok(())
    }

    fn unsupported(&self, what: String, instead: &str) -> DeviceError {
        DeviceError::Unsupported {
            what,
            device: self.device.clone(),
            instead: instead.to_owned(),
        }
    }
}
