//! From a draft's marginals to a tree: the likeliest prefixes first (DDTree).
//!
//! A node of depth `d` reached by candidates `c_1 … c_d` has the weight `w = Σ log p_j(c_j)`. Positions being
//! independent, `Σ exp(w)` over the nodes is the expected number of drafted tokens kept, so the best tree of a
//! size is the likeliest prefixes of that number, and they come out of a heap in falling order.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use contract::{DraftCandidates, NodeIdx, TokenId, Tree};

/// How large a tree may get, and how it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Drafted nodes.
    pub budget: usize,
    /// Depth of the deepest node.
    pub max_depth: usize,
    /// How the first nodes are chosen.
    pub seed: Seed,
}

/// How the first nodes of a tree are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Seed {
    /// As all others.
    #[default]
    None,
    /// The best candidate of every depth comes first, down to the end; the rest of the budget goes to the
    /// likeliest prefixes beside that chain.
    Chain,
    /// That chain and nothing else.
    ChainOnly,
}

/// A tree and the weight of each node.
#[derive(Debug, Clone, PartialEq)]
pub struct Grown {
    /// Nodes in the order of creation: the first `n` of them are a tree for every `n`.
    pub tree: Tree,
    /// `[n_nodes]`: log-probability of the way down to a node; 0 for the root and for what is forced.
    pub weights: Vec<f64>,
}

/// What a tree grows from.
#[derive(Debug, Clone, Copy)]
pub struct Soil<'a> {
    /// The root.
    pub root: TokenId,
    /// Tokens that come next for certain; they lead the tree and cost no budget.
    pub forced: &'a [TokenId],
    /// Tokens that may well come next, from another source than the draft, such as an earlier place of the
    /// text. They lie in the tree beside the draft's, at the price of the budget.
    pub hints: &'a [TokenId],
    /// What the draft says of depth 1 and on.
    pub candidates: &'a DraftCandidates,
}

/// A node that could be added next.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offer {
    /// Sum of the log-probabilities from the root down to here.
    weight: f64,
    /// The same down to the parent.
    above: f64,
    /// Order of the offers: equal weights are taken first come, first served.
    number: u32,
    parent: NodeIdx,
    depth: usize,
    rank: usize,
}

impl Eq for Offer {}

impl Ord for Offer {
    fn cmp(&self, other: &Offer) -> Ordering {
        self.weight
            .total_cmp(&other.weight)
            .then(Reverse(self.number).cmp(&Reverse(other.number)))
    }
}

impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Offer) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Log-probability that each hinted token is believed with, given those before it.
const HINT: f64 = -0.35;

/// Grows a tree.
///
/// A taken node offers its next sibling and then its first child, so no heavier prefix is ever missed, and
/// equal weights come in the order of the offers.
pub fn grow(soil: Soil<'_>, shape: Shape) -> Grown {
    let mut growth = Growth {
        grown: Grown {
            tree: Tree::root(soil.root),
            weights: vec![0.0],
        },
        candidates: soil.candidates,
        depths: depths(soil.candidates).min(shape.max_depth),
        offers: BinaryHeap::new(),
        offered: 0,
    };
    let mut stem = NodeIdx::ROOT;
    for &token in soil.forced.iter().take(shape.max_depth) {
        let Some(node) = growth.add(stem, token, 0.0) else {
            return growth.grown;
        };
        stem = node;
    }
    let first = growth.grown.tree.len();
    let full = |growth: &Growth<'_>| growth.grown.tree.len() - first >= shape.budget;
    let depth = growth.grown.tree.depth(stem);
    if shape.seed != Seed::None {
        growth.chain(stem, depth, &full);
    } else if depth < growth.depths {
        growth.offer(0.0, stem, depth + 1, 0);
    }
    // Half at most, so that a hint gone wrong leaves a tree worth its pass.
    let hints = soil.hints.len().min(shape.budget / 2);
    let (mut at, mut weight) = (stem, 0.0);
    for &token in &soil.hints[..hints] {
        if full(&growth) || growth.grown.tree.depth(at) >= shape.max_depth {
            break;
        }
        weight += HINT;
        match growth.add(at, token, weight) {
            Some(node) => at = node,
            None => break,
        }
    }
    while shape.seed != Seed::ChainOnly && !full(&growth) {
        let Some(best) = growth.offers.pop() else {
            break;
        };
        growth.take(best);
    }
    growth.grown
}

/// Positions that candidates speak of.
fn depths(candidates: &DraftCandidates) -> usize {
    candidates.ids.len().min(candidates.log_probs.len()) / candidates.k.max(1)
}

struct Growth<'a> {
    grown: Grown,
    candidates: &'a DraftCandidates,
    depths: usize,
    offers: BinaryHeap<Offer>,
    offered: u32,
}

impl Growth<'_> {
    /// Adds a node, or finds the one that carries the token; `None` where the tree is full.
    fn add(&mut self, parent: NodeIdx, token: TokenId, weight: f64) -> Option<NodeIdx> {
        let Grown { tree, weights } = &mut self.grown;
        if let Some(node) = tree.child_with(parent, token) {
            return Some(node);
        }
        let node = tree.push(parent, token).ok()?;
        weights.push(weight);
        Some(node)
    }

    fn offer(&mut self, above: f64, parent: NodeIdx, depth: usize, rank: usize) {
        let k = self.candidates.k.max(1);
        if rank >= k || depth > self.depths {
            return;
        }
        let own = self.candidates.log_probs[(depth - 1) * k + rank];
        self.offers.push(Offer {
            weight: above + f64::from(own),
            above,
            number: self.offered,
            parent,
            depth,
            rank,
        });
        self.offered += 1;
    }

    /// Makes an offered node, and the offers that follow from it.
    fn take(&mut self, best: Offer) {
        self.offer(best.above, best.parent, best.depth, best.rank + 1);
        let token = self.candidates.ids[(best.depth - 1) * self.candidates.k + best.rank];
        // A draft that names one token twice at one position offers a twin: the first one stands for both,
        // and has made its own offers. A node that came from elsewhere has made none.
        let drafted_before = (0..best.rank)
            .any(|rank| self.candidates.ids[(best.depth - 1) * self.candidates.k + rank] == token);
        if drafted_before {
            return;
        }
        if let Some(node) = self.add(best.parent, token, best.weight) {
            self.offer(best.weight, node, best.depth + 1, 0);
        }
    }

    /// The best candidates in a line below `stem`, each offering its next sibling.
    fn chain(&mut self, stem: NodeIdx, depth: usize, full: &dyn Fn(&Growth<'_>) -> bool) {
        let k = self.candidates.k.max(1);
        let (mut at, mut above) = (stem, 0.0);
        for depth in depth + 1..=self.depths {
            if full(self) {
                return;
            }
            self.offer(above, at, depth, 1);
            let first = (depth - 1) * k;
            above += f64::from(self.candidates.log_probs[first]);
            match self.add(at, self.candidates.ids[first], above) {
                Some(node) => at = node,
                None => return,
            }
        }
    }
}

/// The same candidates as if the draft's logits had been divided by `temperature`, above 0.
///
/// What is known of a row is its best candidates; the rest of its mass is spread as one token would be, which
/// leaves the order of candidates as it is and their weight against other depths nearly so.
pub fn tempered(candidates: &DraftCandidates, temperature: f32) -> DraftCandidates {
    if temperature == 1.0 || candidates.k == 0 {
        return candidates.clone();
    }
    let mut tempered = candidates.clone();
    for row in tempered.log_probs.chunks_mut(candidates.k) {
        let kept: f64 = row.iter().map(|p| f64::from(*p).exp()).sum();
        let power = 1.0 / f64::from(temperature);
        let rest = (1.0 - kept).max(0.0).powf(power);
        let sum: f64 = row.iter().map(|p| (f64::from(*p) * power).exp()).sum();
        let norm = (sum + rest).ln();
        for p in row {
            *p = (f64::from(*p) * power - norm) as f32;
        }
    }
    tempered
}

/// The first nodes of a tree: the same tree as if it had been stopped there.
pub fn cut(grown: &Grown, nodes: usize) -> Tree {
    let n = nodes.clamp(1, grown.tree.len());
    let mut tree = Tree::root(grown.tree.token(NodeIdx::ROOT));
    for node in grown.tree.nodes().take(n).skip(1) {
        if let Some(parent) = grown.tree.parent(node) {
            // A prefix of a tree breaks none of its rules.
            let _ = tree.push(parent, grown.tree.token(node));
        }
    }
    tree
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidates(log_probs: &[f32], k: usize) -> DraftCandidates {
        DraftCandidates {
            ids: (0..log_probs.len() as u32).map(TokenId).collect(),
            log_probs: log_probs.to_vec(),
            lse: vec![0.0; log_probs.len() / k],
            k,
        }
    }

    fn soil(candidates: &DraftCandidates) -> Soil<'_> {
        Soil {
            root: TokenId(99),
            forced: &[],
            hints: &[],
            candidates,
        }
    }

    fn shape(budget: usize, max_depth: usize) -> Shape {
        Shape {
            budget,
            max_depth,
            seed: Seed::None,
        }
    }

    fn falling(steps: &[Vec<f32>]) -> Vec<f32> {
        let row = |falls: &Vec<f32>| -> Vec<f32> {
            let sums = falls.iter().scan(0.0, |sum, fall| {
                *sum -= fall;
                Some(*sum)
            });
            sums.collect()
        };
        steps.iter().flat_map(row).collect()
    }

    /// All prefixes' weights, best first, by listing them.
    fn listed(candidates: &DraftCandidates, depths: usize) -> Vec<f64> {
        let (mut all, mut level) = (Vec::new(), vec![0.0]);
        for position in candidates.log_probs.chunks(candidates.k).take(depths) {
            let next = level
                .iter()
                .flat_map(|w| position.iter().map(move |p| w + f64::from(*p)));
            level = next.collect();
            all.extend_from_slice(&level);
        }
        all.sort_by(|a: &f64, b| b.total_cmp(a));
        all
    }

    proptest! {
        #[test]
        fn the_tree_is_the_best_prefixes_in_falling_order(
            steps in prop::collection::vec(prop::collection::vec(0.01_f32..3.0, 3), 1..5),
            budget in 0..64_usize, max_depth in 0..6_usize,
        ) {
            let candidates = candidates(&falling(&steps), 3);
            let grown = grow(soil(&candidates), shape(budget, max_depth));
            let mut expected = listed(&candidates, max_depth);
            expected.truncate(budget);
            prop_assert_eq!(grown.weights.len(), expected.len() + 1);
            for (found, best) in grown.weights[1..].iter().zip(&expected) {
                prop_assert!((found - best).abs() < 1e-6, "{} for {}", found, best);
            }
        }

        #[test]
        fn every_beginning_of_a_tree_is_the_tree_of_that_budget(
            steps in prop::collection::vec(prop::collection::vec(0.01_f32..3.0, 3), 1..5),
            budget in 0..40_usize, less in 0..40_usize,
            seed in prop::sample::select(vec![Seed::None, Seed::Chain, Seed::ChainOnly]),
        ) {
            let candidates = candidates(&falling(&steps), 3);
            let of = |budget| grow(soil(&candidates), Shape { seed, ..shape(budget, 9) });
            let less = less.min(budget);
            prop_assert_eq!(cut(&of(budget), less + 1), of(less).tree);
        }
    }

    #[test]
    fn equal_weights_are_taken_sibling_before_child() {
        let candidates = candidates(&[-1.0, -2.0, -1.0, -2.0], 2);
        let tree = grow(soil(&candidates), shape(3, 2)).tree;
        let ids: Vec<u32> = tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [99, 0, 1, 2]);
        assert_eq!(tree.depths(), [0, 1, 1, 2]);
    }

    #[test]
    fn a_draft_that_repeats_a_token_gives_one_node_for_it() {
        let mut twins = candidates(&[-0.1, -0.2], 2);
        twins.ids = vec![TokenId(4), TokenId(4)];
        assert_eq!(grow(soil(&twins), shape(5, 1)).tree.len(), 2);
    }

    #[test]
    fn a_seeded_tree_has_its_chain_first_and_then_what_is_likeliest_beside_it() {
        let candidates = candidates(&[-0.1, -4.0, -3.0, -3.2, -0.1, -4.0], 2);
        let of = |seed, budget| {
            let grown = grow(
                soil(&candidates),
                Shape {
                    seed,
                    ..shape(budget, 3)
                },
            );
            let ids: Vec<u32> = grown.tree.tokens()[1..].iter().map(|t| t.0).collect();
            (ids, grown.tree.depths()[1..].to_vec())
        };
        assert_eq!(of(Seed::ChainOnly, 9), (vec![0, 2, 4], vec![1, 2, 3]));
        assert_eq!(of(Seed::Chain, 2), (vec![0, 2], vec![1, 2]));
        let (ids, depths) = of(Seed::Chain, 5);
        assert_eq!(
            (ids[..3].to_vec(), depths[..3].to_vec()),
            (vec![0, 2, 4], vec![1, 2, 3])
        );
        // The sibling at depth 2 (-3.3), then its child (-3.4).
        assert_eq!(
            (ids[3..].to_vec(), depths[3..].to_vec()),
            (vec![3, 4], vec![2, 3])
        );
    }

    #[test]
    fn forced_tokens_lead_and_cost_nothing_and_hints_lie_beside_the_draft() {
        let candidates = candidates(&[-0.1, -4.0, -0.1, -4.0, -0.1, -4.0], 2);
        let forced = [TokenId(50), TokenId(51)];
        let hints = [TokenId(4), TokenId(60)];
        let soil = Soil {
            forced: &forced,
            hints: &hints,
            ..soil(&candidates)
        };
        let grown = grow(soil, shape(4, 5));
        let ids: Vec<u32> = grown.tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [99, 50, 51, 4, 60, 5]);
        assert_eq!(grown.tree.depths(), [0, 1, 2, 3, 4, 3]);
        assert_eq!(grow(soil, shape(4, 1)).tree.len(), 2);
    }

    #[test]
    fn a_temperature_keeps_the_order_and_flattens() {
        let candidates = candidates(&[-0.1, -3.0, -1.0, -1.5], 2);
        let hot = tempered(&candidates, 2.0);
        assert!(hot.log_probs[0] < -0.1 && hot.log_probs[1] > -3.0);
        assert!(hot.log_probs[0] > hot.log_probs[1] && hot.log_probs[2] > hot.log_probs[3]);
        assert_eq!(tempered(&candidates, 1.0), candidates);
    }
}
