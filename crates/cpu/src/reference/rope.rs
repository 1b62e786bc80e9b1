//! Rotary position embedding (RoFormer, arXiv 2104.09864).

use contract::{RopePairs, RopeSpec};

/// Cosines and sines of one position: pair `j` has the angle `position * theta^(-2j / dims)`.
///
/// `cos`, `sin` are `[dims / 2]`. Angles are computed in f64, because at long contexts an f32
/// product is off by hundredths of a radian.
pub fn angles(position: usize, theta: f64, cos: &mut [f32], sin: &mut [f32]) {
    angles_at(
        position,
        &inverse_frequencies(theta, 2 * cos.len()),
        cos,
        sin,
    );
}

/// Inverse frequencies `theta^(-2j / dims)`, `[dims / 2]`: the angle per position.
pub fn inverse_frequencies(theta: f64, dims: usize) -> Vec<f64> {
    let pairs = 0..dims / 2;
    pairs
        .map(|j| theta.powf(-2.0 * j as f64 / dims as f64))
        .collect()
}

/// The inverse frequencies of a rotary embedding, its scale included, `[dims / 2]`. `factors` are
/// divisors of the same length, if there are any.
pub fn inverse_frequencies_of(rope: RopeSpec, factors: Option<&[f32]>) -> Vec<f64> {
    let mut all = inverse_frequencies(rope.theta, rope.dims);
    for (j, frequency) in all.iter_mut().enumerate() {
        *frequency *= rope.scale;
        if let Some(factors) = factors {
            *frequency /= f64::from(factors[j]);
        }
    }
    all
}

/// [`angles`] with precomputed [`inverse_frequencies`].
pub fn angles_at(position: usize, inverse_frequencies: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    assert!(cos.len() == inverse_frequencies.len() && sin.len() == inverse_frequencies.len());
    for ((frequency, c), s) in inverse_frequencies.iter().zip(cos).zip(sin) {
        let (sine, cosine) = (position as f64 * frequency).sin_cos();
        (*c, *s) = (cosine as f32, sine as f32);
    }
}

/// Rotates the first `2 * cos.len()` values of a head `[head_dim]` in pairs `(j, j + cos.len())`:
/// `(u, w) -> (u cos - w sin, w cos + u sin)`. Other values pass through.
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    assert!(sin.len() == half && head.len() >= 2 * half);
    let (low, high) = head.split_at_mut(half);
    for (((u, w), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*u, *w) = (*u * c - *w * s, *w * c + *u * s);
    }
}

/// Rotates the first `2 * cos.len()` values of a head `[head_dim]` in pairs `(2 j, 2 j + 1)`.
/// Other values pass through.
pub fn rotate_adjacent(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert!(sin.len() == cos.len() && head.len() >= 2 * cos.len());
    for ((pair, &c), &s) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
        let (u, w) = (pair[0], pair[1]);
        (pair[0], pair[1]) = (u * c - w * s, w * c + u * s);
    }
}

/// The rotation of these pairs.
pub fn rotation(pairs: RopePairs) -> fn(&mut [f32], &[f32], &[f32]) {
    match pairs {
        RopePairs::Halves => rotate,
        RopePairs::Adjacent => rotate_adjacent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rotated(head: &[f32], position: usize) -> Vec<f32> {
        let (mut cos, mut sin) = ([0.0; 2], [0.0; 2]);
        angles(position, 1e4, &mut cos, &mut sin);
        let mut head = head.to_vec();
        rotate(&mut head, &cos, &sin);
        head
    }

    #[test]
    fn pairs_are_half_the_rotary_dims_apart_and_the_rest_is_unchanged() {
        let head = rotated(&[1.0, 0.0, 0.0, 0.0, 7.0, 8.0], 1);
        assert!((head[0] - 1f32.cos()).abs() < 1e-7);
        assert!((head[2] - 1f32.sin()).abs() < 1e-7);
        assert_eq!((head[1], head[3]), (0.0, 0.0));
        assert_eq!(head[4..], [7.0, 8.0]);
    }

    #[test]
    fn adjacent_pairs_are_halves_in_another_order() {
        let (mut cos, mut sin) = ([0.0; 3], [0.0; 3]);
        angles(7, 1e4, &mut cos, &mut sin);
        let mut halves = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 9.0];
        let mut adjacent = [0.1, 0.4, 0.2, 0.5, 0.3, 0.6, 9.0];
        rotate(&mut halves, &cos, &sin);
        rotate_adjacent(&mut adjacent, &cos, &sin);
        let order = [0, 3, 1, 4, 2, 5, 6];
        assert_eq!(adjacent, order.map(|at| halves[at]));
    }

    #[test]
    fn scale_and_factors_divide_the_angles() {
        let rope = RopeSpec {
            scale: 0.125,
            ..RopeSpec::new(4, 100.0)
        };
        assert_eq!(inverse_frequencies_of(rope, None), [0.125, 0.0125]);
        let factored = inverse_frequencies_of(rope, Some(&[1.0, 4.0]));
        assert_eq!(factored, [0.125, 0.003_125]);
    }

    #[test]
    fn dot_products_depend_on_the_distance_only() {
        let (q, k) = ([0.3, -0.2, 0.9, 0.4], [1.0, 0.5, -0.7, 0.1]);
        let product = |a: usize, b: usize| -> f32 {
            let (q, k) = (rotated(&q, a), rotated(&k, b));
            q.iter().zip(&k).map(|(q, k)| q * k).sum()
        };
        assert!((product(9, 4) - product(100_005, 100_000)).abs() < 1e-6);
    }
}
