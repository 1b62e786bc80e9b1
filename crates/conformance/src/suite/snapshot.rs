//! Laws of saved states.

use contract::{DeviceError, Limits, Place, Runner, SeqId, SnapshotInfo};

use super::stand::{Stand, check};
use super::{Broken, LIMITS, Subject};

/// Two sequences that together have room for fewer rows than the states of a few conversations.
const CONVERSATIONS: Limits = Limits {
    sequences: 2,
    context: 512,
    ..LIMITS
};

/// A state worth saving: read, then spoken.
fn saved(stand: &mut Stand, salt: usize, place: Place) -> Result<(SeqId, SnapshotInfo), Broken> {
    let (prompt, words) = (stand.text(35, salt), stand.text(7, salt + 1));
    let seq = stand.read(&prompt)?;
    stand.speak(seq, &words)?;
    let info = stand.runner.snapshot(seq, place)?;
    let expected = prompt.len() + words.len();
    check(info.position == expected, "a snapshot's position", || {
        format!("{} instead of {expected}", info.position)
    })?;
    Ok((seq, info))
}

/// Restoring puts a sequence, whatever it held, where it was saved, as often as one likes.
pub(super) fn restoring_is_identity(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    for place in [Place::Device, Place::Host] {
        let (seq, info) = saved(&mut stand, 21, place)?;
        let expected = stand.reveal(seq)?;
        for _ in 0..2 {
            stand.runner.restore(seq, info.id)?;
            let found = stand.reveal(seq)?;
            stand.same("restored where it was saved", &found, &expected)?;
        }
        let other = stand.read(&stand.text(50, 23))?;
        stand.runner.restore(other, info.id)?;
        let found = stand.reveal(other)?;
        stand.same("restored over another sequence", &found, &expected)?;
        let fresh = stand.open()?;
        stand.runner.restore(fresh, info.id)?;
        let found = stand.reveal(fresh)?;
        stand.same("restored into a fresh sequence", &found, &expected)?;
        for seq in [seq, other, fresh] {
            stand.runner.close(seq);
        }
        stand.runner.free_snapshot(info.id);
    }
    // A state without a token is one too.
    let seq = stand.open()?;
    let info = stand.runner.snapshot(seq, Place::Device)?;
    let expected = stand.reveal(seq)?;
    stand.runner.restore(seq, info.id)?;
    let found = stand.reveal(seq)?;
    stand.same("restored to the beginning", &found, &expected)
}

/// A snapshot stays what it was, whatever becomes of the sequence it was taken of.
pub(super) fn a_snapshot_is_a_copy(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let (seq, info) = saved(&mut stand, 24, Place::Device)?;
    let expected = stand.reveal(seq)?;
    stand.speak(seq, &stand.text(9, 26))?;
    let other = stand.open()?;
    stand.runner.restore(other, info.id)?;
    let found = stand.reveal(other)?;
    stand.same("restored while the origin moved on", &found, &expected)?;
    stand.runner.close(seq);
    stand.runner.restore(other, info.id)?;
    let found = stand.reveal(other)?;
    stand.same("restored after the origin was closed", &found, &expected)
}

fn exported(stand: &mut Stand, info: SnapshotInfo) -> Result<Vec<u8>, Broken> {
    let mut bytes = Vec::new();
    stand.runner.export(info.id, &mut bytes)?;
    Ok(bytes)
}

/// What is exported and imported restores to the same state, in another runner too, and is exported again as
/// the same bytes.
pub(super) fn travel_is_identity(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let (seq, info) = saved(&mut stand, 27, Place::Device)?;
    let bytes = exported(&mut stand, info)?;
    let expected = stand.reveal(seq)?;
    let mut elsewhere = subject.open()?;
    for stand in [&mut stand, &mut elsewhere] {
        let imported = stand.runner.import(&mut &bytes[..])?;
        check(
            imported.position == info.position,
            "an imported position",
            || format!("{} instead of {}", imported.position, info.position),
        )?;
        let seq = stand.open()?;
        stand.runner.restore(seq, imported.id)?;
        let found = stand.reveal(seq)?;
        stand.same("restored after a journey", &found, &expected)?;
        let again = exported(stand, imported)?;
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

/// Cut or flipped bytes are refused as such, and nothing breaks.
pub(super) fn damage_is_refused(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let (seq, info) = saved(&mut stand, 29, Place::Host)?;
    let bytes = exported(&mut stand, info)?;
    let refused = |stand: &mut Stand, what: String, bytes: &[u8]| {
        let result = stand.runner.import(&mut &bytes[..]);
        let refused = matches!(result, Err(DeviceError::SnapshotRefused { .. }));
        check(refused, &what, || {
            format!("{result:?} instead of a refusal")
        })
    };
    for part in 0..16 {
        let cut = bytes.len() * part / 16;
        refused(
            &mut stand,
            format!("a snapshot cut at {cut}"),
            &bytes[..cut],
        )?;
    }
    refused(
        &mut stand,
        "the last byte missing".to_owned(),
        &bytes[..bytes.len() - 1],
    )?;
    let mut flip = |at: usize| {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        refused(&mut stand, format!("byte {at} flipped"), &bad)
    };
    // The head: what it is, its layout, its model, its formats, its position.
    for at in (0..44).step_by(3).chain(44..52) {
        flip(at)?;
    }
    // The content, which checksums guard.
    for part in 1..16 {
        flip(60 + (bytes.len() - 61) * part / 15)?;
    }
    let expected = stand.reveal(seq)?;
    stand.runner.restore(seq, info.id)?;
    let found = stand.reveal(seq)?;
    stand.same("spoken after refused snapshots", &found, &expected)
}

/// A snapshot that was freed, or never was, cannot be restored or exported; freeing it again is nothing.
pub(super) fn what_was_freed_is_gone(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let (seq, info) = saved(&mut stand, 31, Place::Device)?;
    stand.runner.free_snapshot(info.id);
    stand.runner.free_snapshot(info.id);
    let runner = stand.runner.inner_mut();
    let restored = runner.restore(seq, info.id);
    let gone = |result: &Result<(), DeviceError>| matches!(result, Err(DeviceError::UnknownSnapshot(id)) if *id == info.id);
    check(gone(&restored), "restoring what was freed", || {
        format!("{restored:?}")
    })?;
    let exported = runner.export(info.id, &mut Vec::new());
    check(gone(&exported), "exporting what was freed", || {
        format!("{exported:?}")
    })
}

/// Conversations with one beginning, read on from its state and taken up in turn, say what each says alone, also
/// when their states together hold more than the sequences have room for.
pub(super) fn conversations_do_not_mix(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open_with(CONVERSATIONS)?;
    let head = stand.text(256, 40);
    let tails: Vec<_> = (0..5).map(|i| stand.text(200 - i, 41 + i)).collect();
    let seq = stand.read(&head)?;
    let begun = stand.runner.snapshot(seq, Place::Host)?;
    let mut seqs = vec![seq];
    let mut saved = Vec::new();
    for (i, tail) in tails.iter().enumerate() {
        // The one before goes on speaking while this one is read.
        if let [first, _] = seqs[..] {
            stand.runner.close(first);
            seqs.remove(0);
        }
        let seq = stand.open()?;
        stand.runner.restore(seq, begun.id)?;
        for chunk in tail.chunks(LIMITS.prefill_chunk) {
            stand.runner.prefill(seq, chunk, &[])?;
            stand.reveal(seqs[0])?;
        }
        let info = stand.runner.snapshot(seq, Place::Host)?;
        let words = stand.text(6, 50 + i);
        saved.push((info, stand.speak(seq, &words)?));
        seqs.push(seq);
    }
    for round in 0..2 {
        for (i, (info, expected)) in saved.iter().enumerate() {
            let (words, seq) = (stand.text(6, 50 + i), seqs[(round + i) % 2]);
            // Once every other state is given up, the rest are what they were.
            if round == 1 && i % 2 == 1 {
                stand.runner.free_snapshot(info.id);
                continue;
            }
            stand.runner.restore(seq, info.id)?;
            let found = stand.speak(seq, &words)?;
            stand.same("a conversation taken up again", &found, expected)?;
        }
    }
    // And it is what the same text says that was read from its beginning.
    let mut alone = subject.open_with(CONVERSATIONS)?;
    let seq = alone.read(&head)?;
    for chunk in tails[4].chunks(LIMITS.prefill_chunk) {
        alone.runner.prefill(seq, chunk, &[])?;
    }
    let words = alone.text(6, 54);
    let found = alone.speak(seq, &words)?;
    stand.same(
        "a conversation read from its beginning",
        &found,
        &saved[4].1,
    )
}
