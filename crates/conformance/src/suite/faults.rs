//! Properties of refusals: calls that do not fit are refused without side effects.

use contract::{DeviceError, Runner, SeqId, SnapshotId, SnapshotLocation, Tree};

use super::rig::check;
use super::{Case, Failure, LIMITS};

/// All slots can be opened, one more is refused, and closing returns exactly the capacity taken.
pub(super) fn closing_returns_capacity(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let empty = rig.runner.capacity();
    let enough = empty.sequences == LIMITS.sequences && empty.tokens >= LIMITS.context;
    check(enough, "the room of an empty runner", || {
        format!("{empty:?}")
    })?;
    let longer = rig.runner.open(LIMITS.context + 1);
    check(
        matches!(longer, Err(DeviceError::OutOfMemory { .. })),
        "opening for more than the context",
        || format!("{longer:?}"),
    )?;
    for round in 0..2 {
        let mut seqs: Vec<SeqId> = Vec::new();
        for _ in 0..LIMITS.sequences {
            let before = rig.runner.capacity();
            seqs.push(rig.open()?);
            let after = rig.runner.capacity();
            let taken = after.sequences + 1 == before.sequences && after.tokens <= before.tokens;
            check(taken, "room after an open", || {
                format!("{after:?} after {before:?} in round {round}")
            })?;
        }
        let more = rig.runner.open(1);
        check(
            matches!(more, Err(DeviceError::OutOfMemory { .. })),
            "opening one sequence too many",
            || format!("{more:?}"),
        )?;
        let text = rig.text(6, 35);
        for (i, seq) in seqs.iter().enumerate() {
            rig.runner.prefill(*seq, &text, &[])?;
            if i % 2 == 0 {
                rig.verify(*seq, &Tree::root(text[0]))?;
            }
        }
        seqs.into_iter().for_each(|seq| rig.runner.close(seq));
        let found = rig.runner.capacity();
        check(found == empty, "room after everything was closed", || {
            format!("{found:?} instead of {empty:?} in round {round}")
        })?;
    }
    Ok(())
}

/// Calls with unknown ids or beyond `max_len` are refused and change nothing.
pub(super) fn refused_calls_change_nothing(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let text = rig.text(20, 36);
    let seq = rig.prefill(&text)?;
    let expected = rig.probe(seq)?;
    let seq = rig.prefill(&text)?;
    let unknown_seq = SeqId(u64::MAX);
    let tree = Tree::root(text[0]);
    // Bypasses `CheckedRunner`, which would refuse these itself.
    let runner = rig.runner.inner_mut();
    let unknown = |result: Result<(), DeviceError>, what: &str| {
        let refused = matches!(result, Err(DeviceError::UnknownSequence(id)) if id == unknown_seq);
        check(refused, what, || format!("{result:?}"))
    };
    unknown(
        runner.prefill(unknown_seq, &text, &[]).map(|_| ()),
        "prefilling an unknown sequence",
    )?;
    unknown(
        runner
            .snapshot(unknown_seq, SnapshotLocation::Device)
            .map(|_| ()),
        "saving an unknown sequence",
    )?;
    unknown(
        runner.discard(unknown_seq),
        "discarding for an unknown sequence",
    )?;
    let requests = [contract::LogitsRequest::top_k(1)];
    let item = contract::VerifyItem {
        seq: unknown_seq,
        tree: &tree,
        requests: &requests,
    };
    unknown(
        runner.verify(&[item]).map(|_| ()),
        "verifying for an unknown sequence",
    )?;
    runner.close(unknown_seq);
    let restored = runner.restore(seq, SnapshotId(u64::MAX));
    check(
        matches!(restored, Err(DeviceError::UnknownSnapshot(_))),
        "restoring nothing",
        || format!("{restored:?}"),
    )?;
    let short = rig.runner.open(text.len() + 1)?;
    rig.runner.prefill(short, &text, &[])?;
    // Bypasses `CheckedRunner` again: the device itself must refuse and stay unchanged.
    let runner = rig.runner.inner_mut();
    let longer = runner.prefill(short, &text[..2], &[]);
    check(
        longer.is_err(),
        "prefilling more than was opened for",
        || "it was taken".to_owned(),
    )?;
    let saved = rig.runner.snapshot(seq, SnapshotLocation::Host)?;
    let narrow = rig.runner.open(text.len() - 1)?;
    let restored = rig.runner.inner_mut().restore(narrow, saved.id);
    check(
        restored.is_err(),
        "restoring more than was opened for",
        || "it was taken".to_owned(),
    )?;
    rig.runner.close(narrow);
    let found = rig.decode(short, &rig.text(1, 90))?;
    rig.same("decoded after a refused prompt", &found, &expected[..1])?;
    let found = rig.probe(seq)?;
    rig.same("decoded after the refusals", &found, &expected)
}
