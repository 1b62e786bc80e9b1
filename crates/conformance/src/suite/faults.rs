//! Laws of refusals: what does not fit is refused, and nobody is the worse for it.

use contract::{DeviceError, Runner, SeqId, SnapshotId, SnapshotLocation, Tree};

use super::rig::check;
use super::{Case, Failure, LIMITS};

/// Every place can be opened, one more is refused, and closing gives back exactly what was taken.
pub(super) fn room_comes_back(case: &Case<'_>) -> Result<(), Failure> {
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

/// Calls that name nothing, or ask for more than was opened, are refused without touching anyone.
pub(super) fn a_refusal_changes_nothing(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let text = rig.text(20, 36);
    let seq = rig.read(&text)?;
    let expected = rig.reveal(seq)?;
    let seq = rig.read(&text)?;
    let nobody = SeqId(u64::MAX);
    let tree = Tree::root(text[0]);
    // Beneath the guard, which would answer these by itself.
    let runner = rig.runner.inner_mut();
    let unknown = |result: Result<(), DeviceError>, what: &str| {
        let refused = matches!(result, Err(DeviceError::UnknownSequence(id)) if id == nobody);
        check(refused, what, || format!("{result:?}"))
    };
    unknown(
        runner.prefill(nobody, &text, &[]).map(|_| ()),
        "reading into nobody",
    )?;
    unknown(
        runner
            .snapshot(nobody, SnapshotLocation::Device)
            .map(|_| ()),
        "saving nobody",
    )?;
    unknown(runner.discard(nobody), "discarding for nobody")?;
    let requests = [contract::LogitsRequest::top_k(1)];
    let item = contract::VerifyItem {
        seq: nobody,
        tree: &tree,
        requests: &requests,
    };
    unknown(runner.verify(&[item]).map(|_| ()), "verifying for nobody")?;
    runner.close(nobody);
    let restored = runner.restore(seq, SnapshotId(u64::MAX));
    check(
        matches!(restored, Err(DeviceError::UnknownSnapshot(_))),
        "restoring nothing",
        || format!("{restored:?}"),
    )?;
    let short = rig.runner.open(text.len() + 1)?;
    rig.runner.prefill(short, &text, &[])?;
    // Beneath the guard again: the device itself must refuse, and stay as it was.
    let runner = rig.runner.inner_mut();
    let longer = runner.prefill(short, &text[..2], &[]);
    check(longer.is_err(), "reading more than was opened for", || {
        "it was taken".to_owned()
    })?;
    let saved = rig.runner.snapshot(seq, SnapshotLocation::Host)?;
    let narrow = rig.runner.open(text.len() - 1)?;
    let restored = rig.runner.inner_mut().restore(narrow, saved.id);
    check(
        restored.is_err(),
        "restoring more than was opened for",
        || "it was taken".to_owned(),
    )?;
    rig.runner.close(narrow);
    let found = rig.speak(short, &rig.text(1, 90))?;
    rig.same("spoken after a refused prompt", &found, &expected[..1])?;
    let found = rig.reveal(seq)?;
    rig.same("spoken after the refusals", &found, &expected)
}
