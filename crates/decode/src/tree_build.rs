//! Where a round's trees come from, and how one is built from a draft.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use contract::{Candidates, DeviceError, DraftItem, NodeIdx, Runner, SeqId, TokenId, Tree};

/// One sequence that wants a tree.
#[derive(Debug, Clone, Copy)]
pub struct Root<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and output so far; the last one is the root: sampled, and not yet in the cache.
    pub history: &'a [TokenId],
    /// The deepest node that can still be of use, given what may be generated; 0 wants the root alone.
    pub max_depth: usize,
}

impl Root<'_> {
    /// The token at the root.
    pub fn token(&self) -> TokenId {
        self.history.last().copied().unwrap_or_default()
    }
}

/// Proposes trees. Whatever it proposes, the tokens that come out are those of plain decoding: a tree
/// decides how many of them one round yields, never which.
pub trait TreeSource {
    /// One tree per root, in order, each rooted at [`Root::token`].
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError>;
}

/// Plain decoding: roots and nothing else.
pub(crate) struct Roots;

impl TreeSource for Roots {
    fn trees(
        &mut self,
        _runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        Ok(roots.iter().map(|root| Tree::root(root.token())).collect())
    }
}

/// Trees from the runner's own draft.
pub(crate) struct Drafted {
    /// Nodes beyond the root.
    pub(crate) budget: usize,
    /// Candidates per position.
    pub(crate) k: usize,
}

impl TreeSource for Drafted {
    fn trees(
        &mut self,
        runner: &mut dyn Runner,
        roots: &[Root<'_>],
    ) -> Result<Vec<Tree>, DeviceError> {
        let mut trees: Vec<Tree> = roots.iter().map(|root| Tree::root(root.token())).collect();
        let deepest = roots.iter().map(|root| root.max_depth).max().unwrap_or(0);
        let depth = runner.info().draft_depth.unwrap_or(0).min(deepest);
        let widest = runner.info().limits.tree_nodes.saturating_sub(1);
        let budget = self.budget.min(widest);
        if depth == 0 || budget == 0 {
            return Ok(trees);
        }
        let wanting: Vec<usize> = (0..roots.len())
            .filter(|i| roots[*i].max_depth > 0)
            .collect();
        let items: Vec<DraftItem> = wanting
            .iter()
            .map(|i| DraftItem {
                seq: roots[*i].seq,
                root: roots[*i].token(),
            })
            .collect();
        let drafts = runner.draft(&items, depth, self.k)?;
        for (i, candidates) in wanting.into_iter().zip(&drafts) {
            let shape = Shape {
                budget,
                max_depth: roots[i].max_depth,
            };
            trees[i] = best_first(roots[i].token(), candidates, shape);
        }
        Ok(trees)
    }
}

/// How large a tree may get.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Nodes beyond the root.
    pub(crate) budget: usize,
    /// Depth of the deepest node.
    pub(crate) max_depth: usize,
}

/// A node that could be added next.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offer {
    /// Sum of the log-probabilities from the root down to here.
    weight: f32,
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

/// The `budget` likeliest prefixes under independent positions: the tree whose expected accepted length,
/// by the draft's own figures, is greatest.
///
/// Nodes are taken by falling weight. A taken node offers its next sibling and its first child, in this
/// order, so no heavier prefix is ever missed.
pub(crate) fn best_first(root: TokenId, candidates: &Candidates, shape: Shape) -> Tree {
    let mut tree = Tree::root(root);
    let k = candidates.k.max(1);
    let depths = (candidates.ids.len().min(candidates.log_probs.len()) / k).min(shape.max_depth);
    let at = |depth: usize, rank: usize| (depth - 1) * k + rank;
    let mut offers = BinaryHeap::new();
    let mut number = 0;
    let mut offer = |offers: &mut BinaryHeap<Offer>, weight, parent, depth, rank| {
        offers.push(Offer {
            weight,
            number,
            parent,
            depth,
            rank,
        });
        number += 1;
    };
    if depths > 0 {
        offer(&mut offers, candidates.log_probs[0], NodeIdx::ROOT, 1, 0);
    }
    while tree.len() <= shape.budget {
        let Some(best) = offers.pop() else { break };
        let here = at(best.depth, best.rank);
        let above = best.weight - candidates.log_probs[here];
        if best.rank + 1 < k {
            let weight = above + candidates.log_probs[here + 1];
            offer(&mut offers, weight, best.parent, best.depth, best.rank + 1);
        }
        // A draft that names one token twice at one position offers a twin; the first one stands for both.
        let Ok(node) = tree.push(best.parent, candidates.ids[here]) else {
            continue;
        };
        if best.depth < depths {
            let weight = best.weight + candidates.log_probs[at(best.depth + 1, 0)];
            offer(&mut offers, weight, node, best.depth + 1, 0);
        }
    }
    tree
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidates(log_probs: &[f32], k: usize) -> Candidates {
        Candidates {
            ids: (0..log_probs.len() as u32).map(TokenId).collect(),
            log_probs: log_probs.to_vec(),
            lse: vec![0.0; log_probs.len() / k],
            k,
        }
    }

    fn weight(tree: &Tree, node: NodeIdx, candidates: &Candidates) -> f32 {
        let nodes = tree.path_to(node);
        let below_root = &nodes.nodes()[1..];
        // Ids were given out as indices, so a token names its own log-probability.
        below_root
            .iter()
            .map(|n| candidates.log_probs[tree.token(*n).index()])
            .sum()
    }

    /// All prefixes' weights, best first, by listing them.
    fn listed(candidates: &Candidates, depths: usize) -> Vec<f32> {
        let (mut all, mut level) = (Vec::new(), vec![0.0]);
        for position in candidates.log_probs.chunks(candidates.k).take(depths) {
            let next = level
                .iter()
                .flat_map(|w| position.iter().map(move |p| w + p));
            level = next.collect();
            all.extend_from_slice(&level);
        }
        all.sort_by(|a: &f32, b| b.total_cmp(a));
        all
    }

    proptest! {
        #[test]
        fn the_tree_is_the_best_prefixes(
            steps in prop::collection::vec(prop::collection::vec(0.01_f32..3.0, 3), 1..5),
            budget in 0..20_usize, max_depth in 0..6_usize,
        ) {
            let log_probs: Vec<f32> = steps.iter().flat_map(|falls| {
                falls.iter().scan(0.0, |sum, fall| { *sum -= fall; Some(*sum) })
            }).collect();
            let candidates = candidates(&log_probs, 3);
            let tree = best_first(TokenId(99), &candidates, Shape { budget, max_depth });
            let mut weights: Vec<f32> =
                tree.nodes().skip(1).map(|n| weight(&tree, n, &candidates)).collect();
            weights.sort_by(|a, b| b.total_cmp(a));
            let mut expected = listed(&candidates, max_depth);
            expected.truncate(budget);
            prop_assert_eq!(weights.len(), expected.len());
            for (found, best) in weights.iter().zip(&expected) {
                prop_assert!((found - best).abs() < 1e-4, "{} for {}", found, best);
            }
        }
    }

    #[test]
    fn equal_weights_are_taken_sibling_before_child() {
        let candidates = candidates(&[-1.0, -2.0, -1.0, -2.0], 2);
        let shape = Shape {
            budget: 3,
            max_depth: 2,
        };
        let tree = best_first(TokenId(9), &candidates, shape);
        let ids: Vec<u32> = tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [9, 0, 1, 2]);
        assert_eq!(tree.depths(), [0, 1, 1, 2]);
    }

    #[test]
    fn a_draft_that_repeats_a_token_gives_one_node_for_it() {
        let mut twins = candidates(&[-0.1, -0.2], 2);
        twins.ids = vec![TokenId(4), TokenId(4)];
        let shape = Shape {
            budget: 5,
            max_depth: 1,
        };
        assert_eq!(best_first(TokenId(9), &twins, shape).len(), 2);
    }
}
