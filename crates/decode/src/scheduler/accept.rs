//! Acceptance: sample at each node of a verified tree, and follow the child with the sampled token.
//!
//! Every output token is a sample of the target model at its true context. So the tree decides how
//! many tokens a step yields, never which.

use contract::{DeviceError, LogitsRow, LogitsSelection, NodeIdx, Tree, TreePath};

use super::sequence::{NodeRequest, Sequence};
use crate::event::{FinishReason, OutputToken};
use crate::speculation::SurprisalEma;

/// The result of acceptance.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AcceptResult {
    /// The sampled tokens, oldest first, at least one. Unless the sequence ends, the last is the
    /// next root.
    pub(super) tokens: Vec<OutputToken>,
    /// The accepted nodes, for the commit.
    pub(super) path: TreePath,
    /// Number of forced tokens among them.
    pub(super) forced: usize,
    /// The surprisal after these tokens.
    pub(super) surprisal: SurprisalEma,
    /// Why the sequence ends with the last token, if it does.
    pub(super) finish_reason: Option<FinishReason>,
}

/// Accepts from the root; `node_requests` and `rows` are `[n_nodes]`.
pub(super) fn accept(
    sequence: &Sequence,
    tree: &Tree,
    node_requests: &[NodeRequest],
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
        let (node_request, row) = node_requests
            .get(node.index())
            .zip(rows.get(node.index()))
            .filter(|(node_request, row)| {
                node_request.request.selection == LogitsSelection::None || !row.ids.is_empty()
            })
            .ok_or_else(missing)?;
        let chosen = match node_request.forced {
            Some(token) => sequence.sampler.forced_output(row, token),
            None => {
                let position = sequence.position_after(tokens.len());
                let chosen = sequence.sampler.choose(row, position);
                surprisal.observe(row, chosen.id);
                chosen
            }
        };
        forced += usize::from(node_request.forced.is_some());
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
