//! The trees that a decode step verifies, and the interface of everything that proposes them.

use contract::{DeviceError, Runner, SeqId, TokenId, Tree};

use crate::stats::StepTimes;

use super::costs::Clock;

/// One sequence that wants a tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeRequest<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and output so far; the last one is the root: sampled, and not yet in the cache.
    pub history: &'a [TokenId],
    /// The deepest node that can still be of use, given what may be generated; 0 wants the root alone.
    pub max_depth: usize,
    /// Tokens that come next for certain. A tree should begin with them; what lies beside them is dropped.
    pub forced: &'a [TokenId],
    /// Whether more than the root and what is forced is wanted.
    pub speculate: bool,
    /// How unexpected its last tokens were to the target, in nats a token.
    pub surprisal: f64,
}

impl TreeRequest<'_> {
    /// The token at the root.
    pub fn token(&self) -> TokenId {
        self.history.last().copied().unwrap_or_default()
    }

    /// The root and what is forced, of at most `nodes` nodes.
    pub(crate) fn certain(&self, nodes: usize) -> Tree {
        let forced = self.forced.iter().take(self.max_depth);
        let tokens: Vec<TokenId> = std::iter::once(self.token())
            .chain(forced.copied())
            .take(nodes.clamp(1, Tree::MAX_NODES))
            .collect();
        Tree::chain(&tokens).unwrap_or_else(|_| Tree::root(self.token()))
    }
}

/// What became of one sequence's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeResult {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens the round gave, at least one.
    pub tokens: usize,
}

/// Proposes trees. Whatever it proposes, the tokens that come out are those of plain decoding: a tree
/// decides how many of them one round yields, never which.
pub trait TreeSource {
    /// One tree per root, in order, each rooted at [`TreeRequest::token`].
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<Tree>, DeviceError>;

    /// Called before the first job is admitted that may be drafted for, and nothing is open on the runner.
    fn prepare(&mut self, runner: &mut dyn Runner, clock: Clock) -> Result<(), DeviceError> {
        let _ = (runner, clock);
        Ok(())
    }

    /// Tells what the trees of the last call brought and took, so that the next ones can be better.
    fn learn(&mut self, results: &[TreeResult], times: StepTimes) {
        let _ = (results, times);
    }
}

/// Plain decoding: roots, what is forced, and nothing else.
pub(crate) struct NoDraft;

impl TreeSource for NoDraft {
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[TreeRequest<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let nodes = runner.info().limits.tree_nodes;
        Ok(roots.iter().map(|root| root.certain(nodes)).collect())
    }
}
