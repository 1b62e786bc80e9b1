//! The walk through a verified tree: sample at each node, follow the child that matches.
//!
//! Every token that comes out is a sample of the target at its true context, so the tree decides how many
//! tokens come out and never which.

use contract::{DeviceError, LogitsRow, LogitsSelection, NodeIdx, Tree, TreePath};

use super::sequence::{NodePlan, Sequence};
use crate::event::{FinishReason, OutputToken};
use crate::speculation::SurprisalEma;

/// What a walk found.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AcceptResult {
    /// The tokens chosen, oldest first, at least one. Unless the sequence ends, the last is the next root.
    pub(super) tokens: Vec<OutputToken>,
    /// The nodes walked: what a commit keeps.
    pub(super) path: TreePath,
    /// Tokens among them that were forced.
    pub(super) forced: usize,
    /// How unexpected the text is with them.
    pub(super) surprisal: SurprisalEma,
    /// Why the sequence ends with the last token, if it does.
    pub(super) finish_reason: Option<FinishReason>,
}

/// Walks from the root; `plans` and `rows`, as asked by the plans, are `[n_nodes]`.
pub(super) fn accept(
    sequence: &Sequence,
    tree: &Tree,
    plans: &[NodePlan],
    rows: &[LogitsRow],
) -> Result<AcceptResult, DeviceError> {
    let mut node = NodeIdx::ROOT;
    let mut tokens: Vec<OutputToken> = Vec::new();
    let mut forced = 0;
    let mut surprisal = sequence.surprisal;
    loop {
        let missing = || DeviceError::InvalidCall {
            call: "verify",
            detail: format!("no row came back for {node}"),
        };
        let (plan, row) = plans
            .get(node.index())
            .zip(rows.get(node.index()))
            .filter(|(plan, row)| {
                plan.request.selection == LogitsSelection::None || !row.ids.is_empty()
            })
            .ok_or_else(missing)?;
        let chosen = match plan.forced {
            Some(token) => sequence.sampler.forced_output(row, token),
            None => {
                let position = sequence.position_after(tokens.len());
                let chosen = sequence.sampler.choose(row, position);
                surprisal.observe(row, chosen.id);
                chosen
            }
        };
        forced += usize::from(plan.forced.is_some());
        let id = chosen.id;
        tokens.push(chosen);
        let finish_reason = sequence.finish_reason(tokens.len(), id);
        match tree.child_with(node, id) {
            Some(child) if finish_reason.is_none() => node = child,
            _ => {
                return Ok(AcceptResult {
                    tokens,
                    path: tree.path_to(node),
                    forced,
                    surprisal,
                    finish_reason,
                });
            }
        }
    }
}
