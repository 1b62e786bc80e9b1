//! Properties of the returned logits rows.

use std::sync::Arc;

use contract::{
    LogitsProcessors, LogitsRequest, LogitsRow, LogitsSelection, Runner, SeqId, TokenCount,
    TokenId, TokenMask, Tree, VerifyItem,
};

use super::rig::{Rig, check};
use super::{Case, Failure};
use crate::compare::{Tolerance, compare, same_bits};
use crate::fake::{log_sum_exp, ranked};

/// Logits processors that use every kind at once.
fn all_processors(vocab: usize) -> LogitsProcessors {
    let mut allowed = TokenMask::all(vocab);
    (0..vocab as u32)
        .step_by(5)
        .for_each(|id| allowed.remove(TokenId(id)));
    let count = |token, seen, generated| TokenCount {
        token: TokenId(token),
        seen,
        generated,
    };
    LogitsProcessors {
        allowed: Some(Arc::new(allowed)),
        bias: vec![(TokenId(3), 2.5), (TokenId(5), 9.0), (TokenId(8), -4.0)],
        repetition: 1.3,
        frequency: 0.2,
        presence: 0.4,
        counts: vec![
            count(3, true, 2),
            count(4, true, 0),
            count(6, false, 3),
            count(10, true, 1),
        ],
    }
}

fn requests(vocab: usize) -> Vec<(&'static str, Option<Arc<LogitsProcessors>>)> {
    let bias_only = LogitsProcessors {
        bias: vec![(TokenId(7), 3.0)],
        ..LogitsProcessors::default()
    };
    vec![
        ("no processors", None),
        ("a bias", Some(Arc::new(bias_only))),
        ("every edit", Some(Arc::new(all_processors(vocab)))),
    ]
}

/// One row from a prefill and the same row from a verify.
fn rows(rig: &mut Rig, request: &LogitsRequest) -> Result<[LogitsRow; 2], Failure> {
    let text = rig.text(10, 33);
    let mut row = |request: &LogitsRequest, by_verify: bool| -> Result<LogitsRow, Failure> {
        let seq: SeqId = rig.open()?;
        let found = if by_verify {
            rig.runner.prefill(seq, &text[..9], &[])?;
            let tree = Tree::root(text[9]);
            let requests = [request.clone()];
            let item = VerifyItem {
                seq,
                tree: &tree,
                requests: &requests,
            };
            rig.runner.verify(&[item])?.pop().unwrap_or_default()
        } else {
            rig.runner.prefill(seq, &text, &[(9, request.clone())])?
        };
        rig.runner.close(seq);
        check(found.len() == 1, "rows for one request", || {
            found.len().to_string()
        })?;
        Ok(found.into_iter().next().unwrap_or_default())
    };
    Ok([row(request, false)?, row(request, true)?])
}

/// A top-k row has the best tokens in order, ties to the lower id, with the values of the full row.
pub(super) fn top_k_equals_best_of_full(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let vocab = rig.runner.info().vocab;
    for (name, processors) in requests(vocab) {
        let request = |selection| LogitsRequest {
            selection,
            processors: processors.clone(),
            mass: None,
        };
        let full = rows(&mut rig, &request(LogitsSelection::Full))?;
        for k in [1, 2, 20, vocab - 1] {
            let top = rows(&mut rig, &request(LogitsSelection::TopK(k)))?;
            for (top, full) in top.iter().zip(&full) {
                let what = format!("the best {k} with {name}");
                let ids = ranked(&full.logits, k);
                check(top.ids == ids, &what, || {
                    format!("{:?} instead of {ids:?}", top.ids)
                })?;
                let expected = LogitsRow {
                    logits: ids.iter().map(|id| full.logits[id.index()]).collect(),
                    raw: ids.iter().map(|id| full.raw[id.index()]).collect(),
                    ids,
                    ..*full
                };
                rig.same(&what, std::slice::from_ref(top), &[expected])?;
            }
        }
    }
    Ok(())
}

/// The edited logits of a full row are the raw ones with the processors applied as the contract
/// does, bit for bit, and the raw ones are those of an ask without processors.
pub(super) fn logit_edits_match_the_reference(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let vocab = rig.runner.info().vocab;
    let plain = rows(&mut rig, &LogitsRequest::full())?;
    for (name, processors) in requests(vocab) {
        let request = LogitsRequest {
            selection: LogitsSelection::Full,
            processors: processors.clone(),
            mass: None,
        };
        let edited = rows(&mut rig, &request)?;
        for (row, plain) in edited.iter().zip(&plain) {
            let differs = |what: &str, result: Result<(), crate::compare::Difference>| {
                result.map_err(|difference| Failure::Differs {
                    what: format!("{what} with {name}"),
                    detail: difference.to_string(),
                })
            };
            let ids = row.ids.iter().enumerate();
            let in_order = row.ids.len() == vocab && ids.clone().all(|(i, id)| id.index() == i);
            check(in_order, "a full row", || {
                "its ids do not count up".to_owned()
            })?;
            differs("raw logits", same_bits(&row.raw, &plain.raw))?;
            let mut expected = row.raw.clone();
            if let Some(processors) = &processors {
                processors.apply(&mut expected);
            }
            differs("edited logits", same_bits(&row.logits, &expected))?;
        }
    }
    // Requests that select nothing return empty rows.
    let text = rig.text(3, 34);
    let seq = rig.prefill(&text)?;
    let tree = Tree::chain(&text)?;
    let requests = [
        LogitsRequest::NONE,
        LogitsRequest::top_k(2),
        LogitsRequest::NONE,
    ];
    let item = VerifyItem {
        seq,
        tree: &tree,
        requests: &requests,
    };
    let rows = rig.runner.verify(&[item])?.pop().unwrap_or_default();
    let lengths: Vec<usize> = rows.iter().map(|row| row.ids.len()).collect();
    check(
        lengths == [0, 2, 0],
        "rows of nothing, two and nothing",
        || format!("{lengths:?} tokens"),
    )
}

/// Both log-sum-exps cover the whole row, whatever part of it is returned.
pub(super) fn log_sum_exps_cover_the_whole_row(case: &Case<'_>) -> Result<(), Failure> {
    let mut rig = case.open()?;
    let vocab = rig.runner.info().vocab;
    for (name, processors) in requests(vocab) {
        for selection in [LogitsSelection::Full, LogitsSelection::TopK(3)] {
            let full = LogitsRequest {
                selection: LogitsSelection::Full,
                processors: processors.clone(),
                mass: None,
            };
            let request = LogitsRequest {
                selection,
                processors: processors.clone(),
                mass: None,
            };
            let found = rows(&mut rig, &request)?;
            let whole = rows(&mut rig, &full)?;
            for (row, whole) in found.iter().zip(&whole) {
                let sums = [row.lse, row.raw_lse];
                let expected = [log_sum_exp(&whole.logits), log_sum_exp(&whole.raw)];
                compare(&sums, &expected, Tolerance::REORDERED).map_err(|difference| {
                    Failure::Differs {
                        what: format!("log-sum-exps, edited and raw, with {name}"),
                        detail: difference.to_string(),
                    }
                })?;
            }
        }
    }
    Ok(())
}
