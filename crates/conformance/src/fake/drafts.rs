//! The drafts of the fake runner: its draft model, and its multi-token-prediction head.

use contract::protocol::push_mtp_row;
use contract::{DeviceError, DraftCandidates, DraftItem, MtpDraftItem, MtpInfo, TokenId};

use super::{FakeDraft, FakeRunner, HistoryHash, ranked};

const WRONG_GUESS: u64 = 2;

/// Limits of a fake head.
pub(super) fn mtp_info(mtp: FakeDraft) -> MtpInfo {
    MtpInfo {
        max_depth: mtp.depth,
        ..MtpInfo::DEFAULT
    }
}

/// Rows that the fake head has drafted for one sequence.
#[derive(Default)]
pub(super) struct DraftedRows {
    pub(super) depths: Vec<usize>,
    /// The history up to each row, itself included.
    hashes: Vec<HistoryHash>,
}

impl DraftedRows {
    pub(super) fn clear(&mut self) {
        self.depths.clear();
        self.hashes.clear();
    }
}

impl FakeRunner {
    /// The candidates of a draft at one position, best first, and the target's best token there.
    fn guesses(&self, hash: HistoryHash, rate: f64, k: usize) -> (Vec<TokenId>, TokenId) {
        let mut ranked = ranked(&self.language.logits(hash), k.max(2));
        let best = ranked[0];
        if hash.unit(WRONG_GUESS) >= rate && ranked.len() > 1 {
            ranked.swap(0, 1);
        }
        ranked.truncate(k);
        (ranked, best)
    }

    /// Candidates of the draft model for checked items.
    pub(super) fn draft_blocks(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let mut drafts = Vec::with_capacity(items.len());
        for item in items {
            let mut hash = self.sequence(item.seq)?.committed.hash.then(item.root);
            let mut candidates = DraftCandidates {
                ids: Vec::with_capacity(depth * k),
                log_probs: Vec::with_capacity(depth * k),
                lse: vec![0.0; depth],
                k,
                ..DraftCandidates::default()
            };
            for _ in 0..depth {
                let (ids, best) = self.guesses(hash, self.draft_acceptance_rate, k);
                for (rank, id) in ids.into_iter().enumerate() {
                    candidates.ids.push(id);
                    candidates.log_probs.push(-0.25 - rank as f32);
                }
                hash = hash.then(best);
            }
            drafts.push(candidates);
        }
        Ok(drafts)
    }

    /// Candidates of the multi-token-prediction head for checked items.
    pub(super) fn draft_rows(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let mut drafts = Vec::with_capacity(items.len());
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let drafted = &mut sequence.drafted;
            let before = match item.parent {
                Some(parent) => drafted.hashes[parent.index()],
                None => {
                    drafted.clear();
                    sequence.committed.hash
                }
            };
            let hash = before.then(item.token);
            push_mtp_row(&mut drafted.depths, item.parent);
            drafted.hashes.push(hash);
            let (ids, _) = self.guesses(hash, self.mtp_acceptance_rate, k);
            drafts.push(DraftCandidates {
                log_probs: (0..ids.len()).map(|rank| -0.25 - rank as f32).collect(),
                ids,
                lse: vec![0.0],
                k,
                ..DraftCandidates::default()
            });
        }
        Ok(drafts)
    }
}
