//! From a row of processed logits to one token.
//!
//! Order: top-k, temperature, softmax, top-p, min-p, one draw. Candidates are ranked by falling
//! logit, ties to the lower id. The draw goes through the cumulative mass in rank order if anything
//! was cut, and in id order otherwise, so that an uncut row need not be sorted. Masses are summed
//! in f64 in that order, so the result does not depend on the batch.

use contract::mass::{self, ranked_mass};
use contract::{LogitsRow, MassCut, MassPart, MassQuery, TokenId};

use super::rank;
use crate::job::Sampling;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    id: TokenId,
    logit: f32,
    /// Mass relative to the best candidate's 1.
    mass: f64,
}

/// The token that `draw`, from `[0, 1)`, selects from a row of at least one token.
pub(crate) fn choose(row: &LogitsRow, sampling: &Sampling, draw: f64) -> TokenId {
    let max = row.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if sampling.is_greedy() || max == f32::NEG_INFINITY {
        return best(row);
    }
    if is_uncut(sampling) {
        if row.mass > 0.0 {
            // The device has found the token.
            return best(row);
        }
        let at = mass::pick(&row.logits, max, sampling.temperature, draw);
        return at.map_or_else(|| best(row), |at| row.ids[at]);
    }
    let candidates = candidates(row, max, sampling);
    let total: f64 = candidates.iter().map(|c| c.mass).sum();
    let target = draw * total;
    let mut reached = 0.0;
    for candidate in &candidates {
        reached += candidate.mass;
        if reached > target {
            return candidate.id;
        }
    }
    // Reached through rounding only.
    let possible = candidates.iter().rfind(|c| c.mass > 0.0);
    possible.map_or_else(|| best(row), |c| c.id)
}

/// What the sampler looks for in a full row, so that a device may return less.
pub(crate) fn query(sampling: &Sampling, draw: f64) -> Option<MassQuery> {
    if sampling.is_greedy() || sampling.top_k > 0 {
        return None;
    }
    Some(MassQuery {
        divisor: sampling.temperature,
        part: if is_uncut(sampling) {
            MassPart::AtShare(draw)
        } else {
            MassPart::Best(cut(sampling))
        },
    })
}

/// Whether every token may be drawn.
fn is_uncut(sampling: &Sampling) -> bool {
    sampling.top_k == 0 && sampling.top_p >= 1.0 && sampling.min_p <= 0.0
}

/// Top-p and min-p.
fn cut(sampling: &Sampling) -> MassCut {
    MassCut {
        share: f64::from(sampling.top_p),
        floor: f64::from(sampling.min_p),
    }
}

/// The highest logit, ties to the lower id.
fn best(row: &LogitsRow) -> TokenId {
    let mut best: Option<(f32, TokenId)> = None;
    for (logit, id) in row.logits.iter().zip(&row.ids) {
        let better = best.is_none_or(|(top, at)| *logit > top || (*logit == top && *id < at));
        if better {
            best = Some((*logit, *id));
        }
    }
    best.map(|(_, id)| id).unwrap_or_default()
}

/// The candidates left after all cuts, ranked, with their mass; `max` is the best logit.
fn candidates(row: &LogitsRow, max: f32, sampling: &Sampling) -> Vec<Candidate> {
    let to_candidate = |at: usize| {
        let (id, logit) = (row.ids[at], row.logits[at]);
        let mass = ranked_mass(logit, max, sampling.temperature);
        Candidate { id, logit, mass }
    };
    let cut = cut(sampling);
    let (mut left, total): (Vec<Candidate>, f64) = if sampling.top_k > 0 {
        let best = rank::best(&row.logits, &row.ids, sampling.top_k);
        let left: Vec<Candidate> = best.into_iter().map(to_candidate).collect();
        let total = left.iter().map(|c| c.mass).sum();
        (left, total)
    } else if row.mass > 0.0 {
        // The device has returned all candidates that are heavy enough.
        let all = (0..row.ids.len()).map(to_candidate).collect();
        (all, row.mass)
    } else {
        let total: f64 = mass::block_masses(&row.logits, max, sampling.temperature)
            .iter()
            .sum();
        let floor = cut.least_mass(total, row.ids.len());
        let left = indices_above(&row.logits, max, floor, sampling.temperature)
            .map(to_candidate)
            .filter(|c| c.mass >= floor);
        (left.collect(), total)
    };
    if sampling.top_k == 0 {
        rank_until_mass(&mut left, cut, total);
    }
    if let Some(last) = first_reaching(&left, cut, total) {
        left.truncate(last + 1);
    }
    // The best has mass 1, whatever was cut.
    left.retain(|c| c.mass >= cut.floor);
    left
}

/// Index at which the cumulative mass of ranked candidates reaches the share of a cut.
fn first_reaching(ranked: &[Candidate], cut: MassCut, total: f64) -> Option<usize> {
    cut.last_wanted(ranked.iter().map(|c| c.mass), total)
}

/// Keeps the best candidates, ranked, until their mass reaches the share of a cut, or all of them.
/// Ranks a few first, which mostly suffices.
fn rank_until_mass(left: &mut Vec<Candidate>, cut: MassCut, total: f64) {
    let by_rank = |a: &Candidate, b: &Candidate| rank::by_rank(&(a.logit, a.id), &(b.logit, b.id));
    let mut few = 128;
    while few < left.len() {
        left.select_nth_unstable_by(few, by_rank);
        left[..few].sort_unstable_by(by_rank);
        if let Some(last) = first_reaching(&left[..few], cut, total) {
            left.truncate(last + 1);
            return;
        }
        few *= 8;
    }
    left.sort_unstable_by(by_rank);
}

/// Indices of logits whose mass may reach `floor`; a few lighter ones may be included.
fn indices_above(
    logits: &[f32],
    max: f32,
    floor: f64,
    temperature: f32,
) -> impl Iterator<Item = usize> + '_ {
    // Slightly below the exact bound, for rounding.
    let bound = f64::from(max) + f64::from(temperature) * (floor.ln() - 1e-6);
    let bound = (bound - 1e-6 * bound.abs()) as f32;
    let places = logits.iter().enumerate();
    places.filter_map(move |(at, logit)| (*logit >= bound || floor == 0.0).then_some(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::rng::uniform;
    use contract::LogitsRequest;
    use proptest::prelude::*;

    fn row(logits: &[f32]) -> LogitsRow {
        LogitsRow {
            ids: (0..logits.len() as u32).map(TokenId).collect(),
            logits: logits.to_vec(),
            raw: logits.to_vec(),
            ..LogitsRow::default()
        }
    }

    /// The ranked head of a row, as a device returns it for `LogitsSelection::TopK(k)`.
    fn top(row: &LogitsRow, k: usize) -> LogitsRow {
        let mut order: Vec<usize> = (0..row.ids.len()).collect();
        order.sort_by(|a, b| row.logits[*b].total_cmp(&row.logits[*a]).then(a.cmp(b)));
        order.truncate(k);
        LogitsRow {
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

    /// Whether top-p cuts so close to a token's edge that rounding decides.
    fn cuts_an_edge(logits: &[f32], s: &Sampling) -> bool {
        let uncut = Sampling {
            top_p: 1.0,
            min_p: 0.0,
            ..s.clone()
        };
        let mut p = exact(logits, &uncut);
        p.sort_by(|a, b| b.total_cmp(a));
        let mut reached = 0.0;
        p.iter().any(|p| {
            reached += p;
            (reached - f64::from(s.top_p)).abs() < 1e-5
        })
    }

    /// The distribution by definition: all sorted, all in f64, cut after cut.
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
        let mut left = vec![0.0; p.len()];
        survivors.iter().for_each(|i| left[*i] = p[*i] / mass);
        left
    }

    const N: u64 = 40_000;

    /// Pearson's statistic of `N` draws against `exact`, and its degrees of freedom. Impossible
    /// tokens count as infinitely bad.
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

    /// Wilson and Hilferty's approximation of the 1 - 1e-5 quantile.
    fn limit(degrees: usize) -> f64 {
        let d = degrees as f64;
        let z = 4.265;
        d * (1.0 - 2.0 / (9.0 * d) + z * (2.0 / (9.0 * d)).sqrt()).powi(3)
    }

    const LOGITS: [f32; 12] = [
        1.0, 0.5, 2.0, -1.0, 0.5, 3.0, -4.0, 0.0, 1.5, 2.0, -0.5, 0.25,
    ];

    #[test]
    fn samples_follow_the_exact_distribution() {
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
    fn wrong_sampler_fails_the_chi_square_test() {
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
    fn ties_pick_the_lower_id() {
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
    fn cuts_always_leave_one_token() {
        let s = sampling(1.0, 1, 0.0, 1.0);
        assert_eq!(choose(&row(&LOGITS), &s, 0.999_999), TokenId(5));
        let s = sampling(1.0, 0, 0.0, 0.0);
        assert_eq!(choose(&row(&LOGITS), &s, 0.999_999), TokenId(5));
    }

    #[test]
    fn infinite_logits_still_yield_a_token() {
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
        fn support_after_cuts_matches_the_definition(
            logits in prop_oneof![
                prop::collection::vec(-8.0_f32..8.0, 1..40),
                prop::collection::vec(-2.0_f32..2.0, 300..900),
            ],
            top_k in 0..12_usize,
            top_p in 0.0_f32..=1.0,
            min_p in prop::sample::select(vec![0.0_f32, 0.05, 0.5]),
            temperature in 0.1_f32..3.0,
            draw in 0.0..1.0_f64,
        ) {
            let s = sampling(temperature, top_k, top_p, min_p);
            prop_assume!(!cuts_an_edge(&logits, &s));
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let left = candidates(&row(&logits), max, &s);
            let total: f64 = left.iter().map(|c| c.mass).sum();
            let expected = exact(&logits, &s);
            for c in &left {
                prop_assert!((c.mass / total - expected[c.id.index()]).abs() < 1e-9);
            }
            let support = expected.iter().filter(|p| **p > 0.0).count();
            prop_assert_eq!(left.len(), support);
            prop_assert!(expected[choose(&row(&logits), &s, draw).index()] > 0.0);
        }

        /// A device that answers by a part of the row leaves the choice to the same numbers.
        #[test]
        fn part_of_a_row_and_full_row_choose_the_same_token(
            logits in prop_oneof![
                prop::collection::vec(-8.0_f32..8.0, 1..40),
                prop::collection::vec(prop::sample::select(vec![-1.0_f32, 0.0, 2.0]), 1..60),
                prop::collection::vec(-2.0_f32..6.0, 500..1500),
            ],
            top_p in prop::sample::select(vec![0.0_f32, 0.1, 0.5, 0.9, 0.999_999_9, 1.0]),
            min_p in prop::sample::select(vec![0.0_f32, 0.05, 0.5, 1.0]),
            temperature in 0.1_f32..3.0,
            draw in 0.0..1.0_f64,
        ) {
            let s = sampling(temperature, 0, top_p, min_p);
            let full = row(&logits);
            let request = LogitsRequest { mass: query(&s, draw), ..LogitsRequest::full() };
            let part = conformance::fake::answer(logits.clone(), &request);
            let whole = part.ids.len() == logits.len();
            prop_assert!(part.mass > 0.0 || whole);
            prop_assert_eq!(choose(&part, &s, draw), choose(&full, &s, draw));
        }

        #[test]
        fn top_k_row_and_full_row_choose_the_same_token(
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
