//! Laws of trees that see only part of the context.

use contract::{AttentionWindow, LogitsRow, NodeIdx, Runner, TokenId, Tree};

use super::rig::{Rig, same_rows};
use super::{Case, Failure, LIMITS};
use crate::compare::Precision;

/// Windows of every kind, for contexts of 100 to 200 tokens: bare, with few and with many sinks.
const WINDOWS: [(usize, usize); 4] = [(64, 0), (80, 3), (64, 40), (90, 70)];

/// A window that holds the whole context is none, to the last bit.
pub(super) fn a_wide_window_is_none(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(150, 6);
    let tree = bush(&rig)?;
    let mut rows = Vec::new();
    for window in [
        AttentionWindow::FULL,
        AttentionWindow::new(LIMITS.context, 0),
        AttentionWindow::new(LIMITS.context, 7),
        // What it would hide are its sinks.
        AttentionWindow::new(150, 64),
    ] {
        let seq = rig.read(&prefix)?;
        let mut found = rig.verify(seq, &tree.clone().with_window(window))?;
        rig.commit(seq, &tree, NodeIdx(1))?;
        let mut after = rig.reveal(seq)?;
        rig.runner.close(seq);
        found.append(&mut after);
        rows.push(found);
    }
    for found in &rows[1..] {
        same_rows("a wide window", found, &rows[0], Precision::BitExact)?;
    }
    Ok(())
}

/// Through a window too, a node hears what speaking its path would give.
pub(super) fn a_node_hears_its_path(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(150, 6);
    let tree = bush(&rig)?;
    for (tokens, sinks) in WINDOWS {
        let window = AttentionWindow::new(tokens, sinks);
        let seq = rig.read(&prefix)?;
        let found = rig.verify(seq, &tree.clone().with_window(window))?;
        rig.runner.close(seq);
        let mut expected: Vec<LogitsRow> = Vec::new();
        for node in tree.nodes() {
            let path = tree.path_to(node);
            let tokens = path.nodes().iter().map(|n| tree.token(*n));
            let seq = rig.read(&prefix)?;
            let mut row = Vec::new();
            for token in tokens {
                let root = Tree::root(token).with_window(window);
                row = rig.verify(seq, &root)?;
                rig.commit(seq, &root, NodeIdx::ROOT)?;
            }
            expected.append(&mut row);
            rig.runner.close(seq);
        }
        rig.same(&format!("{window:?}"), &found, &expected)?;
    }
    Ok(())
}

/// A window hides, and only while it is looked through: what is stored stays whole.
pub(super) fn a_window_is_a_way_of_reading(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(150, 6);
    let tree = bush(&rig)?;
    let seq = rig.read(&prefix)?;
    let full = rig.verify(seq, &tree)?;
    rig.runner.discard(seq)?;
    let narrow = tree.clone().with_window(AttentionWindow::new(64, 0));
    let hidden = rig.verify(seq, &narrow)?;
    rig.runner.discard(seq)?;
    if same_rows("", &hidden, &full, Precision::BitExact).is_ok() {
        return Err(Failure::Differs {
            what: "a window of 64 after 150 tokens".to_owned(),
            detail: "nothing was hidden".to_owned(),
        });
    }
    let again = rig.verify(seq, &tree)?;
    same_rows("after a window", &again, &full, Precision::BitExact)
}

/// Neighbours in a call each see through their own window.
pub(super) fn windows_of_a_batch_do_not_mix(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let tree = bush(&rig)?;
    let windows = [
        AttentionWindow::new(64, 3),
        AttentionWindow::FULL,
        AttentionWindow::new(90, 0),
    ];
    let trees = windows.map(|window| tree.clone().with_window(window));
    let mut alone = Vec::new();
    let mut seqs = Vec::new();
    for (i, tree) in trees.iter().enumerate() {
        let prefix = rig.text(110 + 20 * i, 10 + i);
        let seq = rig.read(&prefix)?;
        alone.push(rig.verify(seq, tree)?);
        rig.runner.discard(seq)?;
        seqs.push(seq);
    }
    let requests = vec![contract::LogitsRequest::full(); tree.len()];
    let items: Vec<contract::VerifyItem<'_>> = seqs
        .iter()
        .zip(&trees)
        .map(|(seq, tree)| contract::VerifyItem {
            seq: *seq,
            tree,
            requests: &requests,
        })
        .collect();
    let together = rig.runner.verify(&items)?;
    for (i, (found, expected)) in together.iter().zip(&alone).enumerate() {
        rig.same(&format!("member {i} of a batch"), found, expected)?;
    }
    Ok(())
}

/// A tree with branches of several depths.
fn bush(rig: &Rig) -> Result<Tree, Failure> {
    let tokens: Vec<TokenId> = rig.text(12, 7);
    let mut tree = Tree::root(tokens[0]);
    for (i, token) in tokens.into_iter().enumerate().skip(1) {
        // A token that a sibling has already is left out.
        let parent = NodeIdx((i * 2 / 3).min(tree.len() - 1) as u16);
        let _ = tree.push(parent, token);
    }
    Ok(tree)
}
