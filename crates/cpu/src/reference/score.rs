//! Scores of a prompt's tokens: the choice of key blocks, and what becomes of attention weights.
//!
//! The formulas are those of [`contract::scorer`].

use std::cmp::Ordering;

use contract::BlockSparsity;

/// Which key blocks `0..=m` query block `m` of `n_blocks` keeps; `lse` is `[m + 1]`.
pub fn kept_blocks(lse: &[f32], n_blocks: usize, sparsity: BlockSparsity) -> Vec<bool> {
    let m = lse.len() - 1;
    let best = lse.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // The logarithm of 0 is minus infinity, so that an alpha of 0 keeps every block.
    let least = best + sparsity.alpha.ln();
    let is_dense = m + sparsity.dense_last_blocks >= n_blocks;
    (0..=m)
        .map(|n| {
            let always = is_dense || n < sparsity.sink_blocks || m - n < sparsity.window_blocks;
            // A NaN keeps its block.
            always || lse[n].partial_cmp(&least) != Some(Ordering::Less)
        })
        .collect()
}

/// `ln sum e^x` of each column of `scores` `[rows, n]`, in row order.
pub fn column_lse(scores: &[f32], n: usize) -> Vec<f32> {
    let mut max = vec![f32::NEG_INFINITY; n];
    for row in scores.chunks_exact(n) {
        for (max, score) in max.iter_mut().zip(row) {
            *max = max.max(*score);
        }
    }
    let mut sum = vec![0.0_f32; n];
    for row in scores.chunks_exact(n) {
        for ((sum, max), score) in sum.iter_mut().zip(&max).zip(row) {
            *sum += (score - max).exp();
        }
    }
    max.iter()
        .zip(sum)
        .map(|(max, sum)| max + sum.ln())
        .collect()
}

/// Raises `best` `[n]` to the softmax of `logits` `[n]` where that is larger; `logits` becomes the
/// softmax numerators.
pub fn raise_to_softmax(logits: &mut [f32], best: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return;
    }
    // In f64, since a long prompt sums many small numbers.
    let mut sum = 0.0_f64;
    for logit in &mut *logits {
        *logit = if logit.is_nan() {
            0.0
        } else {
            (*logit - max).exp()
        };
        sum += f64::from(*logit);
    }
    let factor = (1.0 / sum) as f32;
    for (best, weight) in best.iter_mut().zip(logits) {
        *best = best.max(*weight * factor);
    }
}

/// Mean over the rows of `best` `[tail, n]`, smoothed over `width` tokens and pooled in chunks of
/// `chunk`: `[ceil(n / chunk)]`.
pub fn chunk_scores(best: &[f32], n: usize, width: usize, chunk: usize) -> Vec<f32> {
    let tail = best.len() / n.max(1);
    let mut mean = vec![0.0_f64; n];
    for row in best.chunks_exact(n.max(1)) {
        for (mean, value) in mean.iter_mut().zip(row) {
            *mean += f64::from(*value) / tail as f64;
        }
    }
    let reach = width / 2;
    let smooth: Vec<f64> = (0..n)
        .map(|at| {
            let range = at.saturating_sub(reach)..(at + reach + 1).min(n);
            let len = range.len() as f64;
            mean[range].iter().sum::<f64>() / len
        })
        .collect();
    let pooled = smooth.chunks(chunk);
    pooled
        .map(|chunk| (chunk.iter().sum::<f64>() / chunk.len() as f64) as f32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPARSITY: BlockSparsity = BlockSparsity {
        sink_blocks: 1,
        window_blocks: 2,
        dense_last_blocks: 1,
        alpha: 0.5,
    };

    fn kept(lse: &[f32], n_blocks: usize, sparsity: BlockSparsity) -> Vec<usize> {
        let kept = kept_blocks(lse, n_blocks, sparsity);
        (0..kept.len()).filter(|n| kept[*n]).collect()
    }

    #[test]
    fn sinks_window_and_heavy_blocks_are_kept() {
        // The threshold is 3 - ln 2 = 2.31.
        let lse = [0.0, 2.3, 2.4, 3.0, 0.0, 0.0];
        assert_eq!(kept(&lse, 9, SPARSITY), [0, 2, 3, 4, 5]);
    }

    #[test]
    fn last_blocks_and_an_alpha_of_zero_keep_all() {
        let lse = [0.0, -50.0, 9.0, 0.0];
        assert_eq!(kept(&lse, 4, SPARSITY), [0, 1, 2, 3]);
        assert_eq!(kept(&lse, 9, BlockSparsity::DENSE), [0, 1, 2, 3]);
        assert_eq!(kept(&[f32::NAN; 4], 9, SPARSITY), [0, 1, 2, 3]);
    }

    #[test]
    fn column_sums_are_those_of_exponentials() {
        let lse = column_lse(&[1.0, 200.0, 2.0, 200.0], 2);
        assert!((lse[0] - (1_f32.exp() + 2_f32.exp()).ln()).abs() < 1e-6);
        assert!((lse[1] - (200.0 + 2_f32.ln())).abs() < 1e-4);
    }

    #[test]
    fn the_largest_weight_of_any_head_stays() {
        let mut best = [0.6, 0.0, 0.0];
        raise_to_softmax(&mut [0.0, 0.0, f32::NEG_INFINITY], &mut best);
        assert_eq!(best, [0.6, 0.5, 0.0]);
        raise_to_softmax(&mut [f32::NEG_INFINITY; 3], &mut best);
        assert_eq!(best, [0.6, 0.5, 0.0]);
    }

    #[test]
    fn smoothing_is_centred_and_the_last_chunk_is_a_mean_of_what_it_has() {
        // Two tail rows whose mean is 0 0 3 0 0.
        let best = [0.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(chunk_scores(&best, 5, 1, 2), [0.0, 1.5, 0.0]);
        assert_eq!(chunk_scores(&best, 5, 3, 1), [0.0, 1.0, 1.0, 1.0, 0.0]);
        assert_eq!(chunk_scores(&best, 5, 5, 1), [1.0, 0.75, 0.6, 0.75, 1.0]);
        assert_eq!(chunk_scores(&[], 0, 3, 2), Vec::<f32>::new());
    }
}
