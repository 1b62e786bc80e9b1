//! Laws of reading a prompt.

use contract::{Ask, Row, Runner};

use super::stand::{check, same_rows};
use super::{Broken, LIMITS, Subject};
use crate::compare::{Exactness, Tolerance};

/// However a prompt is cut at aligned places, its rows and what follows it are the same.
pub(super) fn cuts_do_not_show(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let align = stand.align();
    let n = LIMITS.prefill_chunk;
    let text = stand.text(n, 1);
    let seq = stand.open()?;
    let whole = stand.read_rows(seq, &text)?;
    let after_whole = stand.reveal(seq)?;
    stand.runner.close(seq);
    for cut in [align, 2 * align, n / align / 2 * align] {
        if cut == 0 || cut >= n {
            continue;
        }
        let seq = stand.open()?;
        let mut rows: Vec<Row> = Vec::new();
        for chunk in text.chunks(cut) {
            rows.append(&mut stand.read_rows(seq, chunk)?);
        }
        stand.same(&format!("read in chunks of {cut}"), &rows, &whole)?;
        let after = stand.reveal(seq)?;
        stand.same(
            &format!("spoken after chunks of {cut}"),
            &after,
            &after_whole,
        )?;
        stand.runner.close(seq);
    }
    Ok(())
}

/// A row is the same whether it alone is asked for, or all are, and asking leaves no trace.
pub(super) fn asking_changes_nothing(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let text = stand.text(37, 2);
    let seq = stand.open()?;
    let all = stand.read_rows(seq, &text)?;
    let after_all = stand.reveal(seq)?;
    let some = [0, 11, 36];
    let asks: Vec<(usize, Ask)> = some.iter().map(|at| (*at, Ask::full())).collect();
    let seq = stand.open()?;
    let rows = stand.runner.prefill(seq, &text, &asks)?;
    let expected: Vec<Row> = some.iter().map(|at| all[*at].clone()).collect();
    stand.same("three rows of a prompt", &rows, &expected)?;
    let after = stand.reveal(seq)?;
    stand.same("spoken after three asks", &after, &after_all)?;
    let seq = stand.open()?;
    stand.runner.prefill(seq, &text, &[])?;
    let after = stand.reveal(seq)?;
    stand.same("spoken after no ask", &after, &after_all)
}

/// A text spoken token by token gives the rows of the same text read. The two may take different routes
/// through recurrent layers, so they agree up to rounding only.
pub(super) fn reading_is_speaking(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let text = stand.text(70, 3);
    let seq = stand.open()?;
    let read = stand.read_rows(seq, &text)?;
    let seq = stand.open()?;
    let spoken = stand.speak(seq, &text)?;
    let tolerance = Tolerance::of_logits(subject.specimen.ty)
        .or(Tolerance::of_cache(subject.kv.k))
        .or(Tolerance::of_cache(subject.kv.v))
        .or(subject.routes);
    let what = "spoken instead of read";
    same_rows(what, &spoken, &read, Exactness::Within(tolerance))?;
    // Single values may be far off where activations are rounded; on the whole they may not.
    for (spoken, read) in spoken.iter().zip(&read) {
        let off = spoken.raw.iter().zip(&read.raw).map(|(s, r)| (s - r).abs());
        let mean = off.sum::<f32>() / read.raw.len().max(1) as f32;
        let most = tolerance.absolute / 4.0;
        check(mean <= most, what, || {
            format!("{mean:e} off in the mean, {most:e} allowed")
        })?;
    }
    Ok(())
}

/// Two prompts read chunk by chunk in turns are the two read alone.
pub(super) fn turns_do_not_mix(subject: &Subject<'_>) -> Result<(), Broken> {
    let mut stand = subject.open()?;
    let align = stand.align();
    let texts = [stand.text(2 * align + 9, 4), stand.text(2 * align + 5, 5)];
    let mut alone = Vec::new();
    for text in &texts {
        let seq = stand.open()?;
        for chunk in text.chunks(align) {
            stand.runner.prefill(seq, chunk, &[])?;
        }
        alone.push(stand.reveal(seq)?);
        stand.runner.close(seq);
    }
    let seqs = [stand.open()?, stand.open()?];
    for turn in 0..texts[0].len().div_ceil(align) {
        for (seq, text) in seqs.iter().zip(&texts) {
            if let Some(chunk) = text.chunks(align).nth(turn) {
                stand.runner.prefill(*seq, chunk, &[])?;
            }
        }
    }
    for (i, seq) in seqs.into_iter().enumerate() {
        let rows = stand.reveal(seq)?;
        stand.same(
            &format!("prompt {i} of two read in turns"),
            &rows,
            &alone[i],
        )?;
    }
    Ok(())
}
