//! The page pool of the fake runner, as a counter.

use contract::{DeviceError, SeqId};

use super::{FakeRunner, Flaw};

impl FakeRunner {
    /// Pages that sequences hold.
    pub(super) fn held(&self) -> usize {
        let open: usize = self.sequences.values().map(|s| s.pages).sum();
        open + self.lost
    }

    /// Ensures that a sequence has pages for its first `n` rows.
    pub(super) fn give_pages(&mut self, seq: SeqId, n: usize) -> Result<(), DeviceError> {
        let pool = self.info.pool;
        let free = pool.pages.saturating_sub(self.held());
        let bottomless = self.has(Flaw::PoolUnlimited);
        let sequence = self.sequence(seq)?;
        let more = n.div_ceil(pool.page_size).saturating_sub(sequence.pages);
        if more > free && !bottomless {
            return Err(DeviceError::PoolExhausted { wanted: more, free });
        }
        sequence.pages += more;
        Ok(())
    }
}
