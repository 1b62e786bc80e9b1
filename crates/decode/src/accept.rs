//! The walk through a verified tree: sample at each node, follow the child that matches.
//!
//! Every token that comes out is a sample of the target at its true context, so the tree decides how many
//! tokens come out and never which.

use contract::{DeviceError, NodeIdx, Path, Row, Tree};

use crate::sequence::Sequence;
use crate::{FinishReason, OutToken};

/// What a walk found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Walk {
    /// The tokens chosen, oldest first, at least one. Unless the sequence ends, the last is the next root.
    pub(crate) tokens: Vec<OutToken>,
    /// The nodes walked: what a commit keeps.
    pub(crate) path: Path,
    /// Why the sequence ends with the last token, if it does.
    pub(crate) ending: Option<FinishReason>,
}

/// Walks from the root; `rows` are `[n_nodes]`, as asked by [`Sequence::asks`].
pub(crate) fn walk(sequence: &Sequence, tree: &Tree, rows: &[Row]) -> Result<Walk, DeviceError> {
    let mut node = NodeIdx::ROOT;
    let mut tokens: Vec<OutToken> = Vec::new();
    loop {
        let row = rows.get(node.index()).filter(|row| !row.ids.is_empty());
        let row = row.ok_or_else(|| DeviceError::Misuse {
            call: "verify",
            detail: format!("no row came back for {node}"),
        })?;
        let chosen = sequence
            .sampler
            .choose(row, sequence.position_after(tokens.len()));
        let id = chosen.id;
        tokens.push(chosen);
        let ending = sequence.ending(tokens.len(), id);
        match tree.child_with(node, id) {
            Some(child) if ending.is_none() => node = child,
            _ => {
                return Ok(Walk {
                    tokens,
                    path: tree.path_to(node),
                    ending,
                });
            }
        }
    }
}
