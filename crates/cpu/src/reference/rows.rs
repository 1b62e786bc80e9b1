//! From a row of logits to a requested logits row.

use contract::{LogitsRequest, LogitsRow, LogitsSelection, TokenId};

/// Terms per f32 partial sum of a log-sum-exp; partial sums are added in f64.
pub const RUN: usize = 1024;

/// `ln sum e^x` of a row `[n]`. NaN counts as minus infinity; a row without finite values gives
/// minus infinity.
///
/// Adds [`RUN`] terms in index order in f32 per partial sum, and the partial sums in f64.
pub fn log_sum_exp(row: &[f32]) -> f32 {
    let max = max(row);
    if max.is_infinite() {
        return max;
    }
    let runs = row.chunks(RUN).map(|run| f64::from(sum_exp(run, max)));
    max + runs.sum::<f64>().ln() as f32
}

/// The largest value of a row `[n]`, ignoring NaN; minus infinity for none.
pub fn max(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// `sum e^(x - shift)` over `[n]` in f32, ignoring NaN.
pub fn sum_exp(row: &[f32], shift: f32) -> f32 {
    let terms = row.iter().filter(|x| !x.is_nan());
    terms.map(|x| (x - shift).exp()).sum()
}

/// The `k` largest of a row `[n]`, best first; ties go to the lower index. NaN counts as minus
/// infinity.
pub fn top_k(row: &[f32], k: usize) -> Vec<TokenId> {
    let value = |i: u32| {
        let x = row[i as usize];
        // Adding zero maps -0 to +0.
        if x.is_nan() {
            f32::NEG_INFINITY
        } else {
            x + 0.0
        }
    };
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    ids.sort_by(|&a, &b| value(b).total_cmp(&value(a)).then(a.cmp(&b)));
    ids.truncate(k);
    ids.into_iter().map(TokenId).collect()
}

/// The row that `request` selects from raw logits `[vocab]`: applies processors, ranks, and
/// computes both log-sum-exps.
pub fn row(request: &LogitsRequest, raw: &[f32]) -> LogitsRow {
    if request.selection == LogitsSelection::None {
        return LogitsRow::default();
    }
    let clean = |x: &f32| if x.is_nan() { f32::NEG_INFINITY } else { *x };
    let raw: Vec<f32> = raw.iter().map(clean).collect();
    let mut edited = raw.clone();
    if let Some(processors) = &request.processors {
        processors.apply(&mut edited);
        edited = edited.iter().map(clean).collect();
    }
    let ids = match request.selection {
        LogitsSelection::TopK(k) => top_k(&edited, k),
        _ => (0..raw.len() as u32).map(TokenId).collect(),
    };
    LogitsRow {
        logits: ids.iter().map(|id| edited[id.index()]).collect(),
        raw: ids.iter().map(|id| raw[id.index()]).collect(),
        lse: log_sum_exp(&edited),
        raw_lse: log_sum_exp(&raw),
        ids,
        mass: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_id_and_nan_goes_last() {
        let row = [1.0, f32::NAN, 3.0, -0.0, 3.0, 0.0, f32::NEG_INFINITY];
        let ids: Vec<u32> = top_k(&row, 7).iter().map(|id| id.0).collect();
        assert_eq!(ids, [2, 4, 0, 3, 5, 1, 6]);
        assert_eq!(top_k(&row, 99).len(), 7);
    }

    #[test]
    fn log_sum_exp_handles_infinities_and_nan() {
        assert_eq!(log_sum_exp(&[]), f32::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 3]), f32::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[f32::INFINITY, 1.0]), f32::INFINITY);
        let close = log_sum_exp(&[f32::NAN, 1000.0, 1000.0]) - (1000.0 + 2f32.ln());
        assert!(close.abs() < 1e-3);
    }
}
