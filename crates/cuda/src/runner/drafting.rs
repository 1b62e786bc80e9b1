//! Calls of the runner that serve its drafts: the draft model and the multi-token-prediction head.

use std::sync::Arc;

use contract::protocol::push_mtp_row;
use contract::{
    CommitItem, DeviceError, DraftCandidates, DraftItem, DraftLogits, DraftSpec, MtpDraftItem,
    MtpRow, SeqId, TokenId, Tree,
};

use super::CudaRunner;
use crate::exec::Reach;
use crate::exec::host_logits::candidates;
use crate::step::{self, DraftedRow, MtpStep, Step};

/// The rows that a sequence's multi-token-prediction head has drafted since its last commit.
#[derive(Debug, Clone, Default)]
pub(crate) struct DraftedRows {
    /// Depth of each.
    depths: Vec<usize>,
    /// Bit `j` of each: row `j` is an ancestor or the row itself.
    ancestors: Vec<u64>,
}

impl DraftedRows {
    /// Depth of each row.
    pub(super) fn depths(&self) -> &[usize] {
        &self.depths
    }

    /// Forgets all rows.
    pub(super) fn clear(&mut self) {
        self.depths.clear();
        self.ancestors.clear();
    }

    /// Rows before those of a call with these parents: none if the call begins anew.
    fn earlier(&self, mut parents: impl Iterator<Item = Option<MtpRow>>) -> usize {
        if parents.any(|parent| parent.is_none()) {
            0
        } else {
            self.depths.len()
        }
    }

    /// Adds a row behind `parent`, at most 64 in all; a root row drops the others.
    fn push(&mut self, parent: Option<MtpRow>, token: TokenId) -> DraftedRow {
        if parent.is_none() {
            self.ancestors.clear();
        }
        push_mtp_row(&mut self.depths, parent);
        let row = self.ancestors.len();
        let above = parent.map_or(0, |parent| self.ancestors[parent.index()]);
        self.ancestors.push(above | 1 << row);
        DraftedRow {
            token,
            depth: self.depths[row],
            ancestors: self.ancestors[row],
            parent: parent.map(MtpRow::index),
        }
    }
}

/// Rows of one launch sequence, and the item of the call that each belongs to.
struct MtpPass {
    rows: MtpStep,
    items: Vec<usize>,
}

impl CudaRunner {
    /// Drafts checked blocks with the draft model.
    pub(super) fn draft_blocks(
        &mut self,
        items: &[DraftItem],
        depth: usize,
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let spec = self.draft_spec();
        let rows = spec.pass_rows(depth);
        // Narrow blocks share the plans of whole ones.
        let whole_blocks = step::ROWS / spec.block;
        let per_pass = (whole_blocks * spec.block / rows).min(step::TREES);
        let mut all = Vec::with_capacity(items.len());
        for items in items.chunks(per_pass) {
            let mut step = self.blocks(&spec, items, (rows, depth))?;
            let found = self.engine.draft(&mut step, &spec, Reach { depth, k });
            all.append(&mut self.record_fault(found)?);
        }
        Ok(all)
    }

    /// The logits of a checked block at full depth.
    pub(super) fn draft_block_logits(
        &mut self,
        item: DraftItem,
    ) -> Result<DraftLogits, DeviceError> {
        let spec = self.draft_spec();
        let mut step = self.blocks(&spec, &[item], (spec.block, spec.depth()))?;
        let found = self.engine.draft_logits(&mut step, &spec);
        self.record_fault(found)
    }

    fn draft_spec(&self) -> Arc<DraftSpec> {
        let draft = self.draft.as_ref();
        let draft = draft.expect("the depth in info is a draft's");
        Arc::clone(&draft.spec)
    }

    /// Blocks of `rows` rows, masks behind the roots, with logits rows for `depth` positions of
    /// each.
    fn blocks(
        &self,
        spec: &DraftSpec,
        items: &[DraftItem],
        (rows, depth): (usize, usize),
    ) -> Result<Step, DeviceError> {
        let mut step = Step::new();
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let mut tokens = vec![spec.mask_token; rows];
            tokens[0] = item.root;
            let block = Tree::chain(&tokens).expect("a block is at most a tree");
            let first = usize::try_from(step.rows).unwrap_or(0) + spec.first_row;
            step.push(sequence.slot, sequence.position, &block);
            (first..first + depth).for_each(|row| step.request_logits(row));
        }
        Ok(step)
    }

    /// Drafts checked rows with the multi-token-prediction head: sequence by sequence, as many as
    /// fit one launch sequence together.
    ///
    /// # Errors
    /// [`DeviceError::PoolExhausted`] if the pool lacks pages for the rows; nothing has changed.
    pub(super) fn draft_mtp_rows(
        &mut self,
        items: &[MtpDraftItem],
        k: usize,
    ) -> Result<Vec<DraftCandidates>, DeviceError> {
        let by_sequence = by_sequence(items);
        for (seq, rows) in &by_sequence {
            let sequence = self.sequence(*seq)?;
            let parents = rows.iter().map(|row| items[*row].parent);
            let drafted = sequence.drafted.earlier(parents) + rows.len();
            // Drafted rows are stored behind the committed ones.
            self.ensure_pages(*seq, sequence.position + drafted)?;
        }
        let mut passes: Vec<MtpPass> = Vec::new();
        for (seq, rows) in by_sequence {
            let Some(sequence) = self.sequences.get_mut(&seq) else {
                return Err(DeviceError::UnknownSequence(seq));
            };
            let parents = rows.iter().map(|row| items[*row].parent);
            let earlier = sequence.drafted.earlier(parents);
            let drafted: Vec<DraftedRow> = rows
                .iter()
                .map(|row| sequence.drafted.push(items[*row].parent, items[*row].token))
                .collect();
            let at = (sequence.position, earlier);
            let pass = match passes.last_mut() {
                Some(pass) if pass.rows.has_room(drafted.len()) => pass,
                _ => {
                    passes.push(MtpPass {
                        rows: MtpStep::new(),
                        items: Vec::new(),
                    });
                    passes.last_mut().expect("one was just added")
                }
            };
            pass.rows.push_drafted(sequence.slot, at, &drafted);
            pass.items.extend(rows);
        }
        let mut found: Vec<Option<DraftCandidates>> = vec![None; items.len()];
        for pass in passes {
            let rows = self.engine.draft_mtp(&pass.rows, k);
            let rows = self.record_fault(rows)?;
            for (item, row) in pass.items.into_iter().zip(rows.chunks(1)) {
                found[item] = Some(candidates(row));
            }
        }
        let all: Option<Vec<DraftCandidates>> = found.into_iter().collect();
        Ok(all.expect("every item is a row of a pass"))
    }

    /// The tokens of committed paths, for the rows of the multi-token-prediction head; `None`
    /// without one.
    pub(super) fn committed_rows(
        &self,
        items: &[CommitItem<'_>],
    ) -> Result<Option<MtpStep>, DeviceError> {
        if self.info.mtp.is_none() {
            return Ok(None);
        }
        let mut paths = MtpStep::new();
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let (nodes, tree) = (item.path.nodes(), sequence.pending.as_ref());
            let tree = tree.expect("a path of a pending tree was checked");
            let tokens: Vec<TokenId> = nodes.iter().map(|node| tree.token(*node)).collect();
            paths.push_path((sequence.slot, sequence.position), nodes, &tokens);
        }
        Ok(Some(paths))
    }
}

/// The items of each sequence, by their indices, in the order of their first ones.
fn by_sequence(items: &[MtpDraftItem]) -> Vec<(SeqId, Vec<usize>)> {
    let mut all: Vec<(SeqId, Vec<usize>)> = Vec::new();
    for (i, item) in items.iter().enumerate() {
        match all.iter_mut().find(|(seq, _)| *seq == item.seq) {
            Some((_, rows)) => rows.push(i),
            None => all.push((item.seq, vec![i])),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafted_rows_know_their_ancestors_and_a_root_begins_anew() {
        let mut drafted = DraftedRows::default();
        let mut push = |parent: Option<u16>| {
            let row = drafted.push(parent.map(MtpRow), TokenId(9));
            (row.depth, row.ancestors, row.parent)
        };
        assert_eq!(push(None), (0, 0b1, None));
        assert_eq!(push(Some(0)), (1, 0b11, Some(0)));
        assert_eq!(push(Some(0)), (1, 0b101, Some(0)));
        assert_eq!(push(Some(2)), (2, 0b1101, Some(2)));
        let later = [Some(MtpRow(1)), Some(MtpRow(3))];
        assert_eq!(drafted.earlier(later.into_iter()), 4);
        assert_eq!(drafted.earlier([None].into_iter()), 0);
        drafted.push(None, TokenId(3));
        assert_eq!(
            (drafted.depths(), &*drafted.ancestors),
            (&[0][..], &[1][..])
        );
    }

    #[test]
    fn rows_of_a_sequence_stay_together_in_their_order() {
        let row = |seq, token| MtpDraftItem {
            seq: SeqId(seq),
            parent: Some(MtpRow(0)),
            token: TokenId(token),
        };
        let items = [row(5, 1), row(3, 2), row(5, 3), row(3, 4), row(5, 5)];
        let expected = [(SeqId(5), vec![0, 2, 4]), (SeqId(3), vec![1, 3])];
        assert_eq!(by_sequence(&items), expected);
    }
}
