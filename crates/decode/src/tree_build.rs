//! Where a round's trees come from.

use contract::{DeviceError, Runner, SeqId, TokenId, Tree};

/// One sequence that wants a tree.
#[derive(Debug, Clone, Copy)]
pub struct Root<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and output so far; the last one is the root: sampled, and not yet in the cache.
    pub history: &'a [TokenId],
    /// The deepest node that can still be of use, given what may be generated; 0 wants the root alone.
    pub max_depth: usize,
}

impl Root<'_> {
    /// The token at the root.
    pub fn token(&self) -> TokenId {
        self.history.last().copied().unwrap_or_default()
    }
}

/// Proposes trees. Whatever it proposes, the tokens that come out are those of plain decoding: a tree
/// decides how many of them one round yields, never which.
pub trait TreeSource {
    /// One tree per root, in order, each rooted at [`Root::token`].
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError>;
}
