//! Laws of trees that see only part of the context.

use contract::{NodeIdx, Row, Runner, TokenId, Tree, Window};

use super::stand::{Stand, same_rows};
use super::{Broken, LIMITS, Subject};
use crate::compare::Exactness;

/// Windows of every kind, for contexts of 100 to 200 tokens: bare, with few and with many sinks.
const WINDOWS: [(usize, usize); 4] = [(64, 0), (80, 3), (64, 40), (90, 70)];

/// A window that holds the whole context is none, to the last bit.
pub(super) fn a_wide_window_is_none(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(150, 6);
    let tree = bush(&stand)?;
    let mut rows = Vec::new();
    for window in [
        Window::FULL,
        Window::new(LIMITS.context, 0),
        Window::new(LIMITS.context, 7),
        // What it would hide are its sinks.
        Window::new(150, 64),
    ] {
        let seq = stand.read(&prefix)?;
        let mut found = stand.verify(seq, &tree.clone().seen_through(window))?;
        stand.commit(seq, &tree, NodeIdx(1))?;
        let mut after = stand.reveal(seq)?;
        stand.runner.close(seq);
        found.append(&mut after);
        rows.push(found);
    }
    for found in &rows[1..] {
        same_rows("a wide window", found, &rows[0], Exactness::Bits)?;
    }
    Ok(())
}

/// Through a window too, a node hears what speaking its path would give.
pub(super) fn a_node_hears_its_path(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(150, 6);
    let tree = bush(&stand)?;
    for (tokens, sinks) in WINDOWS {
        let window = Window::new(tokens, sinks);
        let seq = stand.read(&prefix)?;
        let found = stand.verify(seq, &tree.clone().seen_through(window))?;
        stand.runner.close(seq);
        let mut expected: Vec<Row> = Vec::new();
        for node in tree.nodes() {
            let path = tree.path_to(node);
            let tokens = path.nodes().iter().map(|n| tree.token(*n));
            let seq = stand.read(&prefix)?;
            let mut row = Vec::new();
            for token in tokens {
                let root = Tree::root(token).seen_through(window);
                row = stand.verify(seq, &root)?;
                stand.commit(seq, &root, NodeIdx::ROOT)?;
            }
            expected.append(&mut row);
            stand.runner.close(seq);
        }
        stand.same(&format!("{window:?}"), &found, &expected)?;
    }
    Ok(())
}

/// A window hides, and only while it is looked through: what is stored stays whole.
pub(super) fn a_window_is_a_way_of_reading(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let prefix = stand.text(150, 6);
    let tree = bush(&stand)?;
    let seq = stand.read(&prefix)?;
    let full = stand.verify(seq, &tree)?;
    stand.runner.discard(seq)?;
    let narrow = tree.clone().seen_through(Window::new(64, 0));
    let hidden = stand.verify(seq, &narrow)?;
    stand.runner.discard(seq)?;
    if same_rows("", &hidden, &full, Exactness::Bits).is_ok() {
        return Err(Broken::Differs {
            what: "a window of 64 after 150 tokens".to_owned(),
            detail: "nothing was hidden".to_owned(),
        });
    }
    let again = stand.verify(seq, &tree)?;
    same_rows("after a window", &again, &full, Exactness::Bits)
}

/// Neighbours in a call each see through their own window.
pub(super) fn windows_of_a_batch_do_not_mix(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let tree = bush(&stand)?;
    let windows = [Window::new(64, 3), Window::FULL, Window::new(90, 0)];
    let trees = windows.map(|window| tree.clone().seen_through(window));
    let mut alone = Vec::new();
    let mut seqs = Vec::new();
    for (i, tree) in trees.iter().enumerate() {
        let prefix = stand.text(110 + 20 * i, 10 + i);
        let seq = stand.read(&prefix)?;
        alone.push(stand.verify(seq, tree)?);
        stand.runner.discard(seq)?;
        seqs.push(seq);
    }
    let asks = vec![contract::Ask::full(); tree.len()];
    let items: Vec<contract::VerifyItem<'_>> = seqs
        .iter()
        .zip(&trees)
        .map(|(seq, tree)| contract::VerifyItem {
            seq: *seq,
            tree,
            asks: &asks,
        })
        .collect();
    let together = stand.runner.verify(&items)?;
    for (i, (found, expected)) in together.iter().zip(&alone).enumerate() {
        stand.same(&format!("member {i} of a batch"), found, expected)?;
    }
    Ok(())
}

/// A tree with branches of several depths.
fn bush(stand: &Stand) -> Result<Tree, Broken> {
    let tokens: Vec<TokenId> = stand.text(12, 7);
    let mut tree = Tree::root(tokens[0]);
    for (i, token) in tokens.into_iter().enumerate().skip(1) {
        // A token that a sibling has already is left out.
        let parent = NodeIdx((i * 2 / 3).min(tree.len() - 1) as u16);
        let _ = tree.push(parent, token);
    }
    Ok(tree)
}
