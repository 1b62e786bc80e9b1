//! Laws of refusals: what does not fit is refused, and nobody is the worse for it.

use contract::{DeviceError, Place, Runner, SeqId, SnapshotId, Tree};

use super::stand::check;
use super::{Broken, LIMITS, Subject};

/// Every place can be opened, one more is refused, and closing gives back exactly what was taken.
pub(super) fn room_comes_back(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let empty = stand.runner.room();
    let enough = empty.sequences == LIMITS.sequences && empty.tokens >= LIMITS.context;
    check(enough, "the room of an empty runner", || {
        format!("{empty:?}")
    })?;
    let longer = stand.runner.open(LIMITS.context + 1);
    check(
        matches!(longer, Err(DeviceError::NoRoom { .. })),
        "opening for more than the context",
        || format!("{longer:?}"),
    )?;
    for round in 0..2 {
        let mut seqs: Vec<SeqId> = Vec::new();
        for _ in 0..LIMITS.sequences {
            let before = stand.runner.room();
            seqs.push(stand.open()?);
            let after = stand.runner.room();
            let taken = after.sequences + 1 == before.sequences && after.tokens <= before.tokens;
            check(taken, "room after an open", || {
                format!("{after:?} after {before:?} in round {round}")
            })?;
        }
        let more = stand.runner.open(1);
        check(
            matches!(more, Err(DeviceError::NoRoom { .. })),
            "opening one sequence too many",
            || format!("{more:?}"),
        )?;
        let text = stand.text(6, 35);
        for (i, seq) in seqs.iter().enumerate() {
            stand.runner.prefill(*seq, &text, &[])?;
            if i % 2 == 0 {
                stand.verify(*seq, &Tree::root(text[0]))?;
            }
        }
        seqs.into_iter().for_each(|seq| stand.runner.close(seq));
        let found = stand.runner.room();
        check(found == empty, "room after everything was closed", || {
            format!("{found:?} instead of {empty:?} in round {round}")
        })?;
    }
    Ok(())
}

/// Calls that name nothing, or ask for more than was opened, are refused without touching anyone.
pub(super) fn a_refusal_changes_nothing(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let text = stand.text(20, 36);
    let seq = stand.read(&text)?;
    let expected = stand.reveal(seq)?;
    let seq = stand.read(&text)?;
    let nobody = SeqId(u64::MAX);
    let tree = Tree::root(text[0]);
    // Beneath the guard, which would answer these by itself.
    let runner = stand.runner.inner_mut();
    let unknown = |result: Result<(), DeviceError>, what: &str| {
        let refused = matches!(result, Err(DeviceError::UnknownSequence(id)) if id == nobody);
        check(refused, what, || format!("{result:?}"))
    };
    unknown(
        runner.prefill(nobody, &text, &[]).map(|_| ()),
        "reading into nobody",
    )?;
    unknown(
        runner.snapshot(nobody, Place::Device).map(|_| ()),
        "saving nobody",
    )?;
    unknown(runner.discard(nobody), "discarding for nobody")?;
    let asks = [contract::Ask::top(1)];
    let item = contract::VerifyItem {
        seq: nobody,
        tree: &tree,
        asks: &asks,
    };
    unknown(runner.verify(&[item]).map(|_| ()), "verifying for nobody")?;
    runner.close(nobody);
    let restored = runner.restore(seq, SnapshotId(u64::MAX));
    check(
        matches!(restored, Err(DeviceError::UnknownSnapshot(_))),
        "restoring nothing",
        || format!("{restored:?}"),
    )?;
    let short = stand.runner.open(text.len() + 1)?;
    stand.runner.prefill(short, &text, &[])?;
    // Beneath the guard again: the device itself must refuse, and stay as it was.
    let runner = stand.runner.inner_mut();
    let longer = runner.prefill(short, &text[..2], &[]);
    check(longer.is_err(), "reading more than was opened for", || {
        "it was taken".to_owned()
    })?;
    let saved = stand.runner.snapshot(seq, Place::Host)?;
    let narrow = stand.runner.open(text.len() - 1)?;
    let restored = stand.runner.inner_mut().restore(narrow, saved.id);
    check(
        restored.is_err(),
        "restoring more than was opened for",
        || "it was taken".to_owned(),
    )?;
    stand.runner.close(narrow);
    let found = stand.speak(short, &stand.text(1, 90))?;
    stand.same("spoken after a refused prompt", &found, &expected[..1])?;
    let found = stand.reveal(seq)?;
    stand.same("spoken after the refusals", &found, &expected)
}
