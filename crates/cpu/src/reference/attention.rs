//! Softmax attention of one query head (Attention Is All You Need, arXiv 1706.03762).

use super::matmul::dot;

/// `out = softmax(scale * q · K^T) V` with `q`, `out` `[head_dim]` and `keys`, `values` `[n_keys,
/// head_dim]`.
///
/// The sum runs over keys in the given order: committed positions first, then the node's ancestors
/// from the root, then the node itself. A chain therefore sums in the same order as token-by-token
/// decoding. A key with a NaN score gets no weight.
pub fn attend(q: &[f32], keys: &[f32], values: &[f32], scale: f32, out: &mut [f32]) {
    let dim = q.len();
    let mut scores: Vec<f32> = keys
        .chunks_exact(dim)
        .map(|key| dot(q, key) * scale)
        .collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    out.fill(0.0);
    if max == f32::NEG_INFINITY {
        return;
    }
    let sum = super::activation::exp_sum(&mut scores, max);
    for (&weight, value) in scores.iter().zip(values.chunks_exact(dim)) {
        for (o, &v) in out.iter_mut().zip(value) {
            *o += weight * v;
        }
    }
    for o in out {
        *o /= sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_give_the_mean_of_the_values() {
        let mut out = [0.0; 2];
        attend(
            &[1.0, 1.0],
            &[0.5, 0.5, 0.5, 0.5],
            &[1.0, 2.0, 3.0, 6.0],
            1.0,
            &mut out,
        );
        assert_eq!(out, [2.0, 4.0]);
    }

    #[test]
    fn keys_with_nan_scores_get_no_weight() {
        let mut out = [0.0; 1];
        attend(&[1.0], &[f32::NAN, 1.0], &[9.0, 2.0], 1.0, &mut out);
        assert_eq!(out, [2.0]);
    }
}
