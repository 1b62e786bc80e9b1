//! The choice of a row's experts.

use super::activation::exp_sum;

/// A chosen expert and its weight in the sum.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ChosenExpert {
    /// Index of the expert.
    pub expert: usize,
    /// Factor on its output.
    pub weight: f32,
}

/// Chooses the experts of one row, best first: `choices` `[n_used]` from `logits` `[n_experts]`,
/// whose content is lost.
///
/// ```text
/// p = softmax(logits);  of equal p, the lower index is better
/// weight = scale * p / max(sum of the chosen p, min_sum)
/// ```
///
/// A logit that is NaN is never chosen before another one.
pub fn choose(logits: &mut [f32], (scale, min_sum): (f32, f32), choices: &mut [ChosenExpert]) {
    assert!(choices.len() <= logits.len());
    let shift = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let all = exp_sum(logits, shift);
    let mut sum = 0.0;
    for choice in choices.iter_mut() {
        let mut best = 0;
        for (expert, value) in logits.iter().enumerate() {
            if *value > logits[best] || logits[best] == f32::NEG_INFINITY {
                best = expert;
            }
        }
        let p = logits[best] / all;
        *choice = ChosenExpert {
            expert: best,
            weight: p,
        };
        sum += p;
        logits[best] = f32::NEG_INFINITY;
    }
    for choice in choices {
        choice.weight *= scale / sum.max(min_sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(logits: &[f32], n_used: usize, scale: f32) -> Vec<(usize, f32)> {
        let mut choices = vec![ChosenExpert::default(); n_used];
        choose(&mut logits.to_vec(), (scale, 6e-5), &mut choices);
        choices.iter().map(|c| (c.expert, c.weight)).collect()
    }

    #[test]
    fn the_best_experts_are_chosen_and_their_weights_add_up_to_the_scale() {
        let ln = f32::ln;
        let found = chosen(&[ln(1.0), ln(3.0), ln(2.0), ln(4.0)], 2, 1.0);
        assert_eq!([found[0].0, found[1].0], [3, 1]);
        assert!((found[0].1 - 4.0 / 7.0).abs() < 1e-6, "{found:?}");
        assert!((found[1].1 - 3.0 / 7.0).abs() < 1e-6, "{found:?}");
        let found = chosen(&[0.5, 0.25, 0.0], 3, 2.5);
        let sum: f32 = found.iter().map(|(_, weight)| weight).sum();
        assert!((sum - 2.5).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn of_equal_experts_those_of_lower_index_are_chosen() {
        let found = chosen(&[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], 4, 1.0);
        let experts: Vec<usize> = found.iter().map(|(expert, _)| *expert).collect();
        assert_eq!(experts, [1, 2, 4, 0]);
        // Probabilities too small for f32 are equal too.
        let found = chosen(&[-300.0, 0.0, -200.0, -400.0], 3, 1.0);
        let experts: Vec<usize> = found.iter().map(|(expert, _)| *expert).collect();
        assert_eq!(experts, [1, 0, 2]);
    }

    #[test]
    fn logits_that_are_no_numbers_still_choose_different_experts() {
        for row in [[f32::NAN; 4], [f32::INFINITY; 4], [f32::NEG_INFINITY; 4]] {
            let mut experts: Vec<usize> = chosen(&row, 4, 1.0).iter().map(|c| c.0).collect();
            experts.sort_unstable();
            assert_eq!(experts, [0, 1, 2, 3], "{row:?}");
        }
        assert_eq!(chosen(&[f32::NAN, 0.0, 1.0], 2, 1.0)[0].0, 2);
    }
}
