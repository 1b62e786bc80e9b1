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
