//! Whether the draft model drafts for several sequences in narrow passes.
//!
//! The rows of a draft grow with the sequences while their trees shrink: eight sequences verify
//! trees of four nodes, and a block of 16 rows predicts 15 positions. A narrow pass has half of the
//! rows and reaches half as far. A whole draft shows what nodes beyond its reach are worth, so each
//! decides the depth of the next few.

use contract::NarrowDraft;

use super::controller::StepCosts;
use super::costs::{DraftUse, NodeAcceptance, choose_sizes};
use super::sequence_draft::SequenceDraft;

/// Narrow drafts between two whole ones.
const NARROW_STEPS: usize = 15;

/// The depth of the next drafts.
#[derive(Debug, Default)]
pub(super) struct DraftWidth {
    /// Narrow drafts until the next whole one.
    narrow_left: usize,
    /// Whether the last draft was narrow.
    is_narrow: bool,
}

impl DraftWidth {
    /// Begins a draft of `n` sequences: the narrow pass, if they take it. A single one takes the
    /// same time in a whole pass, which is bound by reading weights.
    pub(super) fn begin(&mut self, of: Option<NarrowDraft>, n: usize) -> Option<NarrowDraft> {
        self.is_narrow = of.is_some() && n > 1 && self.narrow_left > 0;
        self.narrow_left -= usize::from(self.is_narrow);
        of.filter(|_| self.is_narrow)
    }

    /// Learns from the draft of these sequences, which took the costs of `drafted`, if it was a
    /// whole one. `narrow` is the narrow pass of the draft model.
    pub(super) fn observe(
        &mut self,
        sequences: &[SequenceDraft<'_>],
        narrow: NarrowDraft,
        (drafted, costs_now): (DraftUse, StepCosts<'_>),
    ) {
        if self.is_narrow || drafted.block < 2 {
            return;
        }
        let rate = |depth: usize, drafted: DraftUse| {
            let acceptance: Vec<NodeAcceptance> = sequences
                .iter()
                .map(|sequence| sequence.acceptance_within(depth))
                .collect();
            let own: usize = acceptance.iter().map(|one| one.base_nodes).sum();
            let others = costs_now.base_nodes.saturating_sub(own);
            let draft = costs_now.costs.drafts(drafted);
            choose_sizes(costs_now.costs, &acceptance, (draft, others)).tokens_per_second()
        };
        let in_narrow = DraftUse {
            block: narrow.blocks(drafted.block),
            ..drafted
        };
        if rate(narrow.depth, in_narrow) > rate(usize::MAX, drafted) {
            self.narrow_left = NARROW_STEPS;
        }
    }
}
