//! One sequence of a step that is being drafted.

use super::build_tree::TreeBudget;
use super::calibration::{Calibration, Trust};
use super::candidates::{Chances, Drafts};
use super::controller::Allowance;
use super::costs::NodeAcceptance;
use super::explore::{Exploration, Stem, explore};
use super::sources::SourceSet;
use super::tree_proposer::TreeRequest;
use super::waiting::Waiting;

/// One sequence of a step, with what the sources have drafted for it.
pub(super) struct SequenceDraft<'a> {
    /// Index of its request.
    pub(super) at: usize,
    pub(super) root: &'a TreeRequest<'a>,
    /// Whether its tree may hold drafted nodes.
    pub(super) drafts_nodes: bool,
    /// The sources that draft for it, besides suffix matches.
    pub(super) sources: SourceSet,
    /// Its allowance; `None` if costs are unknown, or if it does not draft.
    pub(super) allowance: Option<Allowance>,
    /// Committed tokens that wait for the drafts, by source.
    pub(super) waiting: Waiting,
    pub(super) budget: TreeBudget,
    pub(super) trust: Trust,
    pub(super) drafts: Drafts<'a>,
    /// The tree of what has been drafted so far.
    pub(super) exploration: Exploration,
}

impl<'a> SequenceDraft<'a> {
    /// A sequence with its suffix matches, before any source drafts.
    pub(super) fn new(
        (at, root): (usize, &'a TreeRequest<'a>),
        drafts: Drafts<'a>,
        (calibration, trust): (&Calibration, Trust),
        budget: TreeBudget,
    ) -> SequenceDraft<'a> {
        let chances = Chances {
            calibration,
            trust: &trust,
        };
        let exploration = explore(stem(root), &drafts, chances, budget);
        SequenceDraft {
            at,
            root,
            drafts_nodes: false,
            sources: SourceSet::NONE,
            allowance: None,
            waiting: Waiting::default(),
            budget,
            trust,
            drafts,
            exploration,
        }
    }

    /// The tree of what has been drafted so far.
    pub(super) fn explore(&self, calibration: &Calibration) -> Exploration {
        let chances = Chances {
            calibration,
            trust: &self.trust,
        };
        explore(stem(self.root), &self.drafts, chances, self.budget)
    }

    /// The acceptance of its nodes without those deeper than `depth`.
    pub(super) fn acceptance_within(&self, depth: usize) -> NodeAcceptance {
        let reached = self.exploration.reached_within(depth);
        NodeAcceptance {
            base_nodes: self.exploration.base(),
            probabilities: reached.take(self.max_nodes()).collect(),
        }
    }

    /// Maximum number of its drafted nodes.
    pub(super) fn max_nodes(&self) -> usize {
        let allowed = self
            .allowance
            .map_or(usize::MAX, |allowance| allowance.nodes);
        if self.drafts_nodes { allowed } else { 0 }
    }
}

/// The certain tokens of a request.
fn stem<'a>(root: &TreeRequest<'a>) -> Stem<'a> {
    Stem {
        root: root.token(),
        forced: root.forced,
    }
}
