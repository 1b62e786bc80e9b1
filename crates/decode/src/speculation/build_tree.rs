//! Draft tree construction from lists of candidates: the likeliest prefixes first (DDTree).
//!
//! A node of depth `d` reached by candidates `c_1 … c_d` has the weight `w = Σ log p(c_j | c_j-1)`.
//! A draft that treats positions as independent has the same `p(c_j)` behind every `c_j-1`.
//! `Σ exp(w)` over the nodes is the expected number of accepted tokens. The best tree of `n` nodes
//! therefore holds the `n` likeliest prefixes, which a heap yields in descending order.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use contract::{DraftCandidates, ListIdx, NodeIdx, TokenId, Tree};

/// Size limits of a tree, and how it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeBudget {
    /// Maximum number of drafted nodes.
    pub max_nodes: usize,
    /// Depth of the deepest node.
    pub max_depth: usize,
    /// How the first nodes are chosen.
    pub init: TreeInit,
}

/// How the first nodes of a tree are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TreeInit {
    /// Like all others.
    #[default]
    None,
    /// The best candidate of every depth first, as a chain to full depth. The rest of the budget
    /// goes to the likeliest prefixes beside it.
    Chain,
    /// The chain only.
    ChainOnly,
}

/// A tree and the weight of each node.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftTree {
    /// Nodes in order of creation: the first `n` of them form a tree for every `n`.
    pub tree: Tree,
    /// `[n_nodes]`: log-probability of the path to a node; 0 for the root and forced tokens.
    pub weights: Vec<f64>,
}

/// The inputs of a tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeInputs<'a> {
    /// The root's token.
    pub root: TokenId,
    /// Forced tokens; they lead the tree and cost no budget.
    pub forced: &'a [TokenId],
    /// Likely tokens from another source than the draft model, such as prompt lookup. They join the
    /// draft's nodes and cost budget.
    pub hints: &'a [TokenId],
    /// The draft's candidates behind the root.
    pub candidates: &'a DraftCandidates,
}

/// A node that could be added next.
#[derive(Debug, Clone, Copy, PartialEq)]
struct HeapEntry {
    /// Sum of log-probabilities from the root to this node.
    weight: f64,
    /// The same sum for the parent.
    parent_weight: f64,
    /// Push order: equal weights are expanded first in, first out.
    number: u32,
    parent: NodeIdx,
    /// The candidate: its list, and its rank there.
    list: ListIdx,
    rank: usize,
}

impl Eq for HeapEntry {}

impl Ord for HeapEntry {
    fn cmp(&self, other: &HeapEntry) -> Ordering {
        self.weight
            .total_cmp(&other.weight)
            .then(Reverse(self.number).cmp(&Reverse(other.number)))
    }
}

impl PartialOrd for HeapEntry {
    fn partial_cmp(&self, other: &HeapEntry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Assumed log-probability of each hinted token, given those before it.
pub(super) const HINT_LOG_PROB: f64 = -0.35;

/// Least confidence at which a tree grows below a node, for drafts that state theirs.
const MIN_CONFIDENCE: f32 = 0.1;

/// Builds a tree.
///
/// An expanded node pushes its next sibling and then its first child. So no heavier prefix is
/// missed, and equal weights keep their push order.
pub fn build_tree(inputs: TreeInputs<'_>, budget: TreeBudget) -> DraftTree {
    let mut builder = TreeBuilder {
        draft_tree: DraftTree {
            tree: Tree::root(inputs.root),
            weights: vec![0.0],
        },
        candidates: inputs.candidates,
        max_depth: budget.max_depth,
        heap: BinaryHeap::new(),
        pushed: 0,
    };
    let mut base = NodeIdx::ROOT;
    for &token in inputs.forced.iter().take(budget.max_depth) {
        let Some(node) = builder.add(base, token, 0.0) else {
            return builder.draft_tree;
        };
        base = node;
    }
    let first = builder.draft_tree.tree.len();
    let full =
        |builder: &TreeBuilder<'_>| builder.draft_tree.tree.len() - first >= budget.max_nodes;
    let list = inputs.candidates.after(inputs.forced);
    if budget.init != TreeInit::None {
        builder.chain(base, list, &full);
    } else {
        builder.push_first(0.0, base, list);
    }
    // Half of the budget at most, so that wrong hints leave a tree worth verifying.
    let hints = inputs.hints.len().min(budget.max_nodes / 2);
    let (mut at, mut weight) = (base, 0.0);
    for &token in &inputs.hints[..hints] {
        if full(&builder) || builder.draft_tree.tree.depth(at) >= budget.max_depth {
            break;
        }
        weight += HINT_LOG_PROB;
        match builder.add(at, token, weight) {
            Some(node) => at = node,
            None => break,
        }
    }
    while budget.init != TreeInit::ChainOnly && !full(&builder) {
        let Some(best) = builder.heap.pop() else {
            break;
        };
        builder.expand(best);
    }
    builder.draft_tree
}

struct TreeBuilder<'a> {
    draft_tree: DraftTree,
    candidates: &'a DraftCandidates,
    max_depth: usize,
    heap: BinaryHeap<HeapEntry>,
    pushed: u32,
}

impl TreeBuilder<'_> {
    /// Adds a node, or finds the one with this token; `None` if the tree is full.
    fn add(&mut self, parent: NodeIdx, token: TokenId, weight: f64) -> Option<NodeIdx> {
        let DraftTree { tree, weights } = &mut self.draft_tree;
        if let Some(node) = tree.child_with(parent, token) {
            return Some(node);
        }
        let node = tree.push(parent, token).ok()?;
        weights.push(weight);
        Some(node)
    }

    /// Pushes the best candidate of the list behind a node, if the tree may grow there.
    fn push_first(&mut self, weight: f64, node: NodeIdx, list: Option<ListIdx>) {
        if let Some(list) = list
            && self.may_grow(node, list)
        {
            self.push_entry((weight, node), list, 0);
        }
    }

    /// Whether nodes of `list` may be added below `node`.
    fn may_grow(&self, node: NodeIdx, list: ListIdx) -> bool {
        let confidence = self.candidates.list(list).confidence.unwrap_or(1.0);
        self.draft_tree.tree.depth(node) < self.max_depth && confidence >= MIN_CONFIDENCE
    }

    fn push_entry(&mut self, (parent_weight, parent): (f64, NodeIdx), list: ListIdx, rank: usize) {
        let Some(own) = self.candidates.list(list).log_probs.get(rank) else {
            return;
        };
        self.heap.push(HeapEntry {
            weight: parent_weight + f64::from(*own),
            parent_weight,
            number: self.pushed,
            parent,
            list,
            rank,
        });
        self.pushed += 1;
    }

    /// Adds the node of a heap entry and pushes the entries that follow from it.
    fn expand(&mut self, best: HeapEntry) {
        let HeapEntry { list, rank, .. } = best;
        self.push_entry((best.parent_weight, best.parent), list, rank + 1);
        let ids = self.candidates.list(list).ids;
        // A token may repeat among the candidates of one list. The first one stands for both and
        // has pushed its successors. A node from another source has pushed none.
        if ids[..rank].contains(&ids[rank]) {
            return;
        }
        if let Some(node) = self.add(best.parent, ids[rank], best.weight) {
            self.push_first(best.weight, node, self.candidates.next(list, rank));
        }
    }

    /// Adds the best candidates as a chain below `base`, each pushing its next sibling.
    fn chain(
        &mut self,
        base: NodeIdx,
        mut next: Option<ListIdx>,
        full: &dyn Fn(&TreeBuilder<'_>) -> bool,
    ) {
        let (mut at, mut parent_weight) = (base, 0.0);
        while let Some(list) = next
            && self.may_grow(at, list)
            && !full(self)
        {
            self.push_entry((parent_weight, at), list, 1);
            let best = self.candidates.list(list);
            parent_weight += f64::from(best.log_probs[0]);
            match self.add(at, best.ids[0], parent_weight) {
                Some(node) => at = node,
                None => return,
            }
            next = self.candidates.next(list, 0);
        }
    }
}

/// The candidates as if the draft's logits had been divided by `temperature`, which is above 0.
///
/// Only the best candidates of a list are known. The remaining mass is scaled as one token's, which
/// keeps the order of candidates and nearly their weight against other depths.
pub fn with_temperature(candidates: &DraftCandidates, temperature: f32) -> DraftCandidates {
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

/// The first nodes of a tree: the same as a tree built with that budget.
pub fn truncate(draft_tree: &DraftTree, nodes: usize) -> Tree {
    let n = nodes.clamp(1, draft_tree.tree.len());
    let mut tree = Tree::root(draft_tree.tree.token(NodeIdx::ROOT));
    for node in draft_tree.tree.nodes().take(n).skip(1) {
        if let Some(parent) = draft_tree.tree.parent(node) {
            // A prefix of a valid tree is valid.
            let _ = tree.push(parent, draft_tree.tree.token(node));
        }
    }
    tree
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::CandidateLinks;
    use proptest::prelude::*;

    fn candidates(log_probs: &[f32], k: usize) -> DraftCandidates {
        DraftCandidates {
            ids: (0..log_probs.len() as u32).map(TokenId).collect(),
            log_probs: log_probs.to_vec(),
            lse: vec![0.0; log_probs.len() / k],
            k,
            ..DraftCandidates::default()
        }
    }

    fn inputs(candidates: &DraftCandidates) -> TreeInputs<'_> {
        TreeInputs {
            root: TokenId(99),
            forced: &[],
            hints: &[],
            candidates,
        }
    }

    fn budget(max_nodes: usize, max_depth: usize) -> TreeBudget {
        TreeBudget {
            max_nodes,
            max_depth,
            init: TreeInit::None,
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

    /// All prefixes' weights, best first, by enumeration.
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
        fn tree_holds_the_likeliest_prefixes_in_descending_order(
            steps in prop::collection::vec(prop::collection::vec(0.01_f32..3.0, 3), 1..5),
            max_nodes in 0..64_usize, max_depth in 0..6_usize,
        ) {
            let candidates = candidates(&falling(&steps), 3);
            let draft_tree = build_tree(inputs(&candidates), budget(max_nodes, max_depth));
            let mut expected = listed(&candidates, max_depth);
            expected.truncate(max_nodes);
            prop_assert_eq!(draft_tree.weights.len(), expected.len() + 1);
            for (found, best) in draft_tree.weights[1..].iter().zip(&expected) {
                prop_assert!((found - best).abs() < 1e-6, "{} for {}", found, best);
            }
        }

        #[test]
        fn every_prefix_of_a_tree_is_the_tree_of_that_size(
            steps in prop::collection::vec(prop::collection::vec(0.01_f32..3.0, 3), 1..5),
            max_nodes in 0..40_usize, less in 0..40_usize,
            init in prop::sample::select(vec![
                TreeInit::None,
                TreeInit::Chain,
                TreeInit::ChainOnly,
            ]),
        ) {
            let candidates = candidates(&falling(&steps), 3);
            let of = |max_nodes| {
                let budget = TreeBudget { init, ..budget(max_nodes, 9) };
                build_tree(inputs(&candidates), budget)
            };
            let less = less.min(max_nodes);
            prop_assert_eq!(truncate(&of(max_nodes), less + 1), of(less).tree);
        }
    }

    /// Candidates of `depth` positions whose lists depend on the candidate before.
    fn conditional(log_probs: &[Vec<f32>], depth: usize) -> DraftCandidates {
        let k = log_probs[0].len();
        let n_lists = 1 + k * (depth - 1);
        let list_at = |depth: usize, rank: usize| ListIdx((1 + k * (depth - 1) + rank) as u16);
        let depth_of = |list: usize| if list == 0 { 0 } else { 1 + (list - 1) / k };
        let next = |at: usize| {
            let behind = depth_of(at / k) + 1;
            (behind < depth).then(|| list_at(behind, at % k))
        };
        DraftCandidates {
            ids: (0..n_lists)
                .flat_map(|list| (0..k).map(move |rank| depth_of(list) * k + rank))
                .map(|id| TokenId(id as u32))
                .collect(),
            log_probs: falling(&log_probs[..n_lists]),
            lse: vec![0.0; n_lists],
            k,
            links: CandidateLinks::ByCandidate((0..n_lists * k).map(next).collect()),
            confidence: Vec::new(),
        }
    }

    /// Weights of all prefixes behind a list, by enumeration.
    fn behind(candidates: &DraftCandidates, list: ListIdx, weight: f64, all: &mut Vec<f64>) {
        for (rank, log_prob) in candidates.list(list).log_probs.iter().enumerate() {
            let weight = weight + f64::from(*log_prob);
            all.push(weight);
            if let Some(next) = candidates.next(list, rank) {
                behind(candidates, next, weight, all);
            }
        }
    }

    proptest! {
        #[test]
        fn conditional_tree_holds_the_likeliest_prefixes(
            steps in prop::collection::vec(prop::collection::vec(0.01_f32..3.0, 3), 10),
            depth in 1..5_usize, max_nodes in 0..40_usize,
        ) {
            let candidates = conditional(&steps, depth);
            prop_assert!(candidates.is_well_formed());
            let built = build_tree(inputs(&candidates), budget(max_nodes, 9));
            let mut expected = Vec::new();
            behind(&candidates, ListIdx(0), 0.0, &mut expected);
            expected.sort_by(|a, b| b.total_cmp(a));
            expected.truncate(max_nodes);
            prop_assert_eq!(built.weights.len(), expected.len() + 1);
            for (found, best) in built.weights[1..].iter().zip(&expected) {
                prop_assert!((found - best).abs() < 1e-6, "{} for {}", found, best);
            }
        }
    }

    #[test]
    fn chain_follows_the_best_candidate_given_its_parent() {
        // Behind candidate 0 the second token of depth 2 is the best one.
        let mut candidates = conditional(&vec![vec![0.5, 1.0, 1.0]; 4], 2);
        candidates.ids[3..6].copy_from_slice(&[4, 3, 5].map(TokenId));
        let chain = TreeBudget {
            init: TreeInit::ChainOnly,
            ..budget(9, 9)
        };
        let tree = build_tree(inputs(&candidates), chain).tree;
        let ids: Vec<u32> = tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [99, 0, 4]);
        // A forced token leads to the list behind it.
        let forced = [TokenId(1)];
        let inputs = TreeInputs {
            forced: &forced,
            ..inputs(&candidates)
        };
        let tree = build_tree(inputs, chain).tree;
        let ids: Vec<u32> = tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [99, 1, 3]);
    }

    #[test]
    fn branches_end_where_the_draft_has_no_confidence() {
        let mut candidates = conditional(&vec![vec![0.1, 0.1, 0.1]; 7], 3);
        candidates.confidence = vec![0.9, 0.9, 0.01, 0.9, 0.9, 0.9, 0.9];
        for init in [TreeInit::None, TreeInit::Chain] {
            let built = build_tree(
                inputs(&candidates),
                TreeBudget {
                    init,
                    ..budget(40, 9)
                },
            );
            let tree = built.tree;
            let children = |token: u32| {
                let node = tree.child_with(NodeIdx::ROOT, TokenId(token)).unwrap();
                tree.nodes()
                    .filter(|n| tree.parent(*n) == Some(node))
                    .count()
            };
            assert_eq!([children(0), children(1), children(2)], [3, 0, 3]);
        }
    }

    #[test]
    fn equal_weights_expand_sibling_before_child() {
        let candidates = candidates(&[-1.0, -2.0, -1.0, -2.0], 2);
        let tree = build_tree(inputs(&candidates), budget(3, 2)).tree;
        let ids: Vec<u32> = tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [99, 0, 1, 2]);
        assert_eq!(tree.depths(), [0, 1, 1, 2]);
    }

    #[test]
    fn duplicate_draft_tokens_share_one_node() {
        let mut duplicates = candidates(&[-0.1, -0.2], 2);
        duplicates.ids = vec![TokenId(4), TokenId(4)];
        assert_eq!(build_tree(inputs(&duplicates), budget(5, 1)).tree.len(), 2);
    }

    #[test]
    fn chain_init_puts_the_chain_before_the_likeliest_siblings() {
        let candidates = candidates(&[-0.1, -4.0, -3.0, -3.2, -0.1, -4.0], 2);
        let of = |init, max_nodes| {
            let draft_tree = build_tree(
                inputs(&candidates),
                TreeBudget {
                    init,
                    ..budget(max_nodes, 3)
                },
            );
            let ids: Vec<u32> = draft_tree.tree.tokens()[1..].iter().map(|t| t.0).collect();
            (ids, draft_tree.tree.depths()[1..].to_vec())
        };
        assert_eq!(of(TreeInit::ChainOnly, 9), (vec![0, 2, 4], vec![1, 2, 3]));
        assert_eq!(of(TreeInit::Chain, 2), (vec![0, 2], vec![1, 2]));
        let (ids, depths) = of(TreeInit::Chain, 5);
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
    fn forced_tokens_lead_for_free_and_hints_join_the_draft() {
        let candidates = candidates(&[-0.1, -4.0, -0.1, -4.0, -0.1, -4.0], 2);
        let forced = [TokenId(50), TokenId(51)];
        let hints = [TokenId(4), TokenId(60)];
        let inputs = TreeInputs {
            forced: &forced,
            hints: &hints,
            ..inputs(&candidates)
        };
        let draft_tree = build_tree(inputs, budget(4, 5));
        let ids: Vec<u32> = draft_tree.tree.tokens().iter().map(|t| t.0).collect();
        assert_eq!(ids, [99, 50, 51, 4, 60, 5]);
        assert_eq!(draft_tree.tree.depths(), [0, 1, 2, 3, 4, 3]);
        assert_eq!(build_tree(inputs, budget(4, 1)).tree.len(), 2);
    }

    #[test]
    fn temperature_keeps_order_and_flattens() {
        let candidates = candidates(&[-0.1, -3.0, -1.0, -1.5], 2);
        let hot = with_temperature(&candidates, 2.0);
        assert!(hot.log_probs[0] < -0.1 && hot.log_probs[1] > -3.0);
        assert!(hot.log_probs[0] > hot.log_probs[1] && hot.log_probs[2] > hot.log_probs[3]);
        assert_eq!(with_temperature(&candidates, 1.0), candidates);
    }
}
