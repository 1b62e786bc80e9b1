//! Properties of the calling protocol: the device itself refuses invalid calls, without
//! [`CheckedRunner`].

use contract::{
    CommitItem, DeviceError, LogitsRequest, NodeIdx, Runner, SeqId, SnapshotId, SnapshotLocation,
    TokenId, Tree, VerifyItem,
};

use super::rig::check;
use super::{Case, Failure, LIMITS};

/// Fails unless `result` is an invalid call whose message contains `part`.
fn expect_invalid_call<T>(
    what: &str,
    result: Result<T, DeviceError>,
    part: &str,
) -> Result<(), Failure> {
    match result.err() {
        Some(DeviceError::InvalidCall { detail, .. }) if detail.contains(part) => Ok(()),
        other => check(false, what, || {
            format!("{other:?} instead of misuse: {part}")
        }),
    }
}

/// Every invalid call is refused with its reason and changes nothing.
pub(super) fn invalid_calls_are_refused(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let vocab = rig.runner.info().vocab;
    let text = rig.text(11, 40);
    let tree = Tree::chain(&text[..4])?;
    let requests = vec![LogitsRequest::full(); 4];
    let undisturbed = rig.prefill(&text[..5])?;
    let expected = rig.verify(undisturbed, &tree)?;
    let runner = rig.runner.inner_mut();
    let seq = runner.open(10)?;
    runner.prefill(seq, &text[..5], &[])?;

    let beyond = [TokenId(vocab as u32)];
    let read = runner.prefill(seq, &beyond, &[]);
    expect_invalid_call("prefilling no token", read, &vocab.to_string())?;
    let read = runner.prefill(seq, &text[..6], &[]);
    expect_invalid_call("prefilling too much", read, "10 tokens")?;
    let late = [(1, LogitsRequest::full())];
    let read = runner.prefill(seq, &text[..1], &late);
    expect_invalid_call("an request behind the prompt", read, "requests")?;
    let twice = [(0, LogitsRequest::full()), (0, LogitsRequest::full())];
    let read = runner.prefill(seq, &text[..1], &twice);
    expect_invalid_call("two requests at one place", read, "requests")?;
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    expect_invalid_call("one tree twice", runner.verify(&[item, item]), "twice")?;
    let few = VerifyItem {
        requests: &requests[..3],
        ..item
    };
    expect_invalid_call("too few requests", runner.verify(&[few]), "3 requests")?;
    let wide: Vec<TokenId> = (0..=LIMITS.tree_nodes as u32).map(TokenId).collect();
    let wide_asks = vec![LogitsRequest::NONE; wide.len()];
    let wide = Tree::new(&wide, &vec![NodeIdx::ROOT; wide.len() - 1])?;
    let wide = VerifyItem {
        seq,
        tree: &wide,
        requests: &wide_asks,
    };
    expect_invalid_call("too wide a tree", runner.verify(&[wide]), "nodes of")?;
    let strange = Tree::root(beyond[0]);
    let strange = VerifyItem {
        seq,
        tree: &strange,
        requests: &requests[..1],
    };
    expect_invalid_call("a tree of no token", runner.verify(&[strange]), "beyond")?;
    expect_invalid_call("discarding nothing", runner.discard(seq), "nothing pending")?;

    let found = runner.verify(&[item])?.pop().unwrap_or_default();
    expect_invalid_call("a second tree", runner.verify(&[item]), "pending")?;
    let read = runner.prefill(seq, &text[..1], &[]);
    expect_invalid_call("prefilling beside a tree", read, "pending")?;
    let saved = runner.snapshot(seq, SnapshotLocation::Host);
    expect_invalid_call("saving beside a tree", saved, "pending")?;
    let path = tree.path_to(NodeIdx(3));
    let item = CommitItem { seq, path: &path };
    expect_invalid_call("a path twice", runner.commit(&[item, item]), "twice")?;
    runner.commit(&[item])?;
    expect_invalid_call("a second commit", runner.commit(&[item]), "nothing pending")?;
    if runner.info().draft_depth.is_none() {
        expect_invalid_call(
            "drafting without a draft",
            runner.draft(&[], 1, 1),
            "no draft",
        )?;
    }
    runner.close(SeqId(u64::MAX));
    runner.free_snapshot(SnapshotId(u64::MAX));
    rig.same("a tree among broken calls", &found, &expected)
}

/// A sequence accepts exactly `max_len` tokens, by any call.
pub(super) fn max_len_is_the_exact_limit(case: &Case<'_>) -> Result<(), Failure> {
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
    // A tree may exceed `max_len`; only committed nodes count.
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
    expect_invalid_call("a path beyond the end", runner.commit(&[item]), "10 tokens")?;
    let last = tree.path_to(NodeIdx::ROOT);
    runner.commit(&[CommitItem { seq, path: &last }])?;
    let read = runner.prefill(seq, &text[..1], &[]);
    expect_invalid_call("prefilling beyond the end", read, "10 tokens")?;
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    expect_invalid_call("a tree behind the end", runner.verify(&[item]), "full")
}
