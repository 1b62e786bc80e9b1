//! Rotary position embedding (RoFormer, arXiv 2104.09864).

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
    fn dot_products_depend_on_the_distance_only() {
        let (q, k) = ([0.3, -0.2, 0.9, 0.4], [1.0, 0.5, -0.7, 0.1]);
        let product = |a: usize, b: usize| -> f32 {
            let (q, k) = (rotated(&q, a), rotated(&k, b));
            q.iter().zip(&k).map(|(q, k)| q * k).sum()
        };
        assert!((product(9, 4) - product(100_005, 100_000)).abs() < 1e-6);
    }
}
