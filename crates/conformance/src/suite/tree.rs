//! Laws of verifying trees.

use contract::{Ask, NodeIdx, Row, Runner, SeqId, TokenId, Tree, VerifyItem};

use super::stand::Stand;
use super::{Broken, LIMITS, Subject};

/// Trees of the shapes that break things: one node, a chain, a star, a comb, and branches of branches.
pub(super) fn shapes(stand: &Stand) -> Result<Vec<(&'static str, Tree)>, Broken> {
    let tokens = stand.text(LIMITS.tree_nodes, 7);
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

/// Each node's row is the one that speaking the node's path, and nothing else, would give.
pub(super) fn a_node_hears_its_path(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(11, 6);
    for (name, tree) in shapes(&stand)? {
        let seq = stand.read(&prefix)?;
        let found = stand.verify(seq, &tree)?;
        stand.runner.close(seq);
        let mut expected: Vec<Row> = Vec::new();
        for node in tree.nodes() {
            let path = tree.path_to(node);
            let tokens: Vec<TokenId> = path.nodes().iter().map(|n| tree.token(*n)).collect();
            let seq = stand.read(&prefix)?;
            expected.extend(stand.speak(seq, &tokens)?.pop());
            stand.runner.close(seq);
        }
        stand.same(&format!("{name} after a prompt"), &found, &expected)?;
    }
    // Trees after what was spoken too, and after nothing at all.
    let tree = Tree::chain(&stand.text(4, 8))?;
    for spoken in [0, 5] {
        let words = stand.text(spoken, 9);
        let seq = stand.open()?;
        stand.speak(seq, &words)?;
        let found = stand.verify(seq, &tree)?;
        let seq = stand.open()?;
        stand.speak(seq, &words)?;
        let expected = stand.speak(seq, tree.tokens())?;
        let what = format!("a chain after {spoken} spoken tokens");
        stand.same(&what, &found, &expected)?;
    }
    Ok(())
}

/// What stands on one branch does not show on another.
pub(super) fn siblings_do_not_see_each_other(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(11, 6);
    // Two branches in turn: 1, 3, 5, 7 below the root and 2, 4, 6, 8.
    let parents: Vec<NodeIdx> = (1..9_u16).map(|i| NodeIdx(i.saturating_sub(2))).collect();
    let mut rows = Vec::new();
    for other in [20, 40] {
        let mut tokens: Vec<TokenId> = (0..9).map(TokenId).collect();
        for i in [2, 4, 6, 8] {
            tokens[i] = TokenId(other + i as u32);
        }
        let tree = Tree::new(&tokens, &parents)?;
        let seq = stand.read(&prefix)?;
        let found = stand.verify(seq, &tree)?;
        rows.push([0, 1, 3, 5, 7].map(|i| found[i].clone()));
        stand.runner.close(seq);
    }
    stand.same("one branch beside another", &rows[1], &rows[0])
}

/// Sequences verified together hear what each hears alone.
pub(super) fn a_batch_is_its_members(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let shapes = shapes(&stand)?;
    let trees = [&shapes[0].1, &shapes[4].1, &shapes[1].1];
    let mut alone = Vec::new();
    let mut seqs: Vec<SeqId> = Vec::new();
    for (i, tree) in trees.iter().enumerate() {
        let prefix = stand.text(5 + 20 * i, 10 + i);
        let seq = stand.read(&prefix)?;
        alone.push(stand.verify(seq, tree)?);
        stand.runner.discard(seq)?;
        seqs.push(seq);
    }
    let asks: Vec<Vec<Ask>> = trees.iter().map(|t| vec![Ask::full(); t.len()]).collect();
    let items: Vec<VerifyItem<'_>> = (0..trees.len())
        .map(|i| VerifyItem {
            seq: seqs[i],
            tree: trees[i],
            asks: &asks[i],
        })
        .collect();
    let together = stand.runner.verify(&items)?;
    for (i, (found, expected)) in together.iter().zip(&alone).enumerate() {
        stand.same(&format!("member {i} of a batch"), found, expected)?;
    }
    Ok(())
}
