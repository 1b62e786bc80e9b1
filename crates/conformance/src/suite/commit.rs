//! Laws of keeping and forgetting what was verified.

use contract::{Ask, CommitItem, Runner, TokenId, Tree, VerifyItem};

use super::tree::shapes;
use super::{Broken, Subject};

/// Committing a path leaves the sequence where speaking its tokens one by one would.
pub(super) fn a_path_is_its_nodes(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(13, 11);
    for (name, tree) in shapes(&stand)? {
        let last = tree.len() - 1;
        // The root, the deepest node, and one in between.
        for at in [0, last / 2, last] {
            let Some(node) = tree.nodes().nth(at) else {
                continue;
            };
            let seq = stand.read(&prefix)?;
            stand.verify(seq, &tree)?;
            stand.commit(seq, &tree, node)?;
            let found = stand.reveal(seq)?;
            stand.runner.close(seq);
            let path = tree.path_to(node);
            let tokens: Vec<TokenId> = path.nodes().iter().map(|n| tree.token(*n)).collect();
            let seq = stand.read(&prefix)?;
            stand.speak(seq, &tokens)?;
            let expected = stand.reveal(seq)?;
            stand.runner.close(seq);
            let what = format!("spoken after {} tokens of {name}", tokens.len());
            stand.same(&what, &found, &expected)?;
        }
    }
    Ok(())
}

/// Sequences committed in one call stand where each would alone.
pub(super) fn a_batch_is_its_members(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let shapes = shapes(&stand)?;
    let trees = [&shapes[4].1, &shapes[0].1, &shapes[1].1];
    let paths: Vec<_> = trees
        .iter()
        .map(|tree| tree.path_to(contract::NodeIdx((tree.len() / 2) as u16)))
        .collect();
    let mut expected = Vec::new();
    for (i, (tree, path)) in trees.iter().zip(&paths).enumerate() {
        let prefix = stand.text(6 + 9 * i, 12 + i);
        let seq = stand.read(&prefix)?;
        stand.verify(seq, tree)?;
        stand.commit(seq, tree, path.end())?;
        expected.push(stand.reveal(seq)?);
        stand.runner.close(seq);
    }
    let mut seqs = Vec::new();
    for i in 0..trees.len() {
        let prefix = stand.text(6 + 9 * i, 12 + i);
        seqs.push(stand.read(&prefix)?);
    }
    let asks: Vec<Vec<Ask>> = trees.iter().map(|t| vec![Ask::NOTHING; t.len()]).collect();
    let items: Vec<VerifyItem<'_>> = (0..trees.len())
        .map(|i| VerifyItem {
            seq: seqs[i],
            tree: trees[i],
            asks: &asks[i],
        })
        .collect();
    stand.runner.verify(&items)?;
    let items: Vec<CommitItem<'_>> = seqs
        .iter()
        .zip(&paths)
        .map(|(seq, path)| CommitItem { seq: *seq, path })
        .collect();
    stand.runner.commit(&items)?;
    for (i, seq) in seqs.into_iter().enumerate() {
        let found = stand.reveal(seq)?;
        stand.same(&format!("member {i} of a commit"), &found, &expected[i])?;
    }
    Ok(())
}

/// After a discard a sequence goes on as if nothing had been verified.
pub(super) fn a_discard_leaves_no_trace(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(13, 15);
    let seq = stand.read(&prefix)?;
    let expected = stand.reveal(seq)?;
    for (name, tree) in shapes(&stand)? {
        let seq = stand.read(&prefix)?;
        stand.verify(seq, &tree)?;
        stand.runner.discard(seq)?;
        let found = stand.reveal(seq)?;
        stand.same(
            &format!("spoken after {name} was discarded"),
            &found,
            &expected,
        )?;
        stand.runner.close(seq);
    }
    // What was spoken before is not taken along.
    let words = stand.text(6, 16);
    let seq = stand.read(&prefix)?;
    stand.speak(seq, &words)?;
    let spoken = stand.reveal(seq)?;
    let seq = stand.read(&prefix)?;
    stand.speak(seq, &words)?;
    stand.verify(seq, &Tree::chain(&stand.text(5, 17))?)?;
    stand.runner.discard(seq)?;
    let found = stand.reveal(seq)?;
    stand.same("spoken after a chain was discarded", &found, &spoken)
}

/// Whatever a sequence was doing when it was closed, the next one begins afresh.
pub(super) fn a_close_leaves_no_trace(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let (first, second) = (stand.text(40, 18), stand.text(9, 19));
    let seq = stand.read(&second)?;
    let expected = stand.reveal(seq)?;
    stand.runner.close(seq);
    let tree = Tree::chain(&stand.text(5, 20))?;
    for pending in [false, true] {
        let seq = stand.read(&first)?;
        stand.speak(seq, &second)?;
        if pending {
            stand.verify(seq, &tree)?;
        }
        stand.runner.close(seq);
        let seq = stand.read(&second)?;
        let found = stand.reveal(seq)?;
        stand.same("spoken in a place used before", &found, &expected)?;
        stand.runner.close(seq);
    }
    Ok(())
}
