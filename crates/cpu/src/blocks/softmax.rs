//! Online softmax over blocks of keys, without storing all scores.
//!
//! With running maximum `m`, sum `l` and output `o` of a row, a block of scores `s` and values `V`
//! updates
//! ```text
//! m' = max(m, max s);   l = l e^(m - m') + sum e^(s - m');   o = o e^(m - m') + e^(s - m') V
//! ```
//! At the end `o` is divided by `l`. Blocks begin at absolute positions, which fixes the order of
//! every sum.

use crate::kernels::Kernels;

/// Keys of a block.
pub(crate) const BLOCK: usize = 64;

/// The running softmax of `m` rows.
pub(crate) struct Running<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    /// `[m, dim]`.
    out: &'a mut [f32],
}

impl<'a> Running<'a> {
    /// An empty softmax. `stats` is `[2, m]`, `out` is `[m, dim]`; their content is overwritten.
    pub(crate) fn new(stats: &'a mut [f32], out: &'a mut [f32]) -> Running<'a> {
        let (max, sum) = stats.split_at_mut(stats.len() / 2);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        out.fill(0.0);
        Running { max, sum, out }
    }

    /// A range of the rows.
    pub(crate) fn part(&mut self, rows: std::ops::Range<usize>) -> Running<'_> {
        let dim = self.out.len() / self.sum.len();
        Running {
            max: &mut self.max[rows.clone()],
            sum: &mut self.sum[rows.clone()],
            out: &mut self.out[rows.start * dim..rows.end * dim],
        }
    }

    /// Adds `n` keys: `scores` `[m, n]` becomes the weights, `values` is `[n, dim]`.
    ///
    /// A score of minus infinity or NaN has weight zero.
    pub(crate) fn absorb(
        &mut self,
        kernels: &Kernels,
        scores: &mut [f32],
        values: &[f32],
        n: usize,
    ) {
        let dim = values.len() / n;
        for (i, scores) in scores.chunks_exact_mut(n).enumerate() {
            let max = (kernels.max)(scores).max(self.max[i]);
            if max == f32::NEG_INFINITY {
                scores.fill(0.0);
                continue;
            }
            if max > self.max[i] {
                let shrink = (self.max[i] - max).exp();
                self.sum[i] *= shrink;
                for o in &mut self.out[i * dim..][..dim] {
                    *o *= shrink;
                }
                self.max[i] = max;
            }
            self.sum[i] += (kernels.exp_sum)(scores, max);
        }
        (kernels.accumulate)(scores, values, dim, self.out);
    }

    /// Adds to each row a key of score `sink(row)` without a value.
    pub(crate) fn absorb_sinks(&mut self, sink: impl Fn(usize) -> f32) {
        let dim = self.out.len() / self.sum.len();
        for i in 0..self.sum.len() {
            let sink = sink(i);
            if sink > self.max[i] {
                let shrink = (self.max[i] - sink).exp();
                self.sum[i] *= shrink;
                for o in &mut self.out[i * dim..][..dim] {
                    *o *= shrink;
                }
                self.max[i] = sink;
            }
            self.sum[i] += (sink - self.max[i]).exp();
        }
    }

    /// Divides by the sums. A row without visible keys stays zero.
    pub(crate) fn finish(self) {
        let dim = self.out.len() / self.sum.len();
        for (sum, out) in self.sum.iter().zip(self.out.chunks_exact_mut(dim)) {
            if *sum > 0.0 {
                let factor = 1.0 / sum;
                for o in out {
                    *o *= factor;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::attention::attend;

    #[test]
    fn sinks_take_their_share_of_each_row() {
        let scores = [0.5_f32, -1.0, 2.0];
        for sink in [-3.0, 0.0, 5.0] {
            let (mut stats, mut out) = ([0.0; 2], [0.0; 1]);
            let mut running = Running::new(&mut stats, &mut out);
            running.absorb(&Kernels::scalar(), &mut scores.clone(), &[1.0; 3], 3);
            running.absorb_sinks(|_| sink);
            running.finish();
            let log_sum = scores.iter().map(|s| s.exp()).sum::<f32>().ln();
            let expected = crate::reference::draft::sink_factor(log_sum, sink);
            assert!(
                (out[0] - expected).abs() < 1e-6,
                "{sink}: {} {expected}",
                out[0]
            );
        }
    }

    #[test]
    fn online_softmax_matches_the_reference_for_any_block_size() {
        let (n, dim) = (37, 8);
        let noise = |i: usize| ((i * 2_654_435_761) % 1013) as f32 / 200.0 - 2.5;
        let q: Vec<f32> = (0..dim).map(noise).collect();
        let keys: Vec<f32> = (0..n * dim).map(|i| noise(i + 91)).collect();
        let values: Vec<f32> = (0..n * dim).map(|i| noise(i + 777)).collect();
        let mut expected = vec![0.0; dim];
        attend(&q, &keys, &values, 0.3, &mut expected);
        for block in [1, 5, 36, 37] {
            let (mut stats, mut out) = ([0.0; 2], vec![0.0; dim]);
            let mut running = Running::new(&mut stats, &mut out);
            for begin in (0..n).step_by(block) {
                let rows = begin * dim..n.min(begin + block) * dim;
                let dot = |key: &[f32]| crate::reference::matmul::dot(&q, key) * 0.3;
                let mut scores: Vec<f32> = keys[rows.clone()].chunks(dim).map(dot).collect();
                let len = scores.len();
                running.absorb(&Kernels::scalar(), &mut scores, &values[rows], len);
            }
            running.finish();
            for (a, b) in out.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-5, "{block}: {a} {b}");
            }
        }
    }
}
