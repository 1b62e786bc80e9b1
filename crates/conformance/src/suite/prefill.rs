//! Properties of prefill.

use contract::{LogitsRequest, LogitsRow, Runner};

use super::rig::{check, same_rows};
use super::{Case, Failure, LIMITS};
use crate::compare::{Precision, Tolerance};

/// Chunks that end at aligned positions change neither the rows nor later results.
pub(super) fn aligned_chunks_change_nothing(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let align = rig.align();
    let n = LIMITS.prefill_chunk;
    let text = rig.text(n, 1);
    let seq = rig.open()?;
    let whole = rig.prefill_rows(seq, &text)?;
    let after_whole = rig.probe(seq)?;
    rig.runner.close(seq);
    for cut in [align, 2 * align, n / align / 2 * align] {
        if cut == 0 || cut >= n {
            continue;
        }
        let seq = rig.open()?;
        let mut rows: Vec<LogitsRow> = Vec::new();
        for chunk in text.chunks(cut) {
            rows.append(&mut rig.prefill_rows(seq, chunk)?);
        }
        rig.same(&format!("prefilled in chunks of {cut}"), &rows, &whole)?;
        let after = rig.probe(seq)?;
        rig.same(
            &format!("decoded after chunks of {cut}"),
            &after,
            &after_whole,
        )?;
        rig.runner.close(seq);
    }
    Ok(())
}

/// A row does not depend on other requested rows, and requests change no later result.
pub(super) fn logits_requests_change_nothing(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let text = rig.text(37, 2);
    let seq = rig.open()?;
    let all = rig.prefill_rows(seq, &text)?;
    let after_all = rig.probe(seq)?;
    let some = [0, 11, 36];
    let requests: Vec<(usize, LogitsRequest)> =
        some.iter().map(|at| (*at, LogitsRequest::full())).collect();
    let seq = rig.open()?;
    let rows = rig.runner.prefill(seq, &text, &requests)?;
    let expected: Vec<LogitsRow> = some.iter().map(|at| all[*at].clone()).collect();
    rig.same("three rows of a prompt", &rows, &expected)?;
    let after = rig.probe(seq)?;
    rig.same("decoded after three requests", &after, &after_all)?;
    let seq = rig.open()?;
    rig.runner.prefill(seq, &text, &[])?;
    let after = rig.probe(seq)?;
    rig.same("decoded after no request", &after, &after_all)
}

/// A text decoded token by token gives the rows of the same text read. The two may take different
/// routes through recurrent layers, so they agree up to rounding only.
pub(super) fn prefill_equals_decode(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let text = rig.text(70, 3);
    let seq = rig.open()?;
    let read = rig.prefill_rows(seq, &text)?;
    let seq = rig.open()?;
    let decoded = rig.decode(seq, &text)?;
    let tolerance = Tolerance::of_logits(case.model.ty)
        .or(Tolerance::of_cache(case.kv.k))
        .or(Tolerance::of_cache(case.kv.v))
        .or(case.prefill_tolerance);
    let what = "decoded instead of read";
    let close = |decoded: &LogitsRow, read: &LogitsRow| -> Result<(), Failure> {
        let rows = [decoded, read].map(std::slice::from_ref);
        same_rows(what, rows[0], rows[1], Precision::Within(tolerance))?;
        // With quantized activations single values may differ much, but not the mean.
        let values = decoded.raw.iter().zip(&read.raw);
        let mean = values.map(|(s, r)| (s - r).abs()).sum::<f32>() / read.raw.len().max(1) as f32;
        let most = tolerance.absolute / 4.0;
        check(mean <= most, what, || {
            format!("{mean:e} off on average, {most:e} allowed")
        })
    };
    check(decoded.len() == read.len(), what, || {
        format!("{} rows, {} read", decoded.len(), read.len())
    })?;
    // Rounding chooses other experts in the few rows whose router is nearly level.
    let mut layers = case.model.spec.layers.iter();
    let excused = if layers.any(|layer| layer.ffn.experts().is_some()) {
        text.len() / 10
    } else {
        0
    };
    let rows = decoded.iter().zip(&read);
    let mut failures = rows.filter_map(|(decoded, read)| close(decoded, read).err());
    failures.nth(excused).map_or(Ok(()), Err)
}

/// Two prompts with interleaved prefill chunks give the rows of each alone.
pub(super) fn interleaved_prefills_are_independent(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let align = rig.align();
    let texts = [rig.text(2 * align + 9, 4), rig.text(2 * align + 5, 5)];
    let mut alone = Vec::new();
    for text in &texts {
        let seq = rig.open()?;
        for chunk in text.chunks(align) {
            rig.runner.prefill(seq, chunk, &[])?;
        }
        alone.push(rig.probe(seq)?);
        rig.runner.close(seq);
    }
    let seqs = [rig.open()?, rig.open()?];
    for turn in 0..texts[0].len().div_ceil(align) {
        for (seq, text) in seqs.iter().zip(&texts) {
            if let Some(chunk) = text.chunks(align).nth(turn) {
                rig.runner.prefill(*seq, chunk, &[])?;
            }
        }
    }
    for (i, seq) in seqs.into_iter().enumerate() {
        let rows = rig.probe(seq)?;
        rig.same(
            &format!("prompt {i} of two read in turns"),
            &rows,
            &alone[i],
        )?;
    }
    Ok(())
}
