//! Properties of snapshots.

use contract::{DeviceError, Limits, Runner, SeqId, SnapshotId, SnapshotInfo, SnapshotLocation};

use super::rig::{Rig, check};
use super::{Case, Failure, LIMITS};

/// Two sequences with fewer pages than the snapshots of a few conversations need.
const CONVERSATIONS: Limits = Limits {
    sequences: 2,
    context: 512,
    ..LIMITS
};

/// A state after prefill and decode.
fn saved(
    rig: &mut Rig,
    salt: usize,
    location: SnapshotLocation,
) -> Result<(SeqId, SnapshotInfo), Failure> {
    let (prompt, words) = (rig.text(35, salt), rig.text(7, salt + 1));
    let seq = rig.prefill(&prompt)?;
    rig.decode(seq, &words)?;
    let info = rig.runner.snapshot(seq, location)?;
    let expected = prompt.len() + words.len();
    check(info.position == expected, "a snapshot's position", || {
        format!("{} instead of {expected}", info.position)
    })?;
    Ok((seq, info))
}

/// Restore puts any sequence into the saved state, any number of times.
pub(super) fn restore_is_bit_identical(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    for location in [SnapshotLocation::Device, SnapshotLocation::Host] {
        let (seq, info) = saved(&mut rig, 21, location)?;
        let expected = rig.probe(seq)?;
        for _ in 0..2 {
            rig.runner.restore(seq, info.id)?;
            let found = rig.probe(seq)?;
            rig.same("restored where it was saved", &found, &expected)?;
        }
        let other = rig.prefill(&rig.text(50, 23))?;
        rig.runner.restore(other, info.id)?;
        let found = rig.probe(other)?;
        rig.same("restored over another sequence", &found, &expected)?;
        let fresh = rig.open()?;
        rig.runner.restore(fresh, info.id)?;
        let found = rig.probe(fresh)?;
        rig.same("restored into a fresh sequence", &found, &expected)?;
        for seq in [seq, other, fresh] {
            rig.runner.close(seq);
        }
        rig.runner.free_snapshot(info.id);
    }
    // The empty state is a state too.
    let seq = rig.open()?;
    let info = rig.runner.snapshot(seq, SnapshotLocation::Device)?;
    let expected = rig.probe(seq)?;
    rig.runner.restore(seq, info.id)?;
    let found = rig.probe(seq)?;
    rig.same("restored to the beginning", &found, &expected)
}

/// A snapshot does not change with the sequence that it came from.
pub(super) fn snapshots_are_copies(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let (seq, info) = saved(&mut rig, 24, SnapshotLocation::Device)?;
    let expected = rig.probe(seq)?;
    rig.decode(seq, &rig.text(9, 26))?;
    let other = rig.open()?;
    rig.runner.restore(other, info.id)?;
    let found = rig.probe(other)?;
    rig.same("restored while the origin moved on", &found, &expected)?;
    rig.runner.close(seq);
    rig.runner.restore(other, info.id)?;
    let found = rig.probe(other)?;
    rig.same("restored after the origin was closed", &found, &expected)
}

fn exported(rig: &mut Rig, info: SnapshotInfo) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    rig.runner.export(info.id, &mut bytes)?;
    Ok(bytes)
}

/// An exported snapshot restores to the same state, also in another runner, and its second export
/// has the same bytes.
pub(super) fn import_of_export_is_bit_identical(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let (seq, info) = saved(&mut rig, 27, SnapshotLocation::Device)?;
    let bytes = exported(&mut rig, info)?;
    let expected = rig.probe(seq)?;
    let mut elsewhere = case.open()?;
    for rig in [&mut rig, &mut elsewhere] {
        let imported = rig.runner.import(&mut &bytes[..])?;
        check(
            imported.position == info.position,
            "an imported position",
            || format!("{} instead of {}", imported.position, info.position),
        )?;
        let seq = rig.open()?;
        rig.runner.restore(seq, imported.id)?;
        let found = rig.probe(seq)?;
        rig.same("restored after a journey", &found, &expected)?;
        let again = exported(rig, imported)?;
        check(again == bytes, "bytes exported a second time", || {
            let at = again.iter().zip(&bytes).position(|(a, b)| a != b);
            format!(
                "{} bytes of {}, first other at {at:?}",
                again.len(),
                bytes.len()
            )
        })?;
    }
    Ok(())
}

/// Truncated or bit-flipped bytes are refused without side effects.
pub(super) fn damaged_snapshots_are_refused(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let (seq, info) = saved(&mut rig, 29, SnapshotLocation::Host)?;
    let bytes = exported(&mut rig, info)?;
    let refused = |rig: &mut Rig, what: String, bytes: &[u8]| {
        let result = rig.runner.import(&mut &bytes[..]);
        let refused = matches!(result, Err(DeviceError::InvalidSnapshot { .. }));
        check(refused, &what, || {
            format!("{result:?} instead of a refusal")
        })
    };
    for part in 0..16 {
        let cut = bytes.len() * part / 16;
        refused(&mut rig, format!("a snapshot cut at {cut}"), &bytes[..cut])?;
    }
    refused(
        &mut rig,
        "the last byte missing".to_owned(),
        &bytes[..bytes.len() - 1],
    )?;
    let mut flip = |at: usize| {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        refused(&mut rig, format!("byte {at} flipped"), &bad)
    };
    // The header: magic number, layout version, model, formats, position.
    for at in (0..44).step_by(3).chain(44..52) {
        flip(at)?;
    }
    // The content, which checksums protect.
    for part in 1..16 {
        flip(60 + (bytes.len() - 61) * part / 15)?;
    }
    let expected = rig.probe(seq)?;
    rig.runner.restore(seq, info.id)?;
    let found = rig.probe(seq)?;
    rig.same("decoded after refused snapshots", &found, &expected)
}

/// A freed or unknown snapshot cannot be restored or exported; freeing it again has no effect.
pub(super) fn freed_snapshots_are_unknown(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let (seq, info) = saved(&mut rig, 31, SnapshotLocation::Device)?;
    rig.runner.free_snapshot(info.id);
    rig.runner.free_snapshot(info.id);
    let runner = rig.runner.inner_mut();
    let restored = runner.restore(seq, info.id);
    check(
        is_unknown(&restored, info.id),
        "restoring what was freed",
        || format!("{restored:?}"),
    )?;
    let exported = runner.export(info.id, &mut Vec::new());
    check(
        is_unknown(&exported, info.id),
        "exporting what was freed",
        || format!("{exported:?}"),
    )
}

fn is_unknown(result: &Result<(), DeviceError>, snapshot: SnapshotId) -> bool {
    matches!(result, Err(DeviceError::UnknownSnapshot(id)) if *id == snapshot)
}

/// Conversations with a shared prefix, restored from its snapshot and continued in turn, give the
/// rows that each gives alone, even if their snapshots exceed the pool.
pub(super) fn shared_prefixes_are_independent(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open_with(CONVERSATIONS)?;
    let head = rig.text(256, 40);
    let tails: Vec<_> = (0..5).map(|i| rig.text(200 - i, 41 + i)).collect();
    let seq = rig.prefill(&head)?;
    let begun = rig.runner.snapshot(seq, SnapshotLocation::Host)?;
    let mut seqs = vec![seq];
    let mut saved = Vec::new();
    for (i, tail) in tails.iter().enumerate() {
        // The previous conversation decodes while this one is prefilled.
        if let [first, _] = seqs[..] {
            rig.runner.close(first);
            seqs.remove(0);
        }
        let seq = rig.open()?;
        rig.runner.restore(seq, begun.id)?;
        for chunk in tail.chunks(LIMITS.prefill_chunk) {
            rig.runner.prefill(seq, chunk, &[])?;
            rig.probe(seqs[0])?;
        }
        let info = rig.runner.snapshot(seq, SnapshotLocation::Host)?;
        let words = rig.text(6, 50 + i);
        saved.push((info, rig.decode(seq, &words)?));
        seqs.push(seq);
    }
    for round in 0..2 {
        for (i, (info, expected)) in saved.iter().enumerate() {
            let (words, seq) = (rig.text(6, 50 + i), seqs[(round + i) % 2]);
            // Free every other snapshot; the others stay intact.
            if round == 1 && i % 2 == 1 {
                rig.runner.free_snapshot(info.id);
                continue;
            }
            rig.runner.restore(seq, info.id)?;
            let found = rig.decode(seq, &words)?;
            rig.same("a conversation taken up again", &found, expected)?;
        }
    }
    // The same text, prefilled from its beginning, gives the same rows.
    let mut alone = case.open_with(CONVERSATIONS)?;
    let seq = alone.prefill(&head)?;
    for chunk in tails[4].chunks(LIMITS.prefill_chunk) {
        alone.runner.prefill(seq, chunk, &[])?;
    }
    let words = alone.text(6, 54);
    let found = alone.decode(seq, &words)?;
    rig.same(
        "a conversation read from its beginning",
        &found,
        &saved[4].1,
    )
}
