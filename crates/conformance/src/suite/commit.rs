//! Properties of commit, discard and close.

use contract::{CommitItem, LogitsRequest, Runner, TokenId, Tree, VerifyItem};

use super::tree::shapes;
use super::{Case, Failure};

/// Committing a path gives the state of decoding its tokens one by one.
pub(super) fn path_commit_equals_decoding(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(13, 11);
    for (name, tree) in shapes(&rig)? {
        let last = tree.len() - 1;
        // The root, the deepest node, and one in between.
        for at in [0, last / 2, last] {
            let Some(node) = tree.nodes().nth(at) else {
                continue;
            };
            let seq = rig.prefill(&prefix)?;
            rig.verify(seq, &tree)?;
            rig.commit(seq, &tree, node)?;
            let found = rig.probe(seq)?;
            rig.runner.close(seq);
            let path = tree.path_to(node);
            let tokens: Vec<TokenId> = path.nodes().iter().map(|n| tree.token(*n)).collect();
            let seq = rig.prefill(&prefix)?;
            rig.decode(seq, &tokens)?;
            let expected = rig.probe(seq)?;
            rig.runner.close(seq);
            let what = format!("decoded after {} tokens of {name}", tokens.len());
            rig.same(&what, &found, &expected)?;
        }
    }
    Ok(())
}

/// A batched commit gives each sequence the state of a single commit.
pub(super) fn batch_equals_single(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let shapes = shapes(&rig)?;
    let trees = [&shapes[4].1, &shapes[0].1, &shapes[1].1];
    let paths: Vec<_> = trees
        .iter()
        .map(|tree| tree.path_to(contract::NodeIdx((tree.len() / 2) as u16)))
        .collect();
    let mut expected = Vec::new();
    for (i, (tree, path)) in trees.iter().zip(&paths).enumerate() {
        let prefix = rig.text(6 + 9 * i, 12 + i);
        let seq = rig.prefill(&prefix)?;
        rig.verify(seq, tree)?;
        rig.commit(seq, tree, path.end())?;
        expected.push(rig.probe(seq)?);
        rig.runner.close(seq);
    }
    let mut seqs = Vec::new();
    for i in 0..trees.len() {
        let prefix = rig.text(6 + 9 * i, 12 + i);
        seqs.push(rig.prefill(&prefix)?);
    }
    let requests: Vec<Vec<LogitsRequest>> = trees
        .iter()
        .map(|t| vec![LogitsRequest::NONE; t.len()])
        .collect();
    let items: Vec<VerifyItem<'_>> = (0..trees.len())
        .map(|i| VerifyItem {
            seq: seqs[i],
            tree: trees[i],
            requests: &requests[i],
        })
        .collect();
    rig.runner.verify(&items)?;
    let items: Vec<CommitItem<'_>> = seqs
        .iter()
        .zip(&paths)
        .map(|(seq, path)| CommitItem { seq: *seq, path })
        .collect();
    rig.runner.commit(&items)?;
    for (i, seq) in seqs.into_iter().enumerate() {
        let found = rig.probe(seq)?;
        rig.same(&format!("member {i} of a commit"), &found, &expected[i])?;
    }
    Ok(())
}

/// A discarded tree leaves no trace.
pub(super) fn discard_leaves_no_trace(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(13, 15);
    let seq = rig.prefill(&prefix)?;
    let expected = rig.probe(seq)?;
    for (name, tree) in shapes(&rig)? {
        let seq = rig.prefill(&prefix)?;
        rig.verify(seq, &tree)?;
        rig.runner.discard(seq)?;
        let found = rig.probe(seq)?;
        rig.same(
            &format!("decoded after {name} was discarded"),
            &found,
            &expected,
        )?;
        rig.runner.close(seq);
    }
    // Nor do tokens decoded before it.
    let words = rig.text(6, 16);
    let seq = rig.prefill(&prefix)?;
    rig.decode(seq, &words)?;
    let decoded = rig.probe(seq)?;
    let seq = rig.prefill(&prefix)?;
    rig.decode(seq, &words)?;
    rig.verify(seq, &Tree::chain(&rig.text(5, 17))?)?;
    rig.runner.discard(seq)?;
    let found = rig.probe(seq)?;
    rig.same("decoded after a chain was discarded", &found, &decoded)
}

/// A new sequence is empty, whatever state the closed one before it had.
pub(super) fn closed_sequences_leave_no_trace(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let (first, second) = (rig.text(40, 18), rig.text(9, 19));
    let seq = rig.prefill(&second)?;
    let expected = rig.probe(seq)?;
    rig.runner.close(seq);
    let tree = Tree::chain(&rig.text(5, 20))?;
    for pending in [false, true] {
        let seq = rig.prefill(&first)?;
        rig.decode(seq, &second)?;
        if pending {
            rig.verify(seq, &tree)?;
        }
        rig.runner.close(seq);
        let seq = rig.prefill(&second)?;
        let found = rig.probe(seq)?;
        rig.same("decoded in a place used before", &found, &expected)?;
        rig.runner.close(seq);
    }
    Ok(())
}
