//! Which experts have slots: those with the highest scores, up to noise.
//!
//! A score is the number of steps that used an expert, where each step counts half as much as one
//! [`HALF_LIFE`] steps later. An expert takes the slot of another only if its score is higher by
//! the factor [`RATIO`] and by [`MARGIN`], so that uniform routing, where scores differ by chance
//! alone, moves almost none.

/// Steps after which a use counts half.
const HALF_LIFE: f32 = 512.0;
/// How many times the score of an expert on the device one in host memory must have.
const RATIO: f32 = 1.5;
/// How much higher it must be besides.
const MARGIN: f32 = 8.0;
/// Scores are divided by their unit before it comes near the range of f32.
const LARGEST_UNIT: f32 = 1e20;

/// An expert of a layer takes the slot of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Swap {
    /// Layer with experts, counted among these.
    pub(crate) layer: usize,
    pub(crate) slot: usize,
    /// The expert that leaves; it stays in host memory.
    pub(crate) leaves: usize,
    /// The expert that comes.
    pub(crate) comes: usize,
}

/// Scores and slots of every layer with experts.
#[derive(Debug)]
pub(crate) struct ExpertCache {
    n_experts: usize,
    n_slots: usize,
    /// Counts of the last call, `[layer][expert]`.
    counts: Vec<u32>,
    /// In units of the weight of a use at that time, `[layer][expert]`.
    scores: Vec<f32>,
    /// The expert in each slot, `[layer][slot]`.
    experts: Vec<usize>,
    /// Whether an expert has a slot, `[layer][expert]`.
    has_slot: Vec<bool>,
    /// What a use weighs now.
    unit: f32,
    reads: ExpertReads,
}

/// Reads of experts since the model was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ExpertReads {
    pub(crate) all: u64,
    /// Of those, the ones of experts with a slot.
    pub(crate) in_slots: u64,
}

impl ExpertCache {
    /// The first experts of each layer have the slots.
    pub(crate) fn new(layers: usize, n_experts: usize, n_slots: usize) -> ExpertCache {
        let of_layer = (0..n_experts).map(|expert| expert < n_slots);
        let has_slot: Vec<bool> = of_layer.collect();
        ExpertCache {
            n_experts,
            n_slots,
            counts: vec![0; layers * n_experts],
            scores: vec![0.0; layers * n_experts],
            experts: (0..layers).flat_map(|_| 0..n_slots).collect(),
            has_slot: has_slot.repeat(layers),
            unit: 1.0,
            reads: ExpertReads::default(),
        }
    }

    pub(crate) fn reads(&self) -> ExpertReads {
        self.reads
    }

    /// Takes the counts of uses so far, `[layer][expert]`, which may wrap, and returns up to `most`
    /// swaps of different layers and slots, largest gain first. They count as made.
    pub(crate) fn step(&mut self, counts: &[u32], most: usize) -> Vec<Swap> {
        self.add(counts);
        let mut found: Vec<(f32, Swap)> = Vec::new();
        for layer in 0..self.experts.len() / self.n_slots.max(1) {
            let scores = &self.scores[layer * self.n_experts..][..self.n_experts];
            let has_slot = &self.has_slot[layer * self.n_experts..][..self.n_experts];
            let outside = (0..self.n_experts).filter(|expert| !has_slot[*expert]);
            let Some(comes) = outside.max_by(|a, b| scores[*a].total_cmp(&scores[*b])) else {
                continue;
            };
            let slots = &self.experts[layer * self.n_slots..][..self.n_slots];
            let coldest =
                (0..self.n_slots).min_by(|a, b| scores[slots[*a]].total_cmp(&scores[slots[*b]]));
            let Some(slot) = coldest else { continue };
            let leaves = slots[slot];
            let gain = scores[comes] - RATIO * scores[leaves] - MARGIN * self.unit;
            if gain > 0.0 {
                let swap = Swap {
                    layer,
                    slot,
                    leaves,
                    comes,
                };
                found.push((gain, swap));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found.truncate(most);
        for (_, swap) in &found {
            self.experts[swap.layer * self.n_slots + swap.slot] = swap.comes;
            self.has_slot[swap.layer * self.n_experts + swap.leaves] = false;
            self.has_slot[swap.layer * self.n_experts + swap.comes] = true;
        }
        found.into_iter().map(|(_, swap)| swap).collect()
    }

    /// Adds the uses since the last call to the scores.
    fn add(&mut self, counts: &[u32]) {
        self.unit *= (std::f32::consts::LN_2 / HALF_LIFE).exp();
        if self.unit > LARGEST_UNIT {
            for score in &mut self.scores {
                *score /= self.unit;
            }
            self.unit = 1.0;
        }
        let all = self.counts.iter_mut().zip(counts).zip(&mut self.scores);
        for (((old, new), score), has_slot) in all.zip(&self.has_slot) {
            // A step of many rows reads an expert once for eight of them.
            if new != old {
                let uses = new.wrapping_sub(*old);
                *score += self.unit * uses as f32;
                *old = *new;
                self.reads.all += u64::from(uses);
                self.reads.in_slots += u64::from(if *has_slot { uses } else { 0 });
            }
        }
    }

    #[cfg(test)]
    fn holds(&self, layer: usize, expert: usize) -> bool {
        self.has_slot[layer * self.n_experts + expert]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: usize = 3;
    const EXPERTS: usize = 64;
    const USED: usize = 4;

    /// xorshift64*, in [0, 1).
    struct Xorshift(u64);

    impl Xorshift {
        fn next(&mut self) -> f64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    /// Shares of reads that find a slot and swaps per step, over the second half of `steps`.
    /// `chance` is the unnormalised chance of an expert of a layer at a step.
    fn simulate(steps: usize, chance: impl Fn(usize, usize, usize) -> f64) -> (f64, f64) {
        let mut random = Xorshift(7);
        let mut cache = ExpertCache::new(LAYERS, EXPERTS, EXPERTS / 2);
        let mut counts = vec![0_u32; LAYERS * EXPERTS];
        let (mut hits, mut reads, mut swaps) = (0, 0, 0);
        for step in 0..steps {
            for layer in 0..LAYERS {
                // The largest of u^(1/w) are a weighted choice without repetition.
                let mut keys: Vec<(f64, usize)> = (0..EXPERTS)
                    .map(|e| (random.next().ln() / chance(step, layer, e), e))
                    .collect();
                keys.sort_by(|a, b| b.0.total_cmp(&a.0));
                for (_, expert) in &keys[..USED] {
                    counts[layer * EXPERTS + expert] =
                        counts[layer * EXPERTS + expert].wrapping_add(1);
                    if step >= steps / 2 {
                        reads += 1;
                        hits += usize::from(cache.holds(layer, *expert));
                    }
                }
            }
            let made = cache.step(&counts, 2).len();
            if step >= steps / 2 {
                swaps += made;
            }
        }
        let n = (steps - steps / 2) as f64;
        (f64::from(hits as u32) / f64::from(reads), swaps as f64 / n)
    }

    #[test]
    fn uniform_routing_moves_almost_no_expert() {
        let (hits, swaps) = simulate(2000, |_, _, _| 1.0);
        assert!((0.45..0.56).contains(&hits), "{hits}");
        assert!(swaps < 0.05, "{swaps} a step");
    }

    #[test]
    fn experts_used_most_have_the_slots() {
        // Chances of 1 / rank; ranks differ by layer, and half of the first ranks begin outside.
        let zipf =
            |_: usize, layer: usize, e: usize| 1.0 / (1 + (e * 13 + layer * 5) % EXPERTS) as f64;
        let (hits, swaps) = simulate(2000, zipf);
        assert!(hits > 0.75, "{hits}");
        assert!(swaps < 0.1, "{swaps} a step");
    }

    #[test]
    fn slots_follow_a_text_that_changes() {
        let zipf = |step: usize, _: usize, e: usize| {
            let rank = if step < 800 { e } else { EXPERTS - 1 - e };
            1.0 / (1 + rank) as f64
        };
        let (hits, _) = simulate(3200, zipf);
        assert!(hits > 0.75, "{hits}");
    }

    #[test]
    fn swaps_keep_to_the_budget_and_to_one_slot_of_a_layer() {
        let mut cache = ExpertCache::new(3, 8, 2);
        let mut counts = vec![0; 24];
        assert_eq!(cache.step(&counts, 8), []);
        for layer in 0..3 {
            counts[layer * 8 + 7] = 100 + layer as u32;
            counts[layer * 8] = 5;
        }
        let swap = |layer| Swap {
            layer,
            slot: 1,
            leaves: 1,
            comes: 7,
        };
        assert_eq!(cache.step(&counts, 2), [swap(2), swap(1)]);
        let (all, in_slots) = (3 * 5 + 100 + 101 + 102, 3 * 5);
        assert_eq!(cache.reads(), ExpertReads { all, in_slots });
        assert_eq!(cache.step(&counts, 2), [swap(0)]);
        assert_eq!(cache.step(&counts, 2), []);
        assert!(cache.holds(0, 7) && cache.holds(0, 0) && !cache.holds(0, 1));
    }

    #[test]
    fn counts_may_wrap_and_scores_stay_finite() {
        let mut cache = ExpertCache::new(1, 2, 1);
        cache.counts = vec![u32::MAX, 0];
        assert_eq!(cache.step(&[3, 0], 1), []);
        assert!((3.9..4.1).contains(&cache.scores[0]), "{:?}", cache.scores);
        cache.unit = LARGEST_UNIT;
        cache.scores = vec![0.0, 100.0 * LARGEST_UNIT];
        assert_eq!(cache.step(&[3, 0], 1).len(), 1);
        assert!(cache.unit == 1.0 && (90.0..101.0).contains(&cache.scores[1]));
    }

    #[test]
    fn a_layer_whose_experts_all_have_slots_moves_none() {
        let mut cache = ExpertCache::new(2, 4, 4);
        assert_eq!(cache.step(&[100, 0, 0, 0, 0, 0, 0, 90], 4), []);
    }
}
