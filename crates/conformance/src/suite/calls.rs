//! Laws of the calling protocol: what is called wrongly is answered by the device itself, without the guard.

use contract::{
    CommitItem, DeviceError, LogitsRequest, NodeIdx, Runner, SeqId, SnapshotId, SnapshotLocation,
    TokenId, Tree, VerifyItem,
};

use super::rig::check;
use super::{Case, Failure, LIMITS};

/// Asks that `result` is a refusal for misuse whose words contain `part`.
fn misused<T>(what: &str, result: Result<T, DeviceError>, part: &str) -> Result<(), Failure> {
    match result.err() {
        Some(DeviceError::InvalidCall { detail, .. }) if detail.contains(part) => Ok(()),
        other => check(false, what, || {
            format!("{other:?} instead of misuse: {part}")
        }),
    }
}

/// Every broken call is refused as invalid_call, with the reason, and the sequence goes on as if it had not been made.
pub(super) fn a_broken_call_is_answered(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let vocab = rig.runner.info().vocab;
    let text = rig.text(11, 40);
    let tree = Tree::chain(&text[..4])?;
    let requests = vec![LogitsRequest::full(); 4];
    let undisturbed = rig.read(&text[..5])?;
    let expected = rig.verify(undisturbed, &tree)?;
    let runner = rig.runner.inner_mut();
    let seq = runner.open(10)?;
    runner.prefill(seq, &text[..5], &[])?;

    let beyond = [TokenId(vocab as u32)];
    let read = runner.prefill(seq, &beyond, &[]);
    misused("reading no token", read, &vocab.to_string())?;
    let read = runner.prefill(seq, &text[..6], &[]);
    misused("reading too much", read, "10 tokens")?;
    let late = [(1, LogitsRequest::full())];
    let read = runner.prefill(seq, &text[..1], &late);
    misused("an ask behind the prompt", read, "requests")?;
    let twice = [(0, LogitsRequest::full()), (0, LogitsRequest::full())];
    let read = runner.prefill(seq, &text[..1], &twice);
    misused("two requests at one place", read, "requests")?;
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    misused("one tree twice", runner.verify(&[item, item]), "twice")?;
    let few = VerifyItem {
        requests: &requests[..3],
        ..item
    };
    misused("too few requests", runner.verify(&[few]), "3 requests")?;
    let wide: Vec<TokenId> = (0..=LIMITS.tree_nodes as u32).map(TokenId).collect();
    let wide_asks = vec![LogitsRequest::NONE; wide.len()];
    let wide = Tree::new(&wide, &vec![NodeIdx::ROOT; wide.len() - 1])?;
    let wide = VerifyItem {
        seq,
        tree: &wide,
        requests: &wide_asks,
    };
    misused("too wide a tree", runner.verify(&[wide]), "nodes of")?;
    let strange = Tree::root(beyond[0]);
    let strange = VerifyItem {
        seq,
        tree: &strange,
        requests: &requests[..1],
    };
    misused("a tree of no token", runner.verify(&[strange]), "beyond")?;
    misused("discarding nothing", runner.discard(seq), "nothing pending")?;

    let found = runner.verify(&[item])?.pop().unwrap_or_default();
    misused("a second tree", runner.verify(&[item]), "pending")?;
    let read = runner.prefill(seq, &text[..1], &[]);
    misused("reading beside a tree", read, "pending")?;
    let saved = runner.snapshot(seq, SnapshotLocation::Host);
    misused("saving beside a tree", saved, "pending")?;
    let path = tree.path_to(NodeIdx(3));
    let item = CommitItem { seq, path: &path };
    misused("a path twice", runner.commit(&[item, item]), "twice")?;
    runner.commit(&[item])?;
    misused("a second commit", runner.commit(&[item]), "nothing pending")?;
    if runner.info().draft_depth.is_none() {
        misused(
            "drafting without a draft",
            runner.draft(&[], 1, 1),
            "no draft",
        )?;
    }
    runner.close(SeqId(u64::MAX));
    runner.free_snapshot(SnapshotId(u64::MAX));
    rig.same("a tree among broken calls", &found, &expected)
}

/// A sequence takes tokens up to the length it was opened for, by whichever call, and not one more.
pub(super) fn the_last_token_is_the_last(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let text = rig.text(9, 41);
    let tree = Tree::chain(&rig.text(4, 42))?;
    let runner = rig.runner.inner_mut();
    let seq = runner.open(10)?;
    runner.prefill(seq, &text, &[])?;
    let requests = vec![LogitsRequest::top_k(2); 4];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    // A tree may reach beyond the end; only what is kept counts.
    let rows = runner.verify(&[item])?.pop().unwrap_or_default();
    check(
        rows.iter().all(|row| row.ids.len() == 2),
        "rows beyond the end",
        || format!("{} rows", rows.len()),
    )?;
    let too_far = tree.path_to(NodeIdx(1));
    let item = CommitItem {
        seq,
        path: &too_far,
    };
    misused("a path beyond the end", runner.commit(&[item]), "10 tokens")?;
    let last = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &last }])?;
    let read = runner.prefill(seq, &text[..1], &[]);
    misused("reading beyond the end", read, "10 tokens")?;
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    misused("a tree behind the end", runner.verify(&[item]), "full")
}
