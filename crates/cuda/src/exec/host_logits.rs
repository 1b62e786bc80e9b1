//! Logits rows computed on the host from a whole row: full rows, edited rows, and more candidates
//! than the GPU's reduction gives. Also the candidates of draft blocks.

use contract::{DraftCandidates, LogitsRequest, LogitsRow, LogitsSelection, TokenId};

/// Terms of a log-sum-exp added in f32; the runs are added in f64.
const RUN: usize = 1024;

/// The answer to `ask` from raw logits `[vocab]` and their log-sum-exp: processors applied, ranked,
/// summed where the log-sum-exp of the edited ones is not known. NaN counts as minus infinity
/// wherever it comes from.
pub(crate) fn from_logits(
    ask: &LogitsRequest,
    mut raw: Vec<f32>,
    lse: Option<f32>,
    raw_lse: f32,
) -> LogitsRow {
    clean(&mut raw);
    let edited = ask.processors.as_ref().map(|processors| {
        let mut row = raw.clone();
        processors.apply(&mut row);
        clean(&mut row);
        row
    });
    let lse = lse.unwrap_or_else(|| edited.as_deref().map_or(raw_lse, log_sum_exp));
    let values = edited.as_deref().unwrap_or(&raw);
    let ids = match ask.selection {
        LogitsSelection::None => return LogitsRow::default(),
        LogitsSelection::TopK(k) => top_k(values, k),
        LogitsSelection::Full => {
            return LogitsRow {
                ids: (0..values.len() as u32).map(TokenId).collect(),
                logits: edited.unwrap_or_else(|| raw.clone()),
                raw,
                lse,
                raw_lse,
                mass: 0.0,
            };
        }
    };
    let pick = |from: &[f32]| ids.iter().map(|id| from[id.index()]).collect();
    LogitsRow {
        logits: pick(values),
        raw: pick(&raw),
        lse,
        raw_lse,
        ids,
        mass: 0.0,
    }
}

fn clean(row: &mut [f32]) {
    for x in row.iter_mut().filter(|x| x.is_nan()) {
        *x = f32::NEG_INFINITY;
    }
}

fn log_sum_exp(row: &[f32]) -> f32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() {
        return max;
    }
    let runs = row
        .chunks(RUN)
        .map(|run| f64::from(run.iter().map(|x| (x - max).exp()).sum::<f32>()));
    max + runs.sum::<f64>().ln() as f32
}

/// The `k` largest, best first, ties to the lower id.
fn top_k(row: &[f32], k: usize) -> Vec<TokenId> {
    // Adding zero makes the two zeros one value.
    let value = |i: u32| row[i as usize] + 0.0;
    let order = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    let k = k.min(ids.len());
    if k > 0 && k < ids.len() {
        ids.select_nth_unstable_by(k - 1, order);
        ids.truncate(k);
    }
    ids.truncate(k);
    ids.sort_unstable_by(order);
    ids.into_iter().map(TokenId).collect()
}

/// The candidates of one block, a row for each position.
pub(crate) fn candidates(rows: &[LogitsRow]) -> DraftCandidates {
    let log_probs = |row: &LogitsRow| {
        let lse = row.raw_lse;
        row.raw
            .iter()
            .map(move |logit| logit - lse)
            .collect::<Vec<f32>>()
    };
    DraftCandidates {
        ids: rows
            .iter()
            .flat_map(|row| row.ids.iter().copied())
            .collect(),
        log_probs: rows.iter().flat_map(log_probs).collect(),
        lse: rows.iter().map(|row| row.raw_lse).collect(),
        k: rows.first().map_or(0, |row| row.ids.len()),
        ..DraftCandidates::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use contract::LogitsProcessors;

    use super::*;

    #[test]
    fn ties_go_to_the_lower_id_and_nan_goes_last() {
        let raw = vec![1.0, f32::NAN, 3.0, -0.0, 3.0, 0.0];
        let ids = |k| from_logits(&LogitsRequest::top_k(k), raw.clone(), None, 0.0).ids;
        assert_eq!(ids(6), [2, 4, 0, 3, 5, 1].map(TokenId));
        assert_eq!(ids(2), [2, 4].map(TokenId));
        assert_eq!(ids(99).len(), 6);
    }

    #[test]
    fn edits_change_the_order_and_leave_the_raw_values() {
        let processors = LogitsProcessors {
            bias: vec![(TokenId(0), 5.0)],
            ..LogitsProcessors::default()
        };
        let ask = LogitsRequest {
            selection: LogitsSelection::TopK(2),
            processors: Some(Arc::new(processors)),
            mass: None,
        };
        let row = from_logits(&ask, vec![1.0, 2.0, 3.0], None, 3.4);
        assert_eq!(row.ids, [0, 2].map(TokenId));
        assert_eq!((row.logits, row.raw), (vec![6.0, 3.0], vec![1.0, 3.0]));
        assert!((row.lse - (6.0 + (1.0_f32 + (-4_f32).exp() + (-3_f32).exp()).ln())).abs() < 1e-6);
        assert_eq!(row.raw_lse, 3.4);
    }
}
