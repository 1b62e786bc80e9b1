//! Mass of the tokens of a logits row, and the part of a row that decides about a share of it.
//!
//! The mass of a token is `exp((x - max) / divisor)`, relative to the best token's 1. These
//! functions are the definition: every device must return the same totals and tokens.
//!
//! Sums go over vocabularies of a quarter of a million tokens, so the exponential is a branch-free
//! f32 polynomial, which the compiler vectorizes. It uses no fused multiply-add, so every machine
//! gives the same bits. Its error of 2e-7 is far below the effect of a logit's last digit. Sums are
//! f64.

/// Tokens whose mass is summed as one block.
pub const BLOCK: usize = 512;
/// Partial sums side by side within a block: token `i` of the block belongs to sum `i % LANES`.
pub const LANES: usize = 8;

/// What the holder of a full row is going to look for, so that a device may return the part that
/// decides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MassQuery {
    /// Divides the distance to the best logit; above 0.
    pub divisor: f32,
    /// The part.
    pub part: MassPart,
}

/// The part of a row that decides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MassPart {
    /// The token that [`pick`] finds at this share of the total, from `[0, 1)`.
    AtShare(f64),
    /// The best tokens: see [`MassCut`].
    Best(MassCut),
}

/// Which of the best tokens are wanted: until their mass reaches `share` of the total, if that is
/// below 1, and none with a mass below `floor`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MassCut {
    /// Share of the total mass.
    pub share: f64,
    /// Mass relative to the best token's.
    pub floor: f64,
}

impl MassCut {
    /// A mass below which no token is wanted, in a row of `n` tokens with this total.
    ///
    /// Tokens below `(1 - share) * total / n` weigh at most `(1 - share) * total` together, so the
    /// share needs none of them. Half of that bound leaves a margin for rounding.
    pub fn least_mass(self, total: f64, n: usize) -> f64 {
        let least = 0.5 * (1.0 - self.share).max(0.0) * total / n as f64;
        least.min(1.0).max(self.floor)
    }

    /// Index at which the cumulative mass of ranked tokens reaches the share; `None` if it never
    /// does, or all are wanted.
    pub fn last_wanted(self, ranked: impl Iterator<Item = f64>, total: f64) -> Option<usize> {
        if self.share >= 1.0 {
            return None;
        }
        let (target, mut reached) = (self.share * total, 0.0);
        let mut ranked = ranked;
        ranked.position(|mass| {
            reached += mass;
            reached >= target
        })
    }

    /// How many of the best logits of a row of `n` tokens, best first, have at least
    /// [`MassCut::least_mass`]; `None` if they may lack some that are wanted.
    pub fn covered_by(self, best: &[f32], divisor: f32, total: f64, n: usize) -> Option<usize> {
        let max = *best.first()?;
        let least = self.least_mass(total, n);
        let masses = || best.iter().map(|logit| ranked_mass(*logit, max, divisor));
        let heavy = masses().take_while(|mass| *mass >= least).count();
        let all = heavy < best.len() || best.len() == n;
        (all || self.last_wanted(masses(), total).is_some()).then_some(heavy)
    }
}

/// The mass of a ranked token, in f64.
pub fn ranked_mass(logit: f32, max: f32, divisor: f32) -> f64 {
    let below = f64::from(logit) - f64::from(max);
    // Equal infinities give NaN; the best stays the best.
    match below {
        0.0 => 1.0,
        below if below.is_nan() => f64::from(u8::from(logit == max)),
        below => (below / f64::from(divisor)).exp(),
    }
}

/// The mass of each block of a row `[vocab]`, in order; `max` is the best logit.
pub fn block_masses(logits: &[f32], max: f32, divisor: f32) -> Vec<f64> {
    let blocks = logits.chunks(BLOCK);
    blocks
        .map(|block| {
            let mut lanes = [0.0_f64; LANES];
            let groups = block.chunks_exact(LANES);
            let rest = groups.remainder();
            for group in groups {
                for (lane, logit) in lanes.iter_mut().zip(group) {
                    *lane += f64::from(exp((logit - max) / divisor));
                }
            }
            for (lane, logit) in lanes.iter_mut().zip(rest) {
                *lane += f64::from(exp((logit - max) / divisor));
            }
            lanes.iter().sum()
        })
        .collect()
}

/// Index at which the cumulative mass, in id order, passes `share` of the total. `None` if
/// the row has no mass.
pub fn pick(logits: &[f32], max: f32, divisor: f32, share: f64) -> Option<usize> {
    let masses = block_masses(logits, max, divisor);
    let target = share * masses.iter().sum::<f64>();
    let mut reached = 0.0;
    let mut possible = None;
    for (i, mass) in masses.iter().enumerate() {
        if reached + mass <= target {
            reached += mass;
            continue;
        }
        let start = i * BLOCK;
        for (at, logit) in logits.iter().enumerate().skip(start).take(BLOCK) {
            let mass = f64::from(exp((logit - max) / divisor));
            reached += mass;
            if mass > 0.0 {
                possible = Some(at);
                if reached > target {
                    return possible;
                }
            }
        }
        // The lanes' sum and this one differ in the last digit, and the share fell between.
        return possible;
    }
    // Reached through rounding only: the last token with any mass.
    let mass = |logit: &f32| exp((logit - max) / divisor);
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

    proptest! {
        /// What covers a cut is decided by the best tokens as by the whole row.
        #[test]
        fn covering_tokens_reach_the_cut_of_the_whole_row(
            logits in prop::collection::vec(-6.0_f32..3.0, 1..400),
            divisor in 0.2_f32..2.0, share in 0.0..1.2_f64, floor in 0.0..0.3_f64,
            k in 1..80_usize,
        ) {
            let mut ranked = logits.clone();
            ranked.sort_by(|a, b| b.total_cmp(a));
            let (max, n) = (ranked[0], ranked.len());
            let total: f64 = block_masses(&logits, max, divisor).iter().sum();
            let cut = MassCut { share, floor };
            let least = cut.least_mass(total, n);
            let wanted = |best: &[f32]| {
                let masses = best.iter().map(|logit| ranked_mass(*logit, max, divisor));
                let masses: Vec<f64> = masses.filter(|mass| *mass >= least).collect();
                let last = cut.last_wanted(masses.iter().copied(), total);
                masses[..last.map_or(masses.len(), |last| last + 1)].to_vec()
            };
            let best = &ranked[..k.min(n)];
            match cut.covered_by(best, divisor, total, n) {
                Some(heavy) => prop_assert_eq!(wanted(&best[..heavy]), wanted(&ranked)),
                None => prop_assert!(best.len() < n),
            }
        }
    }

    /// The first of the sums that passes `target`, which `before` does not.
    fn first_above(sums: &[f64], before: f64, target: f64) -> Option<usize> {
        let earlier = |i: usize| if i > 0 { sums[i - 1] } else { before };
        let mut found = (0..sums.len()).filter(|i| sums[*i] > target && earlier(*i) <= target);
        let first = found.next();
        assert_eq!(found.next(), None, "sums do not fall");
        first
    }

    /// [`pick`] as `kernels/logits/mass.cu` does it: running sums of the blocks and then of one
    /// block's tokens, in which each place is looked at alone. `None` is left to [`pick`].
    fn pick_from_sums(logits: &[f32], max: f32, divisor: f32, share: f64) -> Option<usize> {
        let running = |masses: Vec<f64>, before: f64| -> Vec<f64> {
            let add = |reached: &mut f64, mass: f64| {
                *reached += mass;
                Some(*reached)
            };
            masses.into_iter().scan(before, add).collect()
        };
        let blocks = running(block_masses(logits, max, divisor), 0.0);
        let target = share * blocks.last()?;
        let block = first_above(&blocks, 0.0, target)?;
        let before = if block > 0 { blocks[block - 1] } else { 0.0 };
        let ids = block * BLOCK..logits.len().min((block + 1) * BLOCK);
        let mass = |id: usize| f64::from(exp((logits[id] - max) / divisor));
        let tokens = running(ids.clone().map(mass).collect(), before);
        match first_above(&tokens, before, target) {
            Some(at) => Some(ids.start + at),
            None => ids.rev().find(|id| mass(*id) > 0.0),
        }
    }

    proptest! {
        #[test]
        fn token_from_running_sums_is_the_picked_one(
            mut logits in prop_oneof![
                prop::collection::vec(-9.0_f32..3.0, 1..2000),
                prop::collection::vec(
                    prop::sample::select(vec![-90.0_f32, -1.0, f32::NEG_INFINITY]), 500..1600),
            ],
            best in any::<prop::sample::Index>(),
            divisor in 0.05_f32..3.0,
            share in prop_oneof![0.0..1.0_f64, Just(0.0), Just(1.0 - f64::EPSILON / 2.0)],
            exact in any::<bool>(),
        ) {
            let at = best.index(logits.len());
            logits[at] = 3.0;
            let masses = block_masses(&logits, 3.0, divisor);
            let total: f64 = masses.iter().sum();
            // A share at the end of a block is where sums of lanes and of tokens part.
            let share = if exact && masses.len() > 1 { masses[0] / total } else { share };
            let picked = pick(&logits, 3.0, divisor, share);
            match pick_from_sums(&logits, 3.0, divisor, share) {
                Some(found) => prop_assert_eq!(Some(found), picked),
                None => prop_assert!(share * total >= total),
            }
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
