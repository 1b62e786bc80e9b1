//! Properties of verify.

use std::collections::HashMap;

use contract::{
    AttentionWindow, LogitsRequest, LogitsRow, NodeIdx, Runner, SeqId, TokenId, Tree, VerifyItem,
};

use super::rig::Rig;
use super::{Case, Failure, LIMITS};

/// Tree shapes: one node, a chain, a star, a comb, and nested branches.
pub(super) fn shapes(rig: &Rig) -> Result<Vec<(&'static str, Tree)>, Failure> {
    let tokens = rig.text(LIMITS.tree_nodes, 7);
    let distinct: Vec<TokenId> = (0..LIMITS.tree_nodes as u32).map(TokenId).collect();
    let grow = |tokens: &[TokenId], parent: &dyn Fn(usize) -> usize| {
        let parents: Vec<NodeIdx> = (1..tokens.len())
            .map(|i| NodeIdx(parent(i) as u16))
            .collect();
        Tree::new(tokens, &parents)
    };
    Ok(vec![
        ("a root", Tree::root(tokens[0])),
        ("a chain", Tree::chain(&tokens[..9])?),
        ("a star", grow(&distinct[..9], &|_| 0)?),
        (
            "a comb",
            grow(&distinct[..12], &|i| {
                if i % 2 == 1 {
                    i.saturating_sub(2)
                } else {
                    i - 1
                }
            })?,
        ),
        ("a full tree", grow(&distinct, &|i| (i - 1) / 2)?),
        ("a bush", grow(&distinct[..20], &|i| i * 2 / 3)?),
    ])
}

/// Rows after decoding a path of tokens behind a prefix, each under its path.
pub(super) type PathRows = HashMap<Vec<TokenId>, LogitsRow>;

/// The row of each node after decoding its path alone with `window`. One sequence decodes the path
/// of a leaf and gives the rows of all its nodes; paths in `known` are not decoded again.
pub(super) fn decoded_paths(
    rig: &mut Rig,
    prefix: &[TokenId],
    (tree, window): (&Tree, AttentionWindow),
    known: &mut PathRows,
) -> Result<Vec<LogitsRow>, Failure> {
    let tokens = |node| -> Vec<TokenId> {
        let path = tree.path_to(node);
        path.nodes().iter().map(|node| tree.token(*node)).collect()
    };
    let paths: Vec<Vec<TokenId>> = tree.nodes().map(tokens).collect();
    // Children come after their parents: from the end, leaves come first.
    for path in paths.iter().rev() {
        if known.contains_key(path) {
            continue;
        }
        let seq = rig.prefill(prefix)?;
        for (end, token) in path.iter().enumerate() {
            let root = Tree::root(*token).with_window(window);
            let row = rig.verify(seq, &root)?.pop();
            rig.commit(seq, &root, NodeIdx::ROOT)?;
            known.extend(row.map(|row| (path[..=end].to_vec(), row)));
        }
        rig.runner.close(seq);
    }
    let rows = paths.iter().filter_map(|path| known.get(path).cloned());
    Ok(rows.collect())
}

/// A node's row equals the row after decoding its path alone.
pub(super) fn nodes_equal_their_path(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(11, 6);
    let mut known = PathRows::new();
    for (name, tree) in shapes(&rig)? {
        let seq = rig.prefill(&prefix)?;
        let found = rig.verify(seq, &tree)?;
        rig.runner.close(seq);
        let tree = (&tree, AttentionWindow::FULL);
        let expected = decoded_paths(&mut rig, &prefix, tree, &mut known)?;
        rig.same(&format!("{name} after a prompt"), &found, &expected)?;
    }
    // Trees after decoded tokens and at position 0.
    let tree = Tree::chain(&rig.text(4, 8))?;
    for decoded in [0, 5] {
        let words = rig.text(decoded, 9);
        let seq = rig.open()?;
        rig.decode(seq, &words)?;
        let found = rig.verify(seq, &tree)?;
        let seq = rig.open()?;
        rig.decode(seq, &words)?;
        let expected = rig.decode(seq, tree.tokens())?;
        let what = format!("a chain after {decoded} decoded tokens");
        rig.same(&what, &found, &expected)?;
    }
    Ok(())
}

/// The tokens of one branch do not affect another.
pub(super) fn siblings_are_independent(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(11, 6);
    // Two interleaved branches: 1, 3, 5, 7 below the root and 2, 4, 6, 8.
    let parents: Vec<NodeIdx> = (1..9_u16).map(|i| NodeIdx(i.saturating_sub(2))).collect();
    let mut rows = Vec::new();
    for other in [20, 40] {
        let mut tokens: Vec<TokenId> = (0..9).map(TokenId).collect();
        for i in [2, 4, 6, 8] {
            tokens[i] = TokenId(other + i as u32);
        }
        let tree = Tree::new(&tokens, &parents)?;
        let seq = rig.prefill(&prefix)?;
        let found = rig.verify(seq, &tree)?;
        rows.push([0, 1, 3, 5, 7].map(|i| found[i].clone()));
        rig.runner.close(seq);
    }
    rig.same("one branch beside another", &rows[1], &rows[0])
}

/// A batched verify gives the rows of single calls.
pub(super) fn batch_equals_single(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let shapes = shapes(&rig)?;
    let trees = [&shapes[0].1, &shapes[4].1, &shapes[1].1];
    let mut alone = Vec::new();
    let mut seqs: Vec<SeqId> = Vec::new();
    for (i, tree) in trees.iter().enumerate() {
        let prefix = rig.text(5 + 20 * i, 10 + i);
        let seq = rig.prefill(&prefix)?;
        alone.push(rig.verify(seq, tree)?);
        rig.runner.discard(seq)?;
        seqs.push(seq);
    }
    let requests: Vec<Vec<LogitsRequest>> = trees
        .iter()
        .map(|t| vec![LogitsRequest::full(); t.len()])
        .collect();
    let items: Vec<VerifyItem<'_>> = (0..trees.len())
        .map(|i| VerifyItem {
            seq: seqs[i],
            tree: trees[i],
            requests: &requests[i],
        })
        .collect();
    let together = rig.runner.verify(&items)?;
    for (i, (found, expected)) in together.iter().zip(&alone).enumerate() {
        rig.same(&format!("member {i} of a batch"), found, expected)?;
    }
    Ok(())
}
