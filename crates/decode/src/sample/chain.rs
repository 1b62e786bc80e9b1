//! From a row of edited logits to one token.
//!
//! Order: top-k, temperature, softmax, top-p, min-p, one draw. Candidates are ranked by falling logit, ties
//! to the lower id. The draw goes through the cumulative mass in that ranking where anything was cut off,
//! and in id order where nothing was, so that an uncut row need not be sorted. Masses are summed in f64 in
//! those same orders; nothing depends on what else the device was doing.

use std::cmp::Ordering;

use contract::{Row, TokenId};

use crate::Sampling;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    id: TokenId,
    logit: f32,
    /// Mass relative to the best candidate's 1.
    mass: f64,
}

/// The token that `draw`, from `[0, 1)`, picks out of a row. A row must have at least one token.
pub(crate) fn choose(row: &Row, sampling: &Sampling, draw: f64) -> TokenId {
    if sampling.is_greedy() {
        return best(row);
    }
    let candidates = candidates(row, sampling);
    let total: f64 = candidates.iter().map(|c| c.mass).sum();
    let target = draw * total;
    let mut reached = 0.0;
    for candidate in &candidates {
        reached += candidate.mass;
        if reached > target {
            return candidate.id;
        }
    }
    // Only rounding, or a row without any mass, leads here.
    let possible = candidates.iter().rfind(|c| c.mass > 0.0);
    possible.map_or_else(|| best(row), |c| c.id)
}

/// The highest logit, ties to the lower id.
fn best(row: &Row) -> TokenId {
    let mut best: Option<(f32, TokenId)> = None;
    for (logit, id) in row.logits.iter().zip(&row.ids) {
        let better = best.is_none_or(|(top, at)| *logit > top || (*logit == top && *id < at));
        if better {
            best = Some((*logit, *id));
        }
    }
    best.map(|(_, id)| id).unwrap_or_default()
}

/// What is left of a row to draw from, with its mass.
fn candidates(row: &Row, sampling: &Sampling) -> Vec<Candidate> {
    let mut left: Vec<Candidate> = row
        .ids
        .iter()
        .zip(&row.logits)
        .map(|(id, logit)| Candidate {
            id: *id,
            logit: *logit,
            mass: 0.0,
        })
        .collect();
    let cut_k = sampling.top_k > 0;
    if cut_k {
        keep_best(&mut left, sampling.top_k);
    }
    let total = spread_mass(&mut left, sampling.temperature);
    if sampling.top_p < 1.0 {
        keep_nucleus(&mut left, f64::from(sampling.top_p), total, cut_k);
    }
    if sampling.min_p > 0.0 {
        // The best candidate has mass 1, whatever was cut off.
        left.retain(|c| c.mass >= f64::from(sampling.min_p));
        if !cut_k && sampling.top_p >= 1.0 {
            left.sort_unstable_by(rank);
        }
    }
    left
}

fn rank(a: &Candidate, b: &Candidate) -> Ordering {
    // Adding zero makes the two zeros one, which `total_cmp` would tell apart.
    (b.logit + 0.0)
        .total_cmp(&(a.logit + 0.0))
        .then(a.id.cmp(&b.id))
}

/// Leaves the `k` best, ranked.
fn keep_best(left: &mut Vec<Candidate>, k: usize) {
    if k < left.len() {
        left.select_nth_unstable_by(k, rank);
        left.truncate(k);
    }
    left.sort_unstable_by(rank);
}

/// Gives each candidate `exp((logit - best) / temperature)` and returns the sum, in the order they stand.
fn spread_mass(left: &mut [Candidate], temperature: f32) -> f64 {
    let logits = left.iter().map(|c| c.logit);
    let max = f64::from(logits.fold(f32::NEG_INFINITY, f32::max));
    let temperature = f64::from(temperature);
    let mut total = 0.0;
    for candidate in left.iter_mut() {
        let below = f64::from(candidate.logit) - max;
        // Equal infinities give no number; the best is the best.
        candidate.mass = if below == 0.0 {
            1.0
        } else {
            (below / temperature).exp()
        };
        if candidate.mass.is_nan() {
            candidate.mass = 0.0;
        }
        total += candidate.mass;
    }
    total
}

/// Leaves the fewest best candidates whose mass reaches `p * total`, ranked; at least one.
fn keep_nucleus(left: &mut Vec<Candidate>, p: f64, total: f64, ranked: bool) {
    if !ranked {
        // All candidates below an even share of `1 - p` weigh `1 - p` together at most, so the nucleus lies
        // among the others; half of that share leaves room for rounding. The best has mass 1.
        let share = (0.5 * (1.0 - p) * total / left.len() as f64).min(1.0);
        left.retain(|c| c.mass >= share);
        left.sort_unstable_by(rank);
    }
    let mut reached = 0.0;
    let enough = left.iter().position(|c| {
        reached += c.mass;
        reached >= p * total
    });
    left.truncate(enough.map_or(left.len(), |at| at + 1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::rng::uniform;
    use proptest::prelude::*;

    fn row(logits: &[f32]) -> Row {
        Row {
            ids: (0..logits.len() as u32).map(TokenId).collect(),
            logits: logits.to_vec(),
            raw: logits.to_vec(),
            lse: 0.0,
            raw_lse: 0.0,
        }
    }

    /// The ranked head of a row, as a device gives it for `Want::Top(k)`.
    fn top(row: &Row, k: usize) -> Row {
        let mut order: Vec<usize> = (0..row.ids.len()).collect();
        order.sort_by(|a, b| row.logits[*b].total_cmp(&row.logits[*a]).then(a.cmp(b)));
        order.truncate(k);
        Row {
            ids: order.iter().map(|i| row.ids[*i]).collect(),
            logits: order.iter().map(|i| row.logits[*i]).collect(),
            raw: order.iter().map(|i| row.raw[*i]).collect(),
            ..*row
        }
    }

    fn sampling(temperature: f32, top_k: usize, top_p: f32, min_p: f32) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            ..Sampling::default()
        }
    }

    /// The distribution by its definition: everything sorted, everything in f64, cut after cut.
    fn exact(logits: &[f32], s: &Sampling) -> Vec<f64> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        if s.top_k > 0 {
            order.truncate(s.top_k);
        }
        let max = f64::from(logits[order[0]]);
        let mut p = vec![0.0; logits.len()];
        for i in &order {
            p[*i] = ((f64::from(logits[*i]) - max) / f64::from(s.temperature)).exp();
        }
        let total: f64 = p.iter().sum();
        p.iter_mut().for_each(|x| *x /= total);
        let mut reached = 0.0;
        let keep = order.iter().position(|i| {
            reached += p[*i];
            s.top_p < 1.0 && reached >= f64::from(s.top_p)
        });
        let kept = keep.map_or(order.len(), |at| at + 1);
        let floor = f64::from(s.min_p) * p[order[0]];
        let survivors: Vec<usize> = order[..kept]
            .iter()
            .copied()
            .filter(|i| p[*i] >= floor)
            .collect();
        let mass: f64 = survivors.iter().map(|i| p[*i]).sum();
        (0..p.len())
            .map(|i| {
                if survivors.contains(&i) {
                    p[i] / mass
                } else {
                    0.0
                }
            })
            .collect()
    }

    const N: u64 = 40_000;

    /// Pearson's statistic of `N` draws against `exact`, and its degrees of freedom. Impossible tokens that
    /// come out count as infinitely bad.
    fn chi_square(exact: &[f64], choose: impl Fn(f64) -> TokenId) -> (f64, usize) {
        let mut seen = vec![0_u64; exact.len()];
        for position in 0..N {
            seen[choose(uniform(11, position)).index()] += 1;
        }
        let (mut chi, mut bins, mut rare_p, mut rare_seen) = (0.0, 0, 0.0, 0);
        for (p, seen) in exact.iter().zip(&seen) {
            if *p == 0.0 && *seen > 0 {
                return (f64::INFINITY, 1);
            }
            if p * (N as f64) < 5.0 {
                rare_p += p;
                rare_seen += seen;
                continue;
            }
            chi += (*seen as f64 - p * N as f64).powi(2) / (p * N as f64);
            bins += 1;
        }
        if rare_p * (N as f64) >= 5.0 {
            chi += (rare_seen as f64 - rare_p * N as f64).powi(2) / (rare_p * N as f64);
            bins += 1;
        }
        (chi, bins.max(2) - 1)
    }

    /// Wilson and Hilferty's approximation of the value passed once in a hundred thousand.
    fn limit(degrees: usize) -> f64 {
        let d = degrees as f64;
        let z = 4.265;
        d * (1.0 - 2.0 / (9.0 * d) + z * (2.0 / (9.0 * d)).sqrt()).powi(3)
    }

    const LOGITS: [f32; 12] = [
        1.0, 0.5, 2.0, -1.0, 0.5, 3.0, -4.0, 0.0, 1.5, 2.0, -0.5, 0.25,
    ];

    #[test]
    fn draws_follow_the_exact_distribution() {
        let cases = [
            sampling(1.0, 0, 1.0, 0.0),
            sampling(0.7, 0, 1.0, 0.0),
            sampling(2.5, 0, 1.0, 0.0),
            sampling(1.0, 4, 1.0, 0.0),
            sampling(1.0, 0, 0.8, 0.0),
            sampling(1.0, 0, 1.0, 0.2),
            sampling(0.9, 6, 0.9, 0.1),
            sampling(1.3, 0, 0.95, 0.15),
        ];
        for s in cases {
            let expected = exact(&LOGITS, &s);
            let (chi, degrees) = chi_square(&expected, |draw| choose(&row(&LOGITS), &s, draw));
            assert!(chi < limit(degrees), "{s:?}: {chi} over {degrees}");
        }
    }

    #[test]
    fn a_wrong_sampler_does_not_pass_the_same_test() {
        let s = sampling(1.0, 0, 1.0, 0.0);
        let expected = exact(&LOGITS, &s);
        let wrong = [
            sampling(1.05, 0, 1.0, 0.0),
            sampling(1.0, 8, 1.0, 0.0),
            sampling(1.0, 0, 0.95, 0.0),
        ];
        for other in wrong {
            let (chi, degrees) = chi_square(&expected, |draw| choose(&row(&LOGITS), &other, draw));
            assert!(chi > limit(degrees), "{other:?} passes with {chi}");
        }
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let tied = row(&[1.0, 3.0, 3.0, 3.0]);
        assert_eq!(choose(&tied, &Sampling::greedy(), 0.9), TokenId(1));
        for draw in [0.0, 0.49] {
            assert_eq!(choose(&tied, &sampling(1.0, 2, 1.0, 0.0), draw), TokenId(1));
        }
        assert_eq!(choose(&tied, &sampling(1.0, 2, 1.0, 0.0), 0.51), TokenId(2));
        assert_eq!(
            choose(&tied, &sampling(1.0, 0, 0.3, 0.0), 0.999),
            TokenId(1)
        );
    }

    #[test]
    fn at_least_one_token_is_left_whatever_is_cut() {
        let s = sampling(1.0, 1, 0.0, 1.0);
        assert_eq!(choose(&row(&LOGITS), &s, 0.999_999), TokenId(5));
        let s = sampling(1.0, 0, 0.0, 0.0);
        assert_eq!(choose(&row(&LOGITS), &s, 0.999_999), TokenId(5));
    }

    #[test]
    fn rows_without_numbers_still_give_a_token() {
        let s = sampling(1.0, 0, 0.9, 0.1);
        let barred = [f32::NEG_INFINITY; 3];
        assert_eq!(choose(&row(&barred), &s, 0.5).index() / 3, 0);
        let one = [f32::NEG_INFINITY, f32::NEG_INFINITY, -5.0];
        assert_eq!(choose(&row(&one), &s, 0.0), TokenId(2));
        let hot = [f32::INFINITY, 1.0];
        assert_eq!(
            choose(&row(&hot), &sampling(1.0, 0, 1.0, 0.0), 0.5),
            TokenId(0)
        );
        let cold = sampling(f32::MIN_POSITIVE, 0, 1.0, 0.0);
        assert_eq!(choose(&row(&LOGITS), &cold, 0.999), TokenId(5));
    }

    proptest! {
        #[test]
        fn what_can_come_out_is_what_the_definition_allows(
            logits in prop::collection::vec(-8.0_f32..8.0, 1..40),
            top_k in 0..12_usize,
            top_p in 0.0_f32..=1.0,
            min_p in prop::sample::select(vec![0.0_f32, 0.05, 0.5]),
            temperature in 0.1_f32..3.0,
            draw in 0.0..1.0_f64,
        ) {
            let s = sampling(temperature, top_k, top_p, min_p);
            let left = candidates(&row(&logits), &s);
            let total: f64 = left.iter().map(|c| c.mass).sum();
            let expected = exact(&logits, &s);
            for c in &left {
                prop_assert!((c.mass / total - expected[c.id.index()]).abs() < 1e-9);
            }
            let support = expected.iter().filter(|p| **p > 0.0).count();
            prop_assert_eq!(left.len(), support);
            prop_assert!(expected[choose(&row(&logits), &s, draw).index()] > 0.0);
        }

        #[test]
        fn a_top_row_and_a_full_row_give_the_same_token(
            logits in prop::collection::vec(-8.0_f32..8.0, 1..40),
            top_k in 1..12_usize,
            more in 0..5_usize,
            top_p in 0.0_f32..=1.0,
            draw in 0.0..1.0_f64,
        ) {
            let s = sampling(0.8, top_k, top_p, 0.02);
            let full = row(&logits);
            prop_assert_eq!(choose(&top(&full, top_k + more), &s, draw), choose(&full, &s, draw));
        }
    }
}
