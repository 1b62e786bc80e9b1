//! Elementwise activation functions.

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`; above 20, `x` itself, which equals it in f32.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `out = silu(gate) * up`, each `[n]`.
pub fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert_eq!((gate.len(), up.len()), (out.len(), out.len()));
    for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *o = silu(g) * u;
    }
}

/// The Gaussian error linear unit by its tanh formula (arXiv 1606.08415):
/// `x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
pub fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)).tanh())
}

/// `out = gelu(gate) * up`, each `[n]`.
pub fn geglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert_eq!((gate.len(), up.len()), (out.len(), out.len()));
    for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *o = gelu(g) * u;
    }
}

/// `x *= sigmoid(gate)`, each `[n]`.
pub fn sigmoid_gate(x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len());
    for (x, &g) in x.iter_mut().zip(gate) {
        *x *= sigmoid(g);
    }
}

/// `x += y`, each `[n]`.
pub fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Softmax numerators: `x = e^(x - shift)` in place, `[n]`. Returns the sum in index order. NaN
/// counts as minus infinity.
pub fn exp_sum(x: &mut [f32], shift: f32) -> f32 {
    let mut sum = 0.0;
    for x in x {
        *x = if x.is_nan() { 0.0 } else { (*x - shift).exp() };
        sum += *x;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softplus_is_continuous_at_its_threshold() {
        let below = softplus(20.0);
        let above = softplus(f32::from_bits(20.0_f32.to_bits() + 1));
        assert!((above - below).abs() < 4e-6, "{below} {above}");
        assert_eq!(softplus(-200.0), 0.0);
    }

    #[test]
    fn gelu_has_its_published_values() {
        for (x, expected) in [
            (0.0, 0.0),
            (1.0, 0.841_192),
            (-1.0, -0.158_808),
            (3.0, 2.996_363),
        ] {
            assert!((gelu(x) - expected).abs() < 1e-5, "{x}: {}", gelu(x));
        }
        assert_eq!((gelu(1e20), gelu(-1e20)), (1e20, 0.0));
    }

    #[test]
    fn saturated_gates_give_no_nan() {
        assert_eq!(silu(-1e30), 0.0);
        assert_eq!(silu(1e30), 1e30);
        assert_eq!((sigmoid(-1e30), sigmoid(1e30)), (0.0, 1.0));
    }
}
