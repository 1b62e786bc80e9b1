//! The trees that a decode step verifies, and the interface of everything that proposes them.

use contract::{DeviceError, Runner, SeqId, TokenId, Tree};

use crate::stats::StepTimes;

use super::costs::Clock;
use super::sources::SourceSet;

/// A sequence that needs a tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeRequest<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and output. The last token is the root: sampled, and not in the KV cache.
    pub history: &'a [TokenId],
    /// Greatest useful depth, given what may still be generated; 0 needs the root alone.
    pub max_depth: usize,
    /// Forced tokens. A tree should start with them; nodes beside them are dropped.
    pub forced: &'a [TokenId],
    /// Whether more than the root and the forced tokens is wanted.
    pub speculate: bool,
    /// Surprisal of the last tokens, in nats per token.
    pub surprisal: f64,
}

impl TreeRequest<'_> {
    /// The root's token.
    pub fn token(&self) -> TokenId {
        self.history.last().copied().unwrap_or_default()
    }

    /// The root and the forced tokens, at most `nodes` nodes.
    pub(crate) fn base_tree(&self, nodes: usize) -> Tree {
        let forced = self.forced.iter().take(self.max_depth);
        let tokens: Vec<TokenId> = std::iter::once(self.token())
            .chain(forced.copied())
            .take(nodes.clamp(1, Tree::MAX_NODES))
            .collect();
        Tree::chain(&tokens).unwrap_or_else(|_| Tree::root(self.token()))
    }
}

/// A tree to verify.
#[derive(Debug, Clone, PartialEq)]
pub struct ProposedTree {
    /// The tree.
    pub tree: Tree,
    /// `[n_nodes]`: the sources that proposed each node; none for the root and forced tokens.
    pub sources: Vec<SourceSet>,
}

impl From<Tree> for ProposedTree {
    fn from(tree: Tree) -> ProposedTree {
        ProposedTree {
            sources: vec![SourceSet::NONE; tree.len()],
            tree,
        }
    }
}

/// The result of one sequence's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeResult<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// The tokens that the step yielded, at least one.
    pub tokens: &'a [TokenId],
}

/// Proposes trees. The output tokens never depend on them: a tree decides how many tokens a step
/// yields, never which.
pub trait TreeProposer {
    /// One tree per request, in order, each rooted at [`TreeRequest::token`].
    fn propose(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<ProposedTree>, DeviceError>;

    /// Called before the first job that may speculate is admitted, with no sequence open on the
    /// runner.
    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let _ = (runner, clock);
        Ok(())
    }

    /// Names the sequences that decode besides those of the next call of
    /// [`propose`](TreeProposer::propose), whose trees may not be verified yet. What is known of
    /// others is dropped.
    fn keep(&mut self, others: &[SeqId]) {
        let _ = others;
    }

    /// Expected tokens of the trees proposed last, roots included, if they are known.
    fn expected_tokens(&self) -> Option<f64> {
        None
    }

    /// Observes the results and times of the earliest trees that it has not observed: one call for
    /// each of [`propose`](TreeProposer::propose), whether that failed or not. Results may lack
    /// sequences that have ended, and times are zero where other work was in between.
    fn observe(&mut self, results: &[TreeResult<'_>], times: StepTimes) {
        let _ = (results, times);
    }
}

/// Plain decoding: roots and forced tokens only.
pub(crate) struct NoDraft;

impl TreeProposer for NoDraft {
    fn propose(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<ProposedTree>, DeviceError> {
        let nodes = runner.info().limits.tree_nodes;
        Ok(roots
            .iter()
            .map(|root| root.base_tree(nodes).into())
            .collect())
    }
}
