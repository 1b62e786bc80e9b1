//! Properties of attention windows.

use contract::{AttentionWindow, NodeIdx, Runner, TokenId, Tree};

use super::rig::{Rig, same_rows};
use super::tree::{PathRows, decoded_paths};
use super::{Case, Failure, LIMITS};
use crate::compare::Precision;

/// Windows for contexts of 100 to 200 tokens: without, with few and with many sinks.
const WINDOWS: [(usize, usize); 4] = [(64, 0), (80, 3), (64, 40), (90, 70)];

/// A window that covers the whole context changes no bit.
pub(super) fn wide_window_changes_nothing(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(150, 6);
    let tree = bush(&rig)?;
    let mut rows = Vec::new();
    for window in [
        AttentionWindow::FULL,
        AttentionWindow::new(LIMITS.context, 0),
        AttentionWindow::new(LIMITS.context, 7),
        // The masked range consists of sinks.
        AttentionWindow::new(150, 64),
    ] {
        let seq = rig.prefill(&prefix)?;
        let mut found = rig.verify(seq, &tree.clone().with_window(window))?;
        rig.commit(seq, &tree, NodeIdx(1))?;
        let mut after = rig.probe(seq)?;
        rig.runner.close(seq);
        found.append(&mut after);
        rows.push(found);
    }
    for found in &rows[1..] {
        same_rows("a wide window", found, &rows[0], Precision::BitExact)?;
    }
    Ok(())
}

/// With a window too, a node's row equals decoding its path.
pub(super) fn nodes_equal_their_path(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(150, 6);
    let tree = bush(&rig)?;
    for (tokens, sinks) in WINDOWS {
        let window = AttentionWindow::new(tokens, sinks);
        let seq = rig.prefill(&prefix)?;
        let found = rig.verify(seq, &tree.clone().with_window(window))?;
        rig.runner.close(seq);
        let expected = decoded_paths(&mut rig, &prefix, (&tree, window), &mut PathRows::new())?;
        rig.same(&format!("{window:?}"), &found, &expected)?;
    }
    Ok(())
}

/// A window masks attention only; the KV cache stays complete.
pub(super) fn window_changes_no_stored_state(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let prefix = rig.text(150, 6);
    let tree = bush(&rig)?;
    let seq = rig.prefill(&prefix)?;
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

/// Each sequence of a batch uses its own window.
pub(super) fn batch_windows_are_independent(case: &Case<'_>) -> Result<(), Failure> {
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
        let seq = rig.prefill(&prefix)?;
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
        // Skips a token that a sibling already has.
        let parent = NodeIdx((i * 2 / 3).min(tree.len() - 1) as u16);
        let _ = tree.push(parent, token);
    }
    Ok(tree)
}
