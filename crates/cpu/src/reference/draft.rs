//! Attention of a block-diffusion draft: each row attends to the committed context and to its own
//! block.

use super::attention::attend;

/// Attention mask of a block.
#[derive(Debug, Clone, Copy)]
pub struct DraftMask {
    /// A query at position `q` sees a key at position `k` if `q - k < window`.
    pub window: usize,
    /// Whether a row sees only itself and earlier rows of its block.
    pub causal: bool,
}

impl DraftMask {
    /// Whether the row at position `q` sees the context key at position `k < q`.
    pub fn sees_context(self, q: usize, k: usize) -> bool {
        q - k < self.window
    }

    /// Whether row `row` of a block sees row `other` of it.
    pub fn sees_row(self, row: usize, other: usize) -> bool {
        other <= row || !self.causal
    }

    /// The first context position that any row of a block at `committed` sees.
    pub fn first(self, committed: usize) -> usize {
        (committed + 1).saturating_sub(self.window)
    }
}

/// One head: `out[i] = softmax(scale q[i] · K^T) V` over the visible keys of row `i`, context
/// first.
///
/// `q`, `block_keys`, `block_values` and `out` are `[block, dim]`, row `i` at position `committed +
/// i`; `keys` and `values` are `[n, dim]`, the context at positions `committed - n ..`.
pub fn attend_block(
    q: &[f32],
    (keys, values): (&[f32], &[f32]),
    (block_keys, block_values): (&[f32], &[f32]),
    (dim, committed, scale): (usize, usize, f32),
    mask: DraftMask,
    out: &mut [f32],
) {
    let first = committed - keys.len() / dim;
    for (i, (q, out)) in q
        .chunks_exact(dim)
        .zip(out.chunks_exact_mut(dim))
        .enumerate()
    {
        let (mut seen_keys, mut seen_values) = (Vec::new(), Vec::new());
        for (at, key) in keys.chunks_exact(dim).enumerate() {
            if mask.sees_context(committed + i, first + at) {
                seen_keys.extend_from_slice(key);
                seen_values.extend_from_slice(&values[at * dim..][..dim]);
            }
        }
        for (row, key) in block_keys.chunks_exact(dim).enumerate() {
            if mask.sees_row(i, row) {
                seen_keys.extend_from_slice(key);
                seen_values.extend_from_slice(&block_values[row * dim..][..dim]);
            }
        }
        attend(q, &seen_keys, &seen_values, scale, out);
    }
}

/// One row of a block's dynamic convolution:
/// ```text
/// out[c] = Σ_tap (base[tap, c] + dynamic[tap, c / group]) * rows[tap][c]
/// ```
/// `base` is `[taps, hidden]` and `dynamic` `[taps, hidden / group]`, both of one side. `rows`
/// holds the row itself, the one before, and so on; rows before the block are left out.
pub fn convolve_row(rows: &[&[f32]], base: &[f32], dynamic: &[f32], out: &mut [f32]) {
    let width = out.len();
    let taps = base.len() / width;
    let groups = dynamic.len() / taps;
    let group = width / groups;
    out.fill(0.0);
    let weights = base.chunks_exact(width).zip(dynamic.chunks_exact(groups));
    for (row, (base, dynamic)) in rows.iter().zip(weights) {
        let channels = out.chunks_exact_mut(group).zip(row.chunks_exact(group));
        let channels = channels.zip(base.chunks_exact(group)).zip(dynamic);
        for (((out, row), base), dynamic) in channels {
            for ((out, x), base) in out.iter_mut().zip(row).zip(base) {
                *out += (base + dynamic) * x;
            }
        }
    }
}

/// The factor that a head's output takes from a sink: a key of score `sink` without a value.
/// `log_sum` is the log-sum-exp of the head's scores.
pub fn sink_factor(log_sum: f32, sink: f32) -> f32 {
    1.0 / (1.0 + (sink - log_sum).exp())
}

/// The score of a candidate: its logit and the product of the three factors, each `[rank]`.
pub fn pair_score(logit: f32, predecessor: &[f32], gate: &[f32], successor: &[f32]) -> f32 {
    let factors = predecessor.iter().zip(gate).zip(successor);
    logit + factors.map(|((a, g), b)| a * g * b).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean over the visible keys with equal scores; values are one-hot by key.
    fn seen(mask: DraftMask, committed: usize, n: usize, block: usize) -> Vec<Vec<usize>> {
        let dim = n + block;
        let one_hot = |i: usize| (0..dim).map(move |j| f32::from(u8::from(i == j)));
        let values: Vec<f32> = (0..dim).flat_map(one_hot).collect();
        let keys = vec![0.0; dim * dim];
        let mut out = vec![0.0; block * dim];
        attend_block(
            &vec![0.0; block * dim],
            (&keys[..n * dim], &values[..n * dim]),
            (&keys[n * dim..], &values[n * dim..]),
            (dim, committed, 1.0),
            mask,
            &mut out,
        );
        let of_row = |row: &[f32]| (0..dim).filter(|i| row[*i] > 0.0).collect();
        out.chunks(dim).map(of_row).collect()
    }

    #[test]
    fn convolution_sums_taps_with_weights_of_their_groups() {
        let (newest, before) = ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]);
        let base = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.0];
        let dynamic = [0.0, 1.0, 0.5, 0.0];
        let mut out = [0.0; 4];
        convolve_row(&[&newest, &before], &base, &dynamic, &mut out);
        assert_eq!(out, [1.0 + 10.0, 2.0 + 20.0, 6.0 + 15.0, 8.0]);
        convolve_row(&[&newest], &base, &dynamic, &mut out);
        assert_eq!(out, [1.0, 2.0, 6.0, 8.0]);
    }

    #[test]
    fn window_and_mask_apply_per_row() {
        let full = DraftMask {
            window: 100,
            causal: false,
        };
        assert_eq!(seen(full, 3, 3, 2), [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]);
        let sliding = DraftMask {
            window: 3,
            causal: true,
        };
        // Context is at positions 7, 8, 9. Rows are at 10 and 11; they see 8, 9 and 9, and the
        // earlier rows of the block.
        assert_eq!(seen(sliding, 10, 3, 2), [vec![1, 2, 3], vec![2, 3, 4]]);
        assert_eq!(sliding.first(10), 8);
        assert_eq!(sliding.first(1), 0);
    }
}
