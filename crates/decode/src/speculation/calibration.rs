//! Calibration: from what a source says of a token to the chance that the token is accepted.
//!
//! A source's figure is a log-probability, a confidence, or the length of a match and the share of
//! its continuations. Each implies a chance of its own, and belongs to a class. Per class, the
//! hits against the chances that were stated correct the next chance. Classes of one depth lean on
//! the class of all depths, and that one on the source's own word.
//!
//! Tokens that several sources propose have classes of their own, and so have tokens of a source
//! whose rivals drafted something else. All requests share the records, which fade slowly.
//! [`Trust`] corrects them for one sequence.

use super::sources::{DraftSource, SourceSet};

/// Classes of figures.
const CLASSES: usize = 32;
/// Upper bounds of the classes of chances.
const CHANCES: [f64; 14] = [
    0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.975,
];
/// The class of the least chance with a stated confidence.
const CONFIDENT: usize = CHANCES.len() + 1;
/// Upper bounds of the classes of match lengths.
const MATCHES: [usize; 7] = [3, 4, 6, 9, 16, 32, 64];
/// Upper bounds of the classes of a continuation's share.
const SHARES: [f64; 3] = [0.4, 0.7, 0.85];
/// Upper bounds of the classes of depths.
const DEPTHS: [usize; 5] = [2, 3, 5, 9, 16];
/// Weight of what a class leans on, in tokens.
const PRIOR: f64 = 4.0;
/// Tokens at which a class forgets half.
const MEMORY: f32 = 256.0;
/// The least and the greatest chance of a token.
const RANGE: (f64, f64) = (1e-4, 0.98);

/// A source's own estimate of a token's chance, and its class.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Figure {
    pub(crate) chance: f64,
    class: usize,
}

impl Figure {
    /// The figure of a log-probability.
    pub(crate) fn of_log_prob(log_prob: f32) -> Figure {
        Figure::of_chance(f64::from(log_prob).exp().min(1.0))
    }

    /// The figure of a log-probability beside a stated confidence that the best token of the list
    /// is accepted, whose log-probability is `best`.
    pub(crate) fn of_confidence(log_prob: f32, best: f32, confidence: f32) -> Figure {
        let confidence = f64::from(confidence).clamp(0.0, 1.0);
        let chance = f64::from(log_prob - best).exp() * confidence;
        let most = if log_prob < best {
            1.0 - confidence
        } else {
            confidence
        };
        let Figure { chance, class } = Figure::of_chance(chance.min(most));
        Figure {
            chance,
            class: CONFIDENT + class,
        }
    }

    /// The figure of a continuation: the matching tokens, and its share of the occurrences.
    pub(crate) fn of_match(len: usize, share: f64) -> Figure {
        // Long matches end less often; three tokens match by chance in most texts.
        let len_chance = len as f64 / (len as f64 + 3.0);
        let shares = SHARES.len() + 1;
        Figure {
            chance: len_chance * share,
            class: MATCHES.partition_point(|bound| *bound < len) * shares
                + SHARES.partition_point(|bound| *bound <= share),
        }
    }

    /// The figure of a chance.
    fn of_chance(chance: f64) -> Figure {
        Figure {
            chance,
            class: CHANCES.partition_point(|bound| *bound <= chance),
        }
    }
}

/// Who proposes a token, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Proposers {
    /// The sources that propose it.
    pub(crate) sources: SourceSet,
    /// The sources that propose anything at its place.
    pub(crate) active: SourceSet,
    /// Its depth below the last token that is certain.
    pub(crate) depth: usize,
}

/// Decayed sums of tokens, of hits among them, and of the hits that were expected.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    hits: f32,
    expected: f32,
    tokens: f32,
}

impl Record {
    /// A chance of `before`, corrected. If all tokens had this chance, the result is their share
    /// of hits, leaning on `before` with the weight [`PRIOR`].
    fn chance(self, before: f64) -> f64 {
        let prior = PRIOR * before;
        let ratio = (f64::from(self.hits) + prior) / (f64::from(self.expected) + prior);
        (before * ratio).clamp(RANGE.0, RANGE.1)
    }

    fn observe(&mut self, expected: f64, hit: bool) {
        self.hits += f32::from(u8::from(hit));
        self.expected += expected as f32;
        self.tokens += 1.0;
        if self.tokens > MEMORY {
            self.decay(0.5);
        }
    }

    fn decay(&mut self, factor: f32) {
        self.hits *= factor;
        self.expected *= factor;
        self.tokens *= factor;
    }
}

/// The records of all classes.
#[derive(Debug)]
pub(crate) struct Calibration {
    /// `[sources, active, class]`.
    all_depths: Vec<Record>,
    /// `[sources, active, class, depth]`.
    by_depth: Vec<Record>,
}

impl Default for Calibration {
    fn default() -> Calibration {
        let n = SourceSet::COUNT * SourceSet::COUNT * CLASSES;
        Calibration {
            all_depths: vec![Record::default(); n],
            by_depth: vec![Record::default(); n * (DEPTHS.len() + 1)],
        }
    }
}

impl Calibration {
    /// The chance of a token that one source proposes with this figure.
    pub(crate) fn chance(&self, of: Proposers, figure: Figure) -> f64 {
        let (all, one) = places(of, figure);
        let chance = self.all_depths[all].chance(figure.chance);
        self.by_depth[one].chance(chance)
    }

    /// The figure of a token on which several sources agree: the greatest of their chances alone.
    pub(crate) fn agreed(
        &self,
        of: Proposers,
        figures: impl Iterator<Item = (DraftSource, Figure)>,
    ) -> Figure {
        let alone = figures.map(|(source, figure)| {
            let sources = SourceSet::NONE.with(source);
            self.chance(Proposers { sources, ..of }, figure)
        });
        Figure::of_chance(alone.fold(0.0, f64::max))
    }

    /// Records whether a token was the next one.
    pub(crate) fn observe(&mut self, of: Proposers, figure: Figure, hit: bool) {
        let (all, one) = places(of, figure);
        let chance = self.all_depths[all].chance(figure.chance);
        self.by_depth[one].observe(chance, hit);
        self.all_depths[all].observe(figure.chance, hit);
    }
}

/// The indices of a class over all depths and at one depth.
fn places(of: Proposers, figure: Figure) -> (usize, usize) {
    let sets = of.sources.index() * SourceSet::COUNT + of.active.index();
    let all = sets * CLASSES + figure.class.min(CLASSES - 1);
    let depth = DEPTHS.partition_point(|bound| *bound <= of.depth);
    (all, all * (DEPTHS.len() + 1) + depth)
}

/// How much better or worse than calibrated the sources do on one sequence, by sources and chance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trust([[Record; TRUST_CHANCES.len() + 1]; SourceSet::COUNT]);

/// Upper bounds of the chances that a sequence's records distinguish.
const TRUST_CHANCES: [f64; 3] = [0.15, 0.5, 0.85];

impl Default for Trust {
    fn default() -> Trust {
        let none = [Record::default(); TRUST_CHANCES.len() + 1];
        Trust([none; SourceSet::COUNT])
    }
}

impl Trust {
    /// Decay of older steps, per step.
    const DECAY: f32 = 0.93;

    /// The chance of a token on this sequence.
    pub(crate) fn apply(&self, sources: SourceSet, chance: f64) -> f64 {
        let class = TRUST_CHANCES.partition_point(|bound| *bound <= chance);
        self.0[sources.index()][class].chance(chance)
    }

    /// Records whether a token with this calibrated chance was the next one.
    pub(crate) fn observe(&mut self, sources: SourceSet, chance: f64, hit: bool) {
        let class = TRUST_CHANCES.partition_point(|bound| *bound <= chance);
        self.0[sources.index()][class].observe(chance, hit);
    }

    /// Ends a step.
    pub(crate) fn decay(&mut self) {
        for record in self.0.iter_mut().flatten() {
            record.decay(Trust::DECAY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sources::DraftSource::{Block, Mtp, Suffix};
    use super::*;

    fn proposers(sources: SourceSet, depth: usize) -> Proposers {
        Proposers {
            sources,
            active: SourceSet::ALL,
            depth,
        }
    }

    #[test]
    fn unknown_classes_take_the_source_at_its_word() {
        let calibration = Calibration::default();
        let block = proposers(SourceSet::of(&[Block]), 1);
        for chance in [0.02, 0.4, 0.93] {
            let figure = Figure::of_log_prob(f64::ln(chance) as f32);
            assert!((calibration.chance(block, figure) - chance).abs() < 1e-6);
        }
        // Longer matches and greater shares are better.
        let chance = |len, share| Figure::of_match(len, share).chance;
        assert!(chance(3, 0.8) < chance(9, 0.8) && chance(9, 0.5) < chance(9, 0.8));
    }

    #[test]
    fn chances_approach_the_rate_of_hits_per_source_class_and_depth() {
        let mut calibration = Calibration::default();
        let sure = Figure::of_log_prob(-0.05);
        let (block, mtp) = (SourceSet::of(&[Block]), SourceSet::of(&[Mtp]));
        for i in 0..400 {
            calibration.observe(proposers(block, 1), sure, i % 2 == 0);
            calibration.observe(proposers(mtp, 1), sure, true);
        }
        let near = calibration.chance(proposers(block, 1), sure);
        assert!((near - 0.5).abs() < 0.03, "{near}");
        assert!(calibration.chance(proposers(mtp, 1), sure) > 0.94);
        // Other depths of the class follow, other classes do not.
        let deep = calibration.chance(proposers(block, 8), sure);
        assert!((0.45..0.6).contains(&deep), "{deep}");
        let unsure = Figure::of_log_prob(-1.0);
        let other = calibration.chance(proposers(block, 1), unsure);
        assert!((other - f64::exp(-1.0)).abs() < 1e-6);
        // The past is forgotten.
        for _ in 0..400 {
            calibration.observe(proposers(block, 1), sure, true);
        }
        assert!(calibration.chance(proposers(block, 1), sure) > 0.85);
    }

    #[test]
    fn agreeing_sources_have_a_class_of_their_own() {
        let mut calibration = Calibration::default();
        let both = proposers(SourceSet::of(&[Block, Suffix]), 1);
        let figures = [
            (Block, Figure::of_log_prob(-0.7)),
            (Suffix, Figure::of_match(6, 0.5)),
        ];
        let agreed = calibration.agreed(both, figures.into_iter());
        assert!((agreed.chance - f64::exp(-0.7)).abs() < 1e-6);
        for _ in 0..100 {
            calibration.observe(both, agreed, true);
        }
        assert!(calibration.chance(both, agreed) > 0.9);
        let alone = proposers(SourceSet::of(&[Block]), 1);
        assert!(calibration.chance(alone, figures[0].1) < 0.5);
    }

    #[test]
    fn confidence_scales_a_list_to_its_best_token() {
        let best = Figure::of_confidence(-0.1, -0.1, 0.6);
        let second = Figure::of_confidence(-3.1, -0.1, 0.6);
        assert!((best.chance - 0.6).abs() < 1e-6);
        assert!((second.chance - 0.6 * f64::exp(-3.0)).abs() < 1e-6);
        assert!(Figure::of_confidence(-0.2, -0.1, 0.9).chance <= 0.1 + 1e-6);
        assert_ne!(best.class, Figure::of_log_prob(f32::ln(0.6)).class);
    }

    #[test]
    fn trust_follows_one_sequence_and_fades() {
        let (mut trust, suffix) = (Trust::default(), SourceSet::of(&[Suffix]));
        for _ in 0..20 {
            trust.observe(suffix, 0.8, false);
        }
        assert!(trust.apply(suffix, 0.8) < 0.2);
        assert!((trust.apply(SourceSet::of(&[Mtp]), 0.8) - 0.8).abs() < 1e-9);
        (0..100).for_each(|_| trust.decay());
        assert!(trust.apply(suffix, 0.8) > 0.75);
    }
}
