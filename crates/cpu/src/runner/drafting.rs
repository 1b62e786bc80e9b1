//! Calls of the runner that serve its drafts: the draft model and the multi-token-prediction head.

use std::collections::BTreeMap;

use contract::{DeviceError, DraftCandidates, DraftItem, DraftLogits, SeqId};

use super::{CpuRunner, by_id};
use crate::draft::{DraftRoot, Reach};
use crate::mtp::{self, Committed, DraftedRow};
use crate::pass::ExecContext;
use crate::state::CpuSequence;

impl CpuRunner {
    /// Loads a deferred draft before any state changes.
    pub(super) fn ready(&mut self) -> Result<(), DeviceError> {
        match &mut self.draft {
            Some(draft) => draft.ready(&self.pool),
            None => Ok(()),
        }
    }

    /// Projects a sequence's pending features, if there is a draft.
    pub(super) fn project(&mut self, seq: SeqId) -> Result<(), DeviceError> {
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let sequence = self.sequences.get_mut(&seq);
        let Some(sequence) = sequence.filter(|s| s.draft.is_some()) else {
            return Ok(());
        };
        match (&mut self.draft, &mut sequence.draft) {
            (Some(draft), Some(cache)) => {
                let position = sequence.position;
                self.pool.enter(|| draft.project(compute, cache, position))
            }
            _ => Ok(()),
        }
    }

    /// Drafts checked items in one pass.
    pub(super) fn draft_pass(
        &mut self,
        items: &[DraftItem],
        reach: Reach,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let Some(draft) = &mut self.draft else {
            return Ok(Vec::new());
        };
        let mut roots = draft_roots(&mut self.sequences, items)?;
        let (weights, head) = (&self.weights, &mut self.head);
        self.pool
            .enter(|| draft.draft(compute, weights, &mut roots, reach, head))
    }

    /// The whole logits of a checked item.
    pub(super) fn draft_logits_pass(
        &mut self,
        item: DraftItem,
    ) -> Result<DraftLogits, DeviceError> {
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let root = draft_roots(&mut self.sequences, &[item])?.pop();
        let (Some(draft), Some(root)) = (&mut self.draft, root) else {
            return Err(DeviceError::UnknownSequence(item.seq));
        };
        let weights = &self.weights;
        self.pool.enter(|| draft.logits(compute, weights, root))
    }

    /// Stores keys and values of the committed tokens that the multi-token-prediction head's cache
    /// does not hold yet.
    pub(super) fn cache_mtp_rows(&mut self, ids: &[SeqId]) -> Result<(), DeviceError> {
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let width = self.weights.spec.hidden;
        let mut uncached = Vec::with_capacity(ids.len());
        for (id, sequence) in &mut self.sequences {
            let CpuSequence {
                layers,
                mtp,
                position,
                ..
            } = sequence;
            let Some(mtp) = mtp.as_ref().filter(|_| ids.contains(id)) else {
                continue;
            };
            if let (false, Some(cache)) = (mtp.uncached_tokens.is_empty(), mtp::cache(layers)) {
                uncached.push(Committed {
                    cache,
                    position: *position - mtp.uncached_tokens.len(),
                    tokens: mtp.uncached_tokens.clone(),
                    hidden: mtp.uncached_hidden.chunks_exact(width).collect(),
                });
            }
        }
        if uncached.is_empty() {
            return Ok(());
        }
        let buffers = &mut self.mtp;
        self.pool
            .enter(|| mtp::fill(compute, &self.weights, &mut uncached, buffers))?;
        for id in ids {
            let sequence = self.sequences.get_mut(id);
            if let Some(mtp) = sequence.and_then(|sequence| sequence.mtp.as_mut()) {
                mtp.mark_cached();
            }
        }
        Ok(())
    }

    /// Drafts rows that their sequences already count; `ids` are the sequences of the rows.
    pub(super) fn draft_mtp_rows(
        &mut self,
        ids: &[SeqId],
        rows: &[DraftedRow],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let compute =
            ExecContext::new(&self.pool, &self.kernels, &self.scratch, &self.weights.spec);
        let mut found = by_id(&mut self.sequences);
        let sequences = ids.iter().filter_map(|id| found.remove(id));
        let mut sequences: Vec<&mut CpuSequence> = sequences.collect();
        let (weights, buffers) = (&self.weights, (&mut self.mtp, &mut self.head));
        self.pool
            .enter(|| mtp::draft(compute, weights, (&mut sequences, rows), k, buffers))
    }
}

/// The draft states of the items' sequences.
fn draft_roots<'a>(
    sequences: &'a mut BTreeMap<SeqId, CpuSequence>,
    items: &[DraftItem],
) -> Result<Vec<DraftRoot<'a>>, DeviceError> {
    let mut found = by_id(sequences);
    let mut roots = Vec::with_capacity(items.len());
    for item in items {
        let sequence = found.remove(&item.seq);
        let sequence = sequence.ok_or(DeviceError::UnknownSequence(item.seq))?;
        let position = sequence.position;
        let Some(cache) = &mut sequence.draft else {
            continue;
        };
        roots.push(DraftRoot {
            cache,
            position,
            token: item.root,
        });
    }
    Ok(roots)
}
