//! Probability mass of full rows, vectorized for vocabularies of a quarter of a million tokens.
//!
//! Masses are relative to the best token's 1. The exponential is a branch-free f32 polynomial,
//! which the compiler vectorizes. It uses no fused multiply-add, so every machine gives the same
//! bits. Its error of 2e-7 is far below the effect of a logit's last digit. Sums are f64.

/// Tokens whose mass is summed as one block.
const BLOCK: usize = 512;
/// Partial sums side by side within a block.
const LANES: usize = 8;

/// The mass of each block of a row `[vocab]`, in order; `max` is the best logit.
pub(super) fn block_masses(logits: &[f32], max: f32, temperature: f32) -> Vec<f64> {
    let blocks = logits.chunks(BLOCK);
    blocks
        .map(|block| {
            let mut lanes = [0.0_f64; LANES];
            let groups = block.chunks_exact(LANES);
            let rest = groups.remainder();
            for group in groups {
                for (lane, logit) in lanes.iter_mut().zip(group) {
                    *lane += f64::from(exp((logit - max) / temperature));
                }
            }
            for (lane, logit) in lanes.iter_mut().zip(rest) {
                *lane += f64::from(exp((logit - max) / temperature));
            }
            lanes.iter().sum()
        })
        .collect()
}

/// Index at which the cumulative mass, in id order, passes the share `draw` of the total. `None` if
/// the row has no mass.
pub(super) fn pick(logits: &[f32], max: f32, temperature: f32, draw: f64) -> Option<usize> {
    let masses = block_masses(logits, max, temperature);
    let target = draw * masses.iter().sum::<f64>();
    let mut reached = 0.0;
    let mut possible = None;
    for (i, mass) in masses.iter().enumerate() {
        if reached + mass <= target {
            reached += mass;
            continue;
        }
        let start = i * BLOCK;
        for (at, logit) in logits.iter().enumerate().skip(start).take(BLOCK) {
            let mass = f64::from(exp((logit - max) / temperature));
            reached += mass;
            if mass > 0.0 {
                possible = Some(at);
                if reached > target {
                    return possible;
                }
            }
        }
        // The lanes' sum and this one differ in the last digit, and the draw fell between.
        return possible;
    }
    // Reached through rounding only: the last token with any mass.
    let mass = |logit: &f32| exp((logit - max) / temperature);
    logits.iter().rposition(|logit| mass(logit) > 0.0)
}

/// `e^x` for `x <= 0`; 0 below the smallest normal number.
fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    /// Adding it rounds to an integer and leaves that integer in the low bits.
    const ROUNDING: f32 = 12_582_912.0;
    /// The natural logarithm of 2 in two parts, the first short enough for exact products.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let clamped = x.max(LOWEST);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUNDING;
    let whole = shifted - ROUNDING;
    let r = (clamped - whole * LN_2[0]) - whole * LN_2[1];
    // Taylor series; |r| is at most ln(2) / 2, where the next term is below 5e-9.
    let series = 1.0 / 5040.0;
    let series = series * r + 1.0 / 720.0;
    let series = series * r + 1.0 / 120.0;
    let series = series * r + 1.0 / 24.0;
    let series = series * r + 1.0 / 6.0;
    let series = series * r + 0.5;
    let series = series * r + 1.0;
    let series = series * r + 1.0;
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUNDING.to_bits())
        .wrapping_add(127);
    let value = series * f32::from_bits(exponent << 23);
    if x < LOWEST { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fast_exp_relative_error_is_below_2e_7() {
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2e-7, "e^{x} is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    proptest! {
        #[test]
        fn picked_token_matches_exact_cumulative_mass(
            logits in prop::collection::vec(-12.0_f32..4.0, 1..1500),
            temperature in 0.3_f32..2.0, draw in 0.0..1.0_f64,
        ) {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exact = |x: &f32| (f64::from(x - max) / f64::from(temperature)).exp();
            let total: f64 = logits.iter().map(exact).sum();
            let at = pick(&logits, max, temperature, draw).unwrap();
            let before: f64 = logits[..at].iter().map(exact).sum();
            let after = before + exact(&logits[at]);
            let slack = 1e-5;
            prop_assert!(before / total <= draw + slack && draw <= after / total + slack);
        }
    }

    #[test]
    fn zero_mass_tokens_are_never_picked() {
        let bar = f32::NEG_INFINITY;
        let mut row = vec![bar; 2000];
        row[700] = -3.0;
        row[1999] = bar;
        for draw in [0.0, 0.5, 0.999_999_999_999] {
            assert_eq!(pick(&row, -3.0, 1.0, draw), Some(700));
        }
        assert_eq!(pick(&[], bar, 1.0, 0.5), None);
    }
}
