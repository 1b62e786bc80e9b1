//! What reading ahead asks of saved states. It leaves no trace in their use: nobody has come for them.

use contract::{DeviceError, Runner, SeqId, TokenId};

use super::{PrefixCache, Restored};

impl PrefixCache {
    /// Whether anything is to be read ahead.
    pub(crate) fn warmup_enabled(&self) -> bool {
        self.is_on() && self.config.warmup_tokens > 0
    }

    /// How many tokens of a text may still be read, of which `read` were.
    pub(crate) fn warmup_budget_left(&self, read: usize) -> usize {
        self.config.warmup_tokens.saturating_sub(read)
    }

    /// The fewest tokens that are class reading ahead.
    pub(crate) fn min_warmup_tokens(&self) -> usize {
        self.config.boundaries.apart.max(1)
    }

    /// Where the last turn but one of a text begins, which is the reply in what is foreseen; its end if nobody knows.
    pub(crate) fn last_reply(&self, tokens: &[TokenId]) -> usize {
        let starts = &self.config.boundaries.turn_starts;
        let mut turns = tokens.iter().enumerate().rev();
        let mut turn = || turns.find(|(_, token)| starts.contains(token));
        turn()
            .and_then(|_| turn())
            .map_or(tokens.len(), |(at, _)| at)
    }

    /// Counts tokens read ahead.
    pub(crate) fn count_warmup(&mut self, tokens: usize) {
        self.stats.warmup_tokens += tokens as u64;
    }

    /// How many tokens the longest saved beginning of a text holds.
    pub(crate) fn covered(&self, tokens: &[TokenId]) -> usize {
        let prefixes = self.radix.prefixes_of(tokens);
        prefixes.last().map_or(0, |key| self.radix.depth(*key))
    }

    /// Puts the longest saved beginning of a text into a fresh sequence.
    ///
    /// The only error is a lost device.
    pub(crate) fn restore_for_warmup(
        &mut self,
        runner: &mut dyn Runner,
        seq: SeqId,
        tokens: &[TokenId],
    ) -> Result<Restored, DeviceError> {
        match self.radix.prefixes_of(tokens).last() {
            Some(key) => self.restore_entry(runner, seq, *key),
            None => Ok(Restored::NotFound),
        }
    }
}
