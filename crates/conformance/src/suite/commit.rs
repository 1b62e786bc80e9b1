//! Laws of keeping and forgetting what was verified.

use contract::{CommitItem, LogitsRequest, Runner, TokenId, Tree, VerifyItem};

use super::tree::shapes;
use super::{Case, Failure};

/// Committing a path leaves the sequence where speaking its tokens one by one would.
pub(super) fn a_path_is_its_nodes(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(13, 11);
    for (name, tree) in shapes(&rig)? {
        let last = tree.len() - 1;
        // The root, the deepest node, and one in between.
        for at in [0, last / 2, last] {
            let Some(node) = tree.nodes().nth(at) else {
                continue;
            };
            let seq = rig.read(&prefix)?;
            rig.verify(seq, &tree)?;
            rig.commit(seq, &tree, node)?;
            let found = rig.reveal(seq)?;
            rig.runner.close(seq);
            let path = tree.path_to(node);
            let tokens: Vec<TokenId> = path.nodes().iter().map(|n| tree.token(*n)).collect();
            let seq = rig.read(&prefix)?;
            rig.speak(seq, &tokens)?;
            let expected = rig.reveal(seq)?;
            rig.runner.close(seq);
            let what = format!("spoken after {} tokens of {name}", tokens.len());
            rig.same(&what, &found, &expected)?;
        }
    }
    Ok(())
}

/// Sequences committed in one call stand where each would alone.
pub(super) fn a_batch_is_its_members(case: &Case<'_>) -> Result<(), Failure> {
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
        let seq = rig.read(&prefix)?;
        rig.verify(seq, tree)?;
        rig.commit(seq, tree, path.end())?;
        expected.push(rig.reveal(seq)?);
        rig.runner.close(seq);
    }
    let mut seqs = Vec::new();
    for i in 0..trees.len() {
        let prefix = rig.text(6 + 9 * i, 12 + i);
        seqs.push(rig.read(&prefix)?);
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
        let found = rig.reveal(seq)?;
        rig.same(&format!("member {i} of a commit"), &found, &expected[i])?;
    }
    Ok(())
}

/// After a discard a sequence goes on as if nothing had been verified.
pub(super) fn a_discard_leaves_no_trace(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(13, 15);
    let seq = rig.read(&prefix)?;
    let expected = rig.reveal(seq)?;
    for (name, tree) in shapes(&rig)? {
        let seq = rig.read(&prefix)?;
        rig.verify(seq, &tree)?;
        rig.runner.discard(seq)?;
        let found = rig.reveal(seq)?;
        rig.same(
            &format!("spoken after {name} was discarded"),
            &found,
            &expected,
        )?;
        rig.runner.close(seq);
    }
    // What was spoken before is not taken along.
    let words = rig.text(6, 16);
    let seq = rig.read(&prefix)?;
    rig.speak(seq, &words)?;
    let spoken = rig.reveal(seq)?;
    let seq = rig.read(&prefix)?;
    rig.speak(seq, &words)?;
    rig.verify(seq, &Tree::chain(&rig.text(5, 17))?)?;
    rig.runner.discard(seq)?;
    let found = rig.reveal(seq)?;
    rig.same("spoken after a chain was discarded", &found, &spoken)
}

/// Whatever a sequence was doing when it was closed, the next one begins afresh.
pub(super) fn a_close_leaves_no_trace(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let (first, second) = (rig.text(40, 18), rig.text(9, 19));
    let seq = rig.read(&second)?;
    let expected = rig.reveal(seq)?;
    rig.runner.close(seq);
    let tree = Tree::chain(&rig.text(5, 20))?;
    for pending in [false, true] {
        let seq = rig.read(&first)?;
        rig.speak(seq, &second)?;
        if pending {
            rig.verify(seq, &tree)?;
        }
        rig.runner.close(seq);
        let seq = rig.read(&second)?;
        let found = rig.reveal(seq)?;
        rig.same("spoken in a place used before", &found, &expected)?;
        rig.runner.close(seq);
    }
    Ok(())
}
