//! Committed tokens that wait for the next draft of a source, which stores their keys and values.

use std::collections::HashMap;

use contract::SeqId;
use contract::protocol::MAX_WAITING_TOKENS;

use super::sources::{DraftSource, SourceSet};

/// Tokens of one sequence that wait for a source's draft, by source.
pub(crate) type Waiting = [usize; DraftSource::ALL.len()];

/// The waiting tokens of all decoding sequences, on a device that lets them wait.
#[derive(Debug, Default)]
pub(super) struct WaitingTokens(HashMap<SeqId, Waiting>);

impl WaitingTokens {
    /// Drops all sequences but these.
    pub(super) fn retain(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        self.0
            .retain(|seq, _| seqs.clone().any(|other| other == *seq));
    }

    /// The tokens of a sequence that wait.
    pub(super) fn of(&self, seq: SeqId) -> Waiting {
        self.0.get(&seq).copied().unwrap_or_default()
    }

    /// Drafts of these sources have stored what waited.
    pub(super) fn store(&mut self, seq: SeqId, sources: SourceSet) {
        let waiting = self.0.entry(seq).or_default();
        for source in sources.iter() {
            waiting[source.index()] = 0;
        }
    }

    /// Adds committed tokens. The device stores them when they are too many.
    pub(super) fn commit(&mut self, seq: SeqId, tokens: usize) {
        for n in self.0.entry(seq).or_default() {
            *n += tokens;
            if *n >= MAX_WAITING_TOKENS {
                *n = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_wait_until_a_draft_or_until_they_are_too_many() {
        let (mut waiting, seq) = (WaitingTokens::default(), SeqId(3));
        assert_eq!(waiting.of(seq), [0; 3]);
        waiting.commit(seq, 5);
        waiting.store(seq, SourceSet::of(&[DraftSource::Block]));
        waiting.commit(seq, 2);
        let of = |waiting: &WaitingTokens, source: DraftSource| waiting.of(seq)[source.index()];
        assert_eq!(of(&waiting, DraftSource::Block), 2);
        assert_eq!(of(&waiting, DraftSource::Mtp), 7);
        waiting.commit(seq, MAX_WAITING_TOKENS - 7);
        assert_eq!(of(&waiting, DraftSource::Mtp), 0);
        assert_eq!(of(&waiting, DraftSource::Block), MAX_WAITING_TOKENS - 5);
        waiting.retain([SeqId(4)].into_iter());
        assert_eq!(waiting.of(seq), [0; 3]);
    }
}
