//! The rotation of cached keys and values before they are quantized, and of queries to match.
//!
//! `R x = s2 * (H (s1 * x)) / sqrt(n)` over groups of `n` values, `H` the Hadamard matrix in
//! natural order and `s1`, `s2` fixed signs. R is orthonormal, so `(R q) . (R k) = q . k`, and
//! attention scores need no inverse rotation. The rotation spreads outliers over their group, which
//! reduces quantization error (as in QuaRot, arXiv 2404.00456).
//!
//! Groups are of 128 values, or of the largest power of two below that which divides a head.

/// Values per group, if the head has that many.
pub const GROUP: usize = 128;

/// Bit `i % 32` of word `i / 32` set means that value `i` changes its sign before the Hadamard
/// matrix.
pub const SIGNS_BEFORE: [u32; 4] = [0xe46a_0359, 0x42f8_5949, 0xa4c6_3bbb, 0x49f2_50a9];
/// The same after it.
pub const SIGNS_AFTER: [u32; 4] = [0x16ac_ee90, 0x3f62_8fdc, 0xb7a5_357a, 0xbea5_6562];

/// Group size of a head of `head_dim` values.
pub const fn group(head_dim: usize) -> usize {
    let largest = 1 << head_dim.trailing_zeros();
    if largest < GROUP { largest } else { GROUP }
}

/// Rotates a head, group by group.
pub fn rotate(head: &mut [f32]) {
    for group in head.chunks_exact_mut(group(head.len())) {
        flip(group, &SIGNS_BEFORE);
        hadamard(group);
        flip(group, &SIGNS_AFTER);
    }
}

/// Inverse of [`rotate`], up to rounding.
pub fn rotate_inverse(head: &mut [f32]) {
    for group in head.chunks_exact_mut(group(head.len())) {
        flip(group, &SIGNS_AFTER);
        hadamard(group);
        flip(group, &SIGNS_BEFORE);
    }
}

fn flip(values: &mut [f32], signs: &[u32; 4]) {
    for (values, word) in values.chunks_mut(32).zip(signs) {
        for (i, value) in values.iter_mut().enumerate() {
            *value = f32::from_bits(value.to_bits() ^ (word >> i & 1) << 31);
        }
    }
}

/// `x = H x / sqrt(n)`, strides rising.
fn hadamard(values: &mut [f32]) {
    let n = values.len();
    let mut stride = 1;
    while stride < n {
        for pair in values.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    let scale = 1.0 / (n as f32).sqrt();
    values.iter_mut().for_each(|value| *value *= scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 + 11) % 101) as f32 - 50.0)
            .collect()
    }

    #[test]
    fn signs_match_the_format() {
        let count = |words: [u32; 4]| words.iter().map(|word| word.count_ones()).sum::<u32>();
        assert_eq!((count(SIGNS_BEFORE), count(SIGNS_AFTER)), (60, 70));
    }

    #[test]
    fn rotation_keeps_dot_products_and_is_invertible() {
        for n in [32, 64, 96, 128, 256, 384] {
            let (x, y) = (ramp(n), ramp(n + 7).split_off(7));
            let dot =
                |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let (mut a, mut b) = (x.clone(), y.clone());
            rotate(&mut a);
            rotate(&mut b);
            assert!(
                (dot(&a, &b) - dot(&x, &y)).abs() < 1e-4 * dot(&x, &x),
                "{n}"
            );
            assert_ne!(a, x);
            rotate_inverse(&mut a);
            assert!(a.iter().zip(&x).all(|(a, x)| (a - x).abs() < 1e-3), "{n}");
        }
    }

    /// Against the definition: row `i` of H has the sign of the parity of `i & j` in column `j`.
    #[test]
    fn rotation_matches_the_hadamard_matrix_of_the_format() {
        let x = ramp(128);
        let sign = |words: &[u32; 4], i: usize| {
            if words[i / 32] >> (i % 32) & 1 == 1 {
                -1.0
            } else {
                1.0
            }
        };
        let expected = (0..128_usize).map(|i| {
            let sum: f64 = (0..128_usize)
                .map(|j| {
                    let parity = if (i & j).count_ones() % 2 == 1 {
                        -1.0
                    } else {
                        1.0
                    };
                    parity * sign(&SIGNS_BEFORE, j) * f64::from(x[j])
                })
                .sum();
            sum * sign(&SIGNS_AFTER, i) / 128_f64.sqrt()
        });
        let mut found = x.clone();
        rotate(&mut found);
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() < 1e-3);
        }
    }
}
