//! The causal depthwise convolution before the gated delta rule, including SiLU (Gated DeltaNet,
//! arXiv 2412.06464).
//!
//! `c[t, ch] = silu(sum_j weight[j, ch] * u[t - taps + 1 + j, ch])`: the last tap multiplies the
//! current token, and inputs before the first row come from the window `[taps - 1, channels]`,
//! oldest first.

use super::activation::silu;

/// One row: `inputs` are `taps` rows `[channels]`, oldest first; `weights` `[taps, channels]`;
/// `out` `[channels]`.
pub fn row(inputs: &[&[f32]], weights: &[f32], out: &mut [f32]) {
    let channels = out.len();
    assert_eq!(weights.len(), inputs.len() * channels);
    out.fill(0.0);
    for (input, weights) in inputs.iter().zip(weights.chunks_exact(channels)) {
        for ((o, &x), &w) in out.iter_mut().zip(*input).zip(weights) {
            *o += w * x;
        }
    }
    for o in out {
        *o = silu(*o);
    }
}

/// Consecutive rows `[n, channels]` after a window `[taps - 1, channels]`; `out` is `[n,
/// channels]`.
pub fn sequence(window: &[f32], rows: &[f32], weights: &[f32], taps: usize, out: &mut [f32]) {
    let parents: Vec<Option<usize>> = (0..rows.len() * taps / weights.len())
        .map(|i| i.checked_sub(1))
        .collect();
    tree(window, rows, &parents, weights, out);
}

/// A tree of rows `[n_nodes, channels]`. The inputs of a node are itself, its ancestors, then the
/// window.
///
/// `parents` is `[n_nodes]`, parents before children, `None` for the root.
pub fn tree(
    window: &[f32],
    rows: &[f32],
    parents: &[Option<usize>],
    weights: &[f32],
    out: &mut [f32],
) {
    assert!(!parents.is_empty() && rows.len() == out.len());
    let channels = rows.len() / parents.len();
    let taps = weights.len() / channels;
    assert_eq!(window.len(), (taps - 1) * channels);
    for (node, out) in out.chunks_exact_mut(channels).enumerate() {
        let mut inputs: Vec<&[f32]> = Vec::with_capacity(taps);
        let mut at = Some(node);
        let mut before = taps - 1;
        while inputs.len() < taps {
            match at {
                Some(node) => {
                    inputs.push(&rows[node * channels..][..channels]);
                    at = parents[node];
                }
                None => {
                    before -= 1;
                    inputs.push(&window[before * channels..][..channels]);
                }
            }
        }
        inputs.reverse();
        row(&inputs, weights, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_see_ancestors_and_window_but_no_sibling() {
        // One channel, three taps that read out as decimal digits before the SiLU.
        let weights = [100.0, 10.0, 1.0];
        let window = [1.0, 2.0];
        let rows = [3.0, 4.0, 5.0];
        let mut out = [0.0; 3];
        tree(
            &window,
            &rows,
            &[None, Some(0), Some(0)],
            &weights,
            &mut out,
        );
        assert_eq!(out, [123.0, 234.0, 235.0].map(silu));
    }

    #[test]
    fn sequence_equals_a_tree_of_single_children() {
        let weights = [0.5, -1.0, 2.0, 0.25, 1.0, -0.5];
        let window = [0.1, 0.2, 0.3, 0.4];
        let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let (mut whole, mut tail) = ([0.0; 6], [0.0; 4]);
        sequence(&window, &rows, &weights, 3, &mut whole);
        let moved = [window[2], window[3], rows[0], rows[1]];
        sequence(&moved, &rows[2..], &weights, 3, &mut tail);
        assert_eq!(whole[2..], tail);
    }
}
