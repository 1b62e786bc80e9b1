//! `hearth tree`: builds a draft tree from draft logits.

use std::io::Write;

use anyhow::{Context, bail};
use contract::{DraftCandidates, TokenId, Tree};
use decode::TreeInit;
use decode::speculation::{TreeBudget, TreeInputs, build_tree};
use serde_json::json;

use crate::cli::TreeArgs;
use crate::commands::npy;

pub(super) fn tree(args: &TreeArgs) -> anyhow::Result<()> {
    let name = args.logits.display();
    let (shape, values) = npy::read_f32(&args.logits)?;
    let [depth, vocab] = shape[..] else {
        bail!(
            "{name}: {} dimensions; use an array [depth, vocab]",
            shape.len()
        );
    };
    if depth == 0 || vocab == 0 {
        bail!("{name}: the array is empty; use an array [depth, vocab]");
    }
    if u32::try_from(vocab).is_err() || depth >= Tree::MAX_NODES {
        bail!(
            "{name}: {depth} positions of {vocab} tokens; use at most {} positions",
            Tree::MAX_NODES - 1
        );
    }
    let candidates = candidates(&values, vocab, args.top_k.min(vocab), args.temperature);
    let inputs = TreeInputs {
        root: TokenId(u32::MAX),
        forced: &[],
        hints: &[],
        candidates: &candidates,
    };
    let init = if args.no_chain_seed {
        TreeInit::None
    } else {
        TreeInit::Chain
    };
    let draft_tree = build_tree(
        inputs,
        TreeBudget {
            max_nodes: usize::from(args.budget),
            max_depth: depth,
            init,
        },
    );
    let nodes = || draft_tree.tree.nodes().skip(1);
    let parents = nodes().map(|node| draft_tree.tree.parent(node).map_or(0, |p| p.index()));
    let report = json!({
        "token": nodes().map(|node| draft_tree.tree.token(node).0).collect::<Vec<_>>(),
        "depth": nodes().map(|node| draft_tree.tree.depth(node)).collect::<Vec<_>>(),
        "parent": parents.collect::<Vec<_>>(),
        "weight": draft_tree.weights[1..],
    });
    writeln!(std::io::stdout().lock(), "{report}").context("cannot write the tree")
}

/// The `k` best tokens of each row with their log-probabilities. Ties go to the lower id; NaN
/// counts as minus infinity.
fn candidates(logits: &[f32], vocab: usize, k: usize, temperature: f32) -> DraftCandidates {
    let mut all = DraftCandidates {
        ids: Vec::new(),
        log_probs: Vec::new(),
        lse: Vec::new(),
        k,
        ..DraftCandidates::default()
    };
    for row in logits.chunks_exact(vocab) {
        let row: Vec<f64> = row
            .iter()
            .map(|x| {
                if x.is_nan() {
                    f64::NEG_INFINITY
                } else {
                    f64::from(*x) / f64::from(temperature)
                }
            })
            .collect();
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        let lse = max + sum.ln();
        let mut order: Vec<usize> = (0..vocab).collect();
        let better = |a: &usize, b: &usize| row[*b].total_cmp(&row[*a]).then(a.cmp(b));
        order.select_nth_unstable_by(k - 1, better);
        order.truncate(k);
        order.sort_unstable_by(better);
        for id in order {
            all.ids.push(TokenId(id as u32));
            all.log_probs.push((row[id] - lse) as f32);
        }
        all.lse.push(lse as f32);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_the_top_k_of_each_row_with_ties_by_id() {
        let rows = [0.0, 2.0, f32::NAN, 2.0, 1.0, 1.0, 1.0, 1.0];
        let found = candidates(&rows, 4, 2, 1.0);
        let ids: Vec<u32> = found.ids.iter().map(|id| id.0).collect();
        assert_eq!(ids, [1, 3, 0, 1]);
        let expected = -(1.0_f32 + (-2.0_f32).exp() + 1.0).ln();
        assert!((found.log_probs[0] - expected).abs() < 1e-6);
        assert!((found.log_probs[2] + 4.0_f32.ln()).abs() < 1e-6);
    }
}
