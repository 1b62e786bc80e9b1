//! The drafts of the fake runner: its draft model, and its multi-token-prediction head.

use contract::protocol::push_mtp_row;
use contract::{
    CandidateLinks, DeviceError, DraftCandidates, DraftItem, ListIdx, MtpDraftItem, MtpInfo,
    NarrowDraft, TokenId,
};

use super::{FakeRunner, HistoryHash, ranked};

/// A fake draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FakeDraft {
    /// Maximum number of drafted positions.
    pub depth: usize,
    /// Share of positions whose first candidate is the target's best token; elsewhere it is the
    /// second best.
    pub acceptance_rate: f64,
}

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

    /// The same runner, its draft having a narrow pass.
    pub fn with_narrow_draft(mut self, narrow: NarrowDraft) -> FakeRunner {
        self.info.narrow_draft = Some(narrow);
        self
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
            if self.conditional_draft {
                drafts.push(self.conditional(hash, depth, k));
                continue;
            }
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

    /// Candidates that depend on all tokens before them, behind the first few of each list.
    fn conditional(&self, root: HistoryHash, depth: usize, k: usize) -> DraftCandidates {
        const EXPANDED: usize = 2;
        let mut candidates = DraftCandidates {
            k,
            ..DraftCandidates::default()
        };
        let mut links = Vec::new();
        let mut states = vec![root];
        for position in 0..depth {
            let behind = candidates.lse.len() + states.len();
            let mut successors = Vec::new();
            for hash in states {
                let (ids, _) = self.guesses(hash, self.draft_acceptance_rate, k);
                for (rank, id) in ids.into_iter().enumerate() {
                    let ends = position + 1 == depth || rank >= EXPANDED || successors.len() >= 8;
                    links.push((!ends).then(|| ListIdx((behind + successors.len()) as u16)));
                    if !ends {
                        successors.push(hash.then(id));
                    }
                    candidates.ids.push(id);
                    candidates.log_probs.push(-0.25 - rank as f32);
                }
                candidates.lse.push(0.0);
                candidates
                    .confidence
                    .push(0.9 - 0.1 * (position % 8) as f32);
            }
            states = successors;
        }
        candidates.links = CandidateLinks::ByCandidate(links);
        candidates
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
