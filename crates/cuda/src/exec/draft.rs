//! Passes of a draft model.

use contract::{DeviceError, DraftCandidates, DraftLogits, DraftSpec, LogitsRequest};

use super::{Engine, Reduced, host_logits};
use crate::plan::{DraftLists, PlanKey, chains, pairs};
use crate::step::{self, Step};

/// Depth and width of a draft.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    pub(crate) depth: usize,
    pub(crate) k: usize,
}

impl Engine {
    /// Drafts the blocks of a step, whose logits rows are `reach.depth` for each, waits, and
    /// returns the candidates of each.
    pub(crate) fn draft(
        &mut self,
        step: &mut Step,
        spec: &DraftSpec,
        reach: Reach,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        // More candidates than the reduction gives are ranked on the host, from whole rows.
        let by_depth = self.plans.draft_lists == DraftLists::ByDepth;
        let whole = by_depth && reach.k > self.plans.reduce.k;
        self.run_draft(step, spec, (reach.k, whole))?;
        self.candidates(step, spec, reach)
    }

    /// The logits of the rows of a step's only block, over all tokens that the draft knows, and the
    /// likeliest chain.
    pub(crate) fn draft_logits(
        &mut self,
        step: &mut Step,
        spec: &DraftSpec,
    ) -> Result<DraftLogits, DeviceError> {
        let reach = Reach {
            depth: spec.depth(),
            k: 1,
        };
        self.run_draft(step, spec, (reach.k, true))?;
        let found = self.candidates(step, spec, reach)?;
        let chain = found.first().map_or_else(Vec::new, DraftCandidates::chain);
        let vocab = self.plans.reduce.vocab;
        let own = spec.head.as_ref();
        let known = own.map_or(vocab, |head| head.weight.rows);
        let mut logits = vec![f32::NEG_INFINITY; reach.depth * vocab];
        for (row, logits) in logits.chunks_exact_mut(vocab).enumerate() {
            let found = self.logits_row((row, known), known)?;
            match own.and_then(|head| head.ids.as_ref()) {
                None => logits[..known].copy_from_slice(&found),
                Some(ids) => {
                    for (id, logit) in ids.iter().zip(found) {
                        logits[id.index()] = logit;
                    }
                }
            }
        }
        Ok(DraftLogits { logits, chain })
    }

    /// Runs the plan of a step of blocks and waits. Narrow blocks take the plans of whole ones.
    fn run_draft(
        &mut self,
        step: &mut Step,
        spec: &DraftSpec,
        (k, whole): (usize, bool),
    ) -> Result<(), DeviceError> {
        step.set_candidates(k);
        self.commit_stream.note_draft();
        self.wait_for_tree_copies(step)?;
        let trees = step.tree.iter().take(step.trees as usize);
        let slots: Vec<usize> = trees.map(|tree| tree.slot as usize).collect();
        self.consume_features(&slots)?;
        let bytes = step::bytes_of(step);
        self.headers.up.draft.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let rows = usize::try_from(step.rows).unwrap_or(0);
        self.queue(PlanKey::Draft {
            rows: step::bucket(rows.next_multiple_of(spec.block)),
            whole: whole && self.plans.has_whole_draft(),
        })?;
        self.sync()
    }

    /// The candidates of each block of the step that ran last.
    fn candidates(
        &mut self,
        step: &Step,
        spec: &DraftSpec,
        Reach { depth, k }: Reach,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let trees = usize::try_from(step.trees).unwrap_or(0);
        let (reduce, down) = (self.plans.reduce, &self.headers.down);
        let lists = down.draft_lists.as_slice();
        match self.plans.draft_lists {
            DraftLists::ByDepth => {
                let ask = LogitsRequest::top_k(k);
                let rows = self.answer(&vec![&ask; trees * depth], Reduced::default())?;
                Ok(rows.chunks(depth).map(host_logits::candidates).collect())
            }
            DraftLists::Pairs { top_k } => {
                let of_tree = |tree: usize| {
                    let rows = tree * depth..(tree + 1) * depth;
                    let rows = rows.map(|row| reduce.read(down.rows.as_slice(), row));
                    let rows: Vec<_> = rows.collect();
                    pairs(&rows, (lists, tree * depth), (top_k, k))
                };
                Ok((0..trees).map(of_tree).collect())
            }
            DraftLists::Chains(all) => {
                let ids = spec.head.as_ref().and_then(|head| head.ids.as_ref());
                let rows = step.bucket();
                let of_tree = |tree| chains(all, (lists, rows), (tree, depth, k), ids);
                Ok((0..trees).map(of_tree).collect())
            }
        }
    }
}
