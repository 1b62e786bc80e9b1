//! The walk through a verified tree: sample at each node, follow the child that matches.
//!
//! Every token that comes out is a sample of the target at its true context, so the tree decides how many
//! tokens come out and never which.

use contract::{DeviceError, LogitsRow, LogitsSelection, NodeIdx, Tree, TreePath};

use crate::doubt::Doubt;
use crate::sequence::{NodePlan, Sequence};
use crate::{FinishReason, OutToken};

/// What a walk found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Walk {
    /// The tokens chosen, oldest first, at least one. Unless the sequence ends, the last is the next root.
    pub(crate) tokens: Vec<OutToken>,
    /// The nodes walked: what a commit keeps.
    pub(crate) path: TreePath,
    /// Tokens among them that were forced.
    pub(crate) forced: usize,
    /// How unexpected the text is with them.
    pub(crate) doubt: Doubt,
    /// Why the sequence ends with the last token, if it does.
    pub(crate) ending: Option<FinishReason>,
}

/// Walks from the root; `plans` and `rows`, as asked by the plans, are `[n_nodes]`.
pub(crate) fn walk(
    sequence: &Sequence,
    tree: &Tree,
    plans: &[NodePlan],
    rows: &[LogitsRow],
) -> Result<Walk, DeviceError> {
    let mut node = NodeIdx::ROOT;
    let mut tokens: Vec<OutToken> = Vec::new();
    let mut forced = 0;
    let mut doubt = sequence.doubt;
    loop {
        let missing = || DeviceError::InvalidCall {
            call: "verify",
            detail: format!("no row came back for {node}"),
        };
        let (plan, row) = plans
            .get(node.index())
            .zip(rows.get(node.index()))
            .filter(|(plan, row)| {
                plan.ask.selection == LogitsSelection::None || !row.ids.is_empty()
            })
            .ok_or_else(missing)?;
        let chosen = match plan.forced {
            Some(token) => sequence.sampler.take_forced(row, token),
            None => {
                let position = sequence.position_after(tokens.len());
                let chosen = sequence.sampler.choose(row, position);
                doubt.see(row, chosen.id);
                chosen
            }
        };
        forced += usize::from(plan.forced.is_some());
        let id = chosen.id;
        tokens.push(chosen);
        let ending = sequence.ending(tokens.len(), id);
        match tree.child_with(node, id) {
            Some(child) if ending.is_none() => node = child,
            _ => {
                return Ok(Walk {
                    tokens,
                    path: tree.path_to(node),
                    forced,
                    doubt,
                    ending,
                });
            }
        }
    }
}
