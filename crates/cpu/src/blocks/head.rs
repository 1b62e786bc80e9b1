//! The LM head: logits of the requested rows, and the results of their requests.

use contract::{LogitsRequest, LogitsRow, LogitsSelection, TokenId};

use crate::linear::Linear;
use crate::pass::ExecContext;
use crate::reference::rows::RUN;

/// Rows of logits that are in memory at once.
pub(crate) const HEAD_ROWS: usize = 16;

/// Buffers of the head, reused by all passes.
#[derive(Default)]
pub(crate) struct HeadBuffers {
    /// `[HEAD_ROWS, hidden]`.
    inputs: Vec<f32>,
    /// `[HEAD_ROWS, vocab]`.
    logits: Vec<f32>,
    /// `[vocab]`: the row after its logits processors.
    edited: Vec<f32>,
    /// `[2, vocab / RUN]`: maxima and sums of runs.
    runs: Vec<f32>,
}

/// A row of a pass with a logits request.
#[derive(Clone, Copy)]
pub(crate) struct AskedRow<'a> {
    pub(crate) row: usize,
    pub(crate) ask: &'a LogitsRequest,
}

/// Floats of the buffers.
pub(crate) fn buffer_floats(hidden: usize, vocab: usize) -> usize {
    HEAD_ROWS * (hidden + vocab) + vocab + 2 * vocab.div_ceil(RUN)
}

/// The requested rows, in order. `y` `[n, hidden]` is the residual stream after the final norm.
pub(crate) fn rows(
    compute: ExecContext<'_>,
    head: &Linear,
    y: &[f32],
    asked: &[AskedRow<'_>],
    buffers: &mut HeadBuffers,
) -> Vec<LogitsRow> {
    let (hidden, vocab) = (head.cols(), head.rows());
    let mut rows = Vec::with_capacity(asked.len());
    for asked in asked.chunks(HEAD_ROWS) {
        let n = asked.len();
        grow(&mut buffers.inputs, n * hidden);
        grow(&mut buffers.logits, n * vocab);
        let inputs = &mut buffers.inputs[..n * hidden];
        for (input, asked) in inputs.chunks_exact_mut(hidden).zip(asked) {
            input.copy_from_slice(&y[asked.row * hidden..][..hidden]);
        }
        let logits = &mut buffers.logits[..n * vocab];
        head.apply(compute.pool, inputs, n, logits);
        if let [asked] = asked {
            grow(&mut buffers.runs, 2 * vocab.div_ceil(RUN));
            let mut ranking = Ranking::new(compute, &mut buffers.runs, vocab);
            rows.push(ranking.row(asked.ask, logits, &mut buffers.edited));
            continue;
        }
        let asks = asked.iter().map(|asked| asked.ask);
        rows.extend(rank(compute, asks, logits));
    }
    rows
}

/// The results of requests for rows of logits `[n, vocab]`, ranked in parallel, each by one thread.
pub(crate) fn rank<'a>(
    compute: ExecContext<'_>,
    asks: impl ExactSizeIterator<Item = &'a LogitsRequest>,
    logits: &[f32],
) -> Vec<LogitsRow> {
    let mut rows = vec![LogitsRow::default(); asks.len()];
    let vocab = logits.len() / rows.len().max(1);
    let items: Vec<_> = rows
        .iter_mut()
        .zip(asks)
        .zip(logits.chunks_exact(vocab.max(1)))
        .collect();
    compute
        .pool
        .for_each_item(items.into_iter(), |((row, ask), logits)| {
            let runs = 2 * vocab.div_ceil(RUN);
            compute.scratch.with(runs, |runs| {
                let mut ranking = Ranking::new(compute, runs, vocab);
                *row = ranking.row(ask, logits, &mut Vec::new());
            });
        });
    rows
}

/// Grows a buffer to at least `len` values.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

/// Ranks rows of logits in runs of [`RUN`] values, with the results of [`crate::reference::rows`].
struct Ranking<'a> {
    compute: ExecContext<'a>,
    maxima: &'a mut [f32],
    sums: &'a mut [f32],
}

impl<'a> Ranking<'a> {
    /// `runs` holds `[2, vocab / RUN]` values.
    fn new(compute: ExecContext<'a>, runs: &'a mut [f32], vocab: usize) -> Ranking<'a> {
        let (maxima, rest) = runs.split_at_mut(vocab.div_ceil(RUN));
        Ranking {
            compute,
            sums: &mut rest[..maxima.len()],
            maxima,
        }
    }

    fn row(&mut self, ask: &LogitsRequest, raw: &[f32], edited: &mut Vec<f32>) -> LogitsRow {
        if ask.selection == LogitsSelection::None {
            return LogitsRow::default();
        }
        let raw_lse = match &ask.processors {
            None => None,
            Some(processors) => {
                edited.clear();
                edited.extend_from_slice(raw);
                processors.apply(edited);
                Some(self.log_sum_exp(raw))
            }
        };
        let values = if raw_lse.is_some() { &**edited } else { raw };
        let lse = self.log_sum_exp(values);
        let ids = match ask.selection {
            LogitsSelection::TopK(k) => self.top_k(values, k),
            _ => (0..values.len() as u32).map(TokenId).collect(),
        };
        let pick = |from: &[f32]| ids.iter().map(|id| clean(from[id.index()])).collect();
        LogitsRow {
            logits: pick(values),
            raw: pick(raw),
            lse,
            raw_lse: raw_lse.unwrap_or(lse),
            ids,
            mass: 0.0,
        }
    }

    /// Stores the maximum of each run for [`Ranking::top_k`].
    fn log_sum_exp(&mut self, row: &[f32]) -> f32 {
        let kernels = self.compute.kernels;
        self.by_run(row, false, |run| (kernels.max)(run));
        let max = (kernels.max)(self.maxima);
        if max.is_infinite() {
            return max;
        }
        self.by_run(row, true, |run| (kernels.sum_exp)(run, max));
        let sum: f64 = self.sums.iter().map(|&sum| f64::from(sum)).sum();
        max + sum.ln() as f32
    }

    /// Writes `work` of each run to the sums or the maxima, in parallel.
    fn by_run(&mut self, row: &[f32], sums: bool, work: impl Fn(&[f32]) -> f32 + Sync) {
        /// Runs of one parallel item.
        const RUNS: usize = 16;
        let into = if sums {
            &mut *self.sums
        } else {
            &mut *self.maxima
        };
        let items = into.chunks_mut(RUNS).zip(row.chunks(RUNS * RUN));
        self.compute.pool.for_each_item(items, |(into, row)| {
            for (into, run) in into.iter_mut().zip(row.chunks(RUN)) {
                *into = work(run);
            }
        });
    }

    /// The `k` best of a row, from its run maxima. Only runs that can contain one of them are read.
    fn top_k(&self, row: &[f32], k: usize) -> Vec<TokenId> {
        let k = k.min(row.len());
        let better = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let mut order: Vec<usize> = (0..self.maxima.len()).collect();
        order.sort_by(|&a, &b| self.maxima[b].total_cmp(&self.maxima[a]).then(a.cmp(&b)));
        let mut best: Vec<(f32, u32)> = Vec::with_capacity(k + RUN);
        // Values below the floor cannot be among the `k` best.
        let mut floor = f32::NEG_INFINITY;
        let mut full = false;
        for run in order {
            if full && self.maxima[run] < floor {
                break;
            }
            let begin = run * RUN;
            for (i, &x) in row[begin..row.len().min(begin + RUN)].iter().enumerate() {
                // Adding zero makes the two zeros one value.
                let x = clean(x) + 0.0;
                if !full || x >= floor {
                    best.push((x, (begin + i) as u32));
                }
            }
            if best.len() >= k {
                if best.len() > k {
                    best.select_nth_unstable_by(k - 1, better);
                    best.truncate(k);
                }
                floor = best.iter().map(|b| b.0).fold(f32::INFINITY, f32::min);
                full = true;
            }
        }
        best.sort_unstable_by(better);
        best.into_iter().map(|(_, id)| TokenId(id)).collect()
    }
}

/// Maps NaN to minus infinity.
fn clean(x: f32) -> f32 {
    if x.is_nan() { f32::NEG_INFINITY } else { x }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use contract::{LogitsProcessors, TokenMask};
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::Kernels;
    use crate::reference;
    use crate::scratch::ScratchPool;
    use crate::thread_pool::ThreadPool;

    fn rank(ask: &LogitsRequest, raw: &[f32]) -> LogitsRow {
        let (pool, scratch) = (ThreadPool::new(2), ScratchPool::default());
        let compute = ExecContext {
            pool: &pool,
            kernels: &Kernels::scalar(),
            scratch: &scratch,
            norm_eps: 1e-6,
        };
        let mut runs = vec![0.0; 2 * raw.len().div_ceil(RUN)];
        let mut ranking = Ranking::new(compute, &mut runs, raw.len());
        ranking.row(ask, raw, &mut Vec::new())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn ranking_equals_the_reference(
            n in 1_usize..5000, k in 1_usize..200, kinds in 1_u64..40, seed: u32, edit: bool,
        ) {
            // Few distinct values, so that ties and special values are common.
            let value = |i: usize| {
                let h = (i as u64 + 1).wrapping_mul(u64::from(seed) | 1);
                let h = h.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
                match h % kinds {
                    7 => f32::NAN,
                    8 => f32::NEG_INFINITY,
                    9 => -0.0,
                    x => x as f32 * 0.5 - 4.0,
                }
            };
            let raw: Vec<f32> = (0..n).map(value).collect();
            let mut allowed = TokenMask::all(n);
            allowed.remove(TokenId(0));
            let processors = LogitsProcessors {
                allowed: Some(Arc::new(allowed)),
                bias: vec![(TokenId(n as u32 / 2), 1.5)],
                ..LogitsProcessors::default()
            };
            let selections =
                [LogitsSelection::None, LogitsSelection::TopK(k), LogitsSelection::Full];
            for selection in selections {
                let processors = edit.then(|| Arc::new(processors.clone()));
                let ask = LogitsRequest {
                    selection,
                    processors,
                    mass: None,
                };
                prop_assert_eq!(rank(&ask, &raw), reference::rows::row(&ask, &raw));
            }
        }
    }
}
