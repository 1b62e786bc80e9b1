//! What the shards of a tensor split know of each other: the addresses of the memory that each
//! writes in the others' GPUs.

use std::time::Duration;

use contract::DeviceError;

use crate::check::Neighbours;
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
    ordinal: u32,
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
            ordinal: gpu.info().ordinal,
            device: format!("cuda:{}", gpu.info().ordinal),
        })
    }

    /// Writes the pointers of the shard at this end.
    fn write_table(&self, table: &[u8]) -> Result<(), DeviceError> {
        let mut host: Pinned<u8> = self.copy_engine.pinned(table.len())?;
        host.as_mut_slice().copy_from_slice(table);
        let stream = self.copy_engine.stream()?;
        // SAFETY: the exchange begins with room for the table, and the copy is waited for.
        unsafe {
            self.copy_engine
                .copy(&stream, self.at, host.device_ptr(), table.len())
        }?;
        stream.sync()
    }

    /// Whether the pointers of the other shard, `table`, arrive here by a copy between the GPUs.
    fn receives(&self, other: &ExchangeEnd, table: &[u8]) -> Result<bool, DeviceError> {
        let rows = self.at + self.shape.zeroed_bytes() as u64;
        let stream = self.copy_engine.stream()?;
        let from = (&other.copy_engine, other.at);
        self.copy_engine
            .copy_from_device(&stream, rows, from, table.len())?;
        let received: Pinned<u8> = self.copy_engine.pinned(table.len())?;
        // SAFETY: rows have room for a table, and the copy is waited for.
        unsafe {
            self.copy_engine
                .copy(&stream, received.device_ptr(), rows, table.len())
        }?;
        stream.sync()?;
        Ok(received.as_slice() == table)
    }

    /// Lets two shards, `other` before this one, write in each other's memory, and wait for each
    /// other's sums for `watchdog` at most.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for GPUs that do not reach each other's memory.
    pub(super) fn connect(
        &self,
        other: &ExchangeEnd,
        watchdog: Duration,
    ) -> Result<(), DeviceError> {
        if self.shape != other.shape {
            return Err(self.unsupported(
                format!("a tensor split with {}, whose passes differ,", other.device),
                "name GPUs of one kind with --target-devices, or use --split-mode layer",
            ));
        }
        // The driver was asked before loading, but may still refuse the contexts.
        let gpus = Neighbours {
            name: &self.device,
            ordinals: [self.ordinal, other.ordinal],
        };
        gpus.require_both_ways([
            self.copy_engine.enable_peer_access(&other.copy_engine)?,
            other.copy_engine.enable_peer_access(&self.copy_engine)?,
        ])?;
        let exchanges = [other.at, self.at];
        let [of_other, own] = [0, 1].map(|rank| self.shape.table(rank, &exchanges, watchdog));
        other.write_table(&of_other)?;
        self.write_table(&own)?;
        if !self.receives(other, &of_other)? || !other.receives(self, &own)? {
            return Err(self.unsupported(
                format!(
                    "a tensor split with {}, between which copies arrive with wrong bytes,",
                    other.device
                ),
                "use --split-mode layer, which then hands rows over through host memory",
            ));
        }
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
