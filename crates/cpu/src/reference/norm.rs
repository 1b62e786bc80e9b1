//! Normalization of one vector.

use super::activation::silu;

/// RMS norm (arXiv 1910.07467): `out = x / sqrt(mean(x^2) + eps) * weight`, each `[n]`.
///
/// The stored weight already includes a checkpoint's `1 + w`.
pub fn rms(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), weight.len()), (out.len(), out.len()));
    let scale = rms_scale(x, eps);
    for ((o, &x), &w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

/// [`rms`] in place, `[n]`.
pub fn rms_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let scale = rms_scale(x, eps);
    for (x, &w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

/// Gated RMS norm of the delta mixer's output: `x = rms(x, weight) * silu(z)` in place, each `[n]`.
///
/// Order: norm, weight, gate.
pub fn gated_rms(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32) {
    assert_eq!(x.len(), z.len());
    rms_in_place(x, weight, eps);
    for (x, &z) in x.iter_mut().zip(z) {
        *x *= silu(z);
    }
}

/// L2 norm: `x = x / sqrt(sum(x^2) + eps) * scale` in place, `[n]`.
///
/// The epsilon is added to the sum, not to the mean.
pub fn l2(x: &mut [f32], eps: f32, scale: f32) {
    let sum: f32 = x.iter().map(|x| x * x).sum();
    let factor = 1.0 / (sum + eps).sqrt() * scale;
    for x in x {
        *x *= factor;
    }
}

fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let sum: f32 = x.iter().map(|x| x * x).sum();
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_weights_give_unit_mean_square() {
        let x = [3.0, -4.0, 12.0, 0.0];
        let mut out = [0.0; 4];
        rms(&x, &[1.0; 4], 0.0, &mut out);
        let mean: f32 = out.iter().map(|x| x * x).sum::<f32>() / 4.0;
        assert!((mean - 1.0).abs() < 1e-6);
    }

    #[test]
    fn l2_adds_epsilon_to_the_sum() {
        let mut x = [1e-3; 4];
        l2(&mut x, 4e-6, 1.0);
        assert!((x[0] - 1e-3 / (8e-6_f32).sqrt()).abs() < 1e-6);
    }
}
