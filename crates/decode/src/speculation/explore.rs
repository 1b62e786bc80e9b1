//! The draft tree of one sequence from all sources: the likeliest prefixes first.
//!
//! A node's worth is the chance that it is accepted: the product of the chances along its path.
//! Once the sources have drafted, every row of a verify costs the same whatever proposed it. So the
//! best tree of `n` nodes holds the `n` likeliest prefixes, and costs decide `n` afterwards. A heap
//! yields them in descending order: a node that is added pushes its next sibling, then its first
//! child.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use contract::{NodeIdx, TokenId, Tree};

use super::build_tree::{TreeBudget, TreeInit};
use super::candidates::{Candidate, Chances, Cursors, Drafts};
use super::sources::SourceSet;
use super::tree_proposer::ProposedTree;

/// A tree, and every candidate that was considered for it.
pub(crate) struct Exploration {
    nodes: Vec<ExploredNode>,
    /// Number of leading nodes that are certain: the root and the forced tokens.
    base: usize,
    /// The other nodes of the tree, in order of addition: the first `n` form a tree for every `n`.
    order: Vec<usize>,
}

/// A node of the tree, or a candidate for one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExploredNode {
    parent: usize,
    pub(crate) token: TokenId,
    /// Depth below the root.
    pub(crate) depth: usize,
    /// What proposed it; `None` for a certain token.
    pub(crate) candidate: Option<Candidate>,
    /// The chance that it is accepted.
    pub(crate) reached: f64,
    /// Where the sources stand behind it; known once it is in the tree.
    pub(crate) cursors: Cursors,
    /// Its candidates: first and end. Empty until it is in the tree.
    children: (usize, usize),
    /// End of its siblings.
    siblings_end: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct HeapEntry {
    reached: f64,
    /// Push order: equal chances are added first in, first out.
    number: u32,
    node: usize,
}

impl Eq for HeapEntry {}

impl Ord for HeapEntry {
    fn cmp(&self, other: &HeapEntry) -> Ordering {
        self.reached
            .total_cmp(&other.reached)
            .then(Reverse(self.number).cmp(&Reverse(other.number)))
    }
}

impl PartialOrd for HeapEntry {
    fn partial_cmp(&self, other: &HeapEntry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The tokens that lead a tree.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stem<'a> {
    /// The root's token.
    pub(crate) root: TokenId,
    /// Forced tokens; they cost no budget.
    pub(crate) forced: &'a [TokenId],
}

/// Explores what the sources have drafted.
pub(crate) fn explore(
    stem: Stem<'_>,
    drafts: &Drafts<'_>,
    chances: Chances<'_>,
    budget: TreeBudget,
) -> Exploration {
    let root = ExploredNode {
        parent: 0,
        token: stem.root,
        depth: 0,
        candidate: None,
        reached: 1.0,
        cursors: drafts.root(),
        children: (0, 0),
        siblings_end: 0,
    };
    let mut explorer = Explorer {
        found: Exploration {
            nodes: vec![root],
            base: 1,
            order: Vec::new(),
        },
        drafts,
        chances,
        max_depth: budget.max_depth,
        heap: BinaryHeap::new(),
        pushed: 0,
    };
    for token in stem.forced.iter().take(budget.max_depth) {
        explorer.add_certain(*token);
    }
    let base = explorer.found.base - 1;
    explorer.expand(base);
    if budget.init == TreeInit::None {
        explorer.push_first_child(base);
    } else {
        explorer.add_chain(base, budget.max_nodes);
    }
    while budget.init != TreeInit::ChainOnly
        && explorer.found.order.len() < budget.max_nodes
        && let Some(best) = explorer.heap.pop()
    {
        explorer.push_next_sibling(best.node);
        explorer.add(best.node);
        explorer.push_first_child(best.node);
    }
    explorer.found
}

struct Explorer<'a> {
    found: Exploration,
    drafts: &'a Drafts<'a>,
    chances: Chances<'a>,
    max_depth: usize,
    heap: BinaryHeap<HeapEntry>,
    pushed: u32,
}

impl Explorer<'_> {
    fn add_certain(&mut self, token: TokenId) {
        let nodes = &mut self.found.nodes;
        let parent = nodes.len() - 1;
        nodes.push(ExploredNode {
            parent,
            token,
            depth: nodes[parent].depth + 1,
            cursors: self.drafts.follow(nodes[parent].cursors, token),
            ..nodes[parent]
        });
        self.found.base += 1;
    }

    /// Adds a node to the tree, with its candidates.
    fn add(&mut self, at: usize) {
        let nodes = &mut self.found.nodes;
        let ExploredNode { parent, token, .. } = nodes[at];
        nodes[at].cursors = self.drafts.follow(nodes[parent].cursors, token);
        self.found.order.push(at);
        self.expand(at);
    }

    /// Finds the candidates of a node.
    fn expand(&mut self, at: usize) {
        let nodes = &mut self.found.nodes;
        let parent = nodes[at];
        if parent.depth >= self.max_depth {
            return;
        }
        let certain = self.found.base - 1;
        let depth = parent.depth + 1 - certain;
        let candidates = self.drafts.candidates(parent.cursors, depth, self.chances);
        let first = nodes.len();
        let end = first + candidates.len();
        nodes[at].children = (first, end);
        nodes.extend(candidates.into_iter().map(|candidate| ExploredNode {
            parent: at,
            token: candidate.token,
            depth: parent.depth + 1,
            reached: parent.reached * candidate.chance,
            candidate: Some(candidate),
            cursors: Cursors::default(),
            children: (0, 0),
            siblings_end: end,
        }));
    }

    fn push(&mut self, node: usize) {
        self.heap.push(HeapEntry {
            reached: self.found.nodes[node].reached,
            number: self.pushed,
            node,
        });
        self.pushed += 1;
    }

    fn push_first_child(&mut self, of: usize) {
        let (first, end) = self.found.nodes[of].children;
        if first < end {
            self.push(first);
        }
    }

    fn push_next_sibling(&mut self, of: usize) {
        if of + 1 < self.found.nodes[of].siblings_end {
            self.push(of + 1);
        }
    }

    /// Adds the best candidates as a chain below `base`, each pushing its next sibling.
    fn add_chain(&mut self, base: usize, max_nodes: usize) {
        let mut at = base;
        while self.found.order.len() < max_nodes {
            let (first, end) = self.found.nodes[at].children;
            if first == end {
                return;
            }
            self.push_next_sibling(first);
            self.add(first);
            at = first;
        }
    }
}

impl Exploration {
    /// Number of leading nodes that are certain.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// `[drafted nodes]`: the chance that each is accepted, in order of addition.
    pub(crate) fn reached(&self) -> impl ExactSizeIterator<Item = f64> {
        self.order.iter().map(|at| self.nodes[*at].reached)
    }

    /// The same without nodes deeper than `depth` below the certain tokens.
    pub(crate) fn reached_within(&self, depth: usize) -> impl Iterator<Item = f64> {
        let nodes = self.order.iter().map(|at| &self.nodes[*at]);
        nodes
            .filter(move |node| node.depth + 1 - self.base <= depth)
            .map(|node| node.reached)
    }

    /// Depth of the tree of the first `n` drafted nodes, below the certain tokens.
    pub(crate) fn deepest(&self, n: usize) -> usize {
        let drafted = self.order.iter().take(n);
        let depths = drafted.map(|at| self.nodes[*at].depth + 1 - self.base);
        depths.max().unwrap_or(0)
    }

    /// The drafted nodes in order of addition, each with the chance that one of its candidates is
    /// the token after it.
    pub(crate) fn drafted(&self) -> impl Iterator<Item = (&ExploredNode, f64)> {
        let covered = |node: &ExploredNode| {
            let (first, end) = node.children;
            let candidates = self.nodes[first..end].iter();
            candidates
                .filter_map(|node| Some(node.candidate?.chance))
                .sum()
        };
        self.order
            .iter()
            .map(move |at| (&self.nodes[*at], covered(&self.nodes[*at])))
    }

    /// Where the sources stand behind a node's parent.
    pub(crate) fn parent(&self, node: &ExploredNode) -> &ExploredNode {
        &self.nodes[node.parent]
    }

    /// The tree of the first `n` drafted nodes, and at most `limit` nodes in all.
    pub(crate) fn tree(&self, n: usize, limit: usize) -> ProposedTree {
        let mut proposed = ProposedTree::from(Tree::root(self.nodes[0].token));
        let mut places: Vec<Option<NodeIdx>> = vec![None; self.nodes.len()];
        places[0] = Some(NodeIdx::ROOT);
        let drafted = self.order.iter().take(n).copied();
        for at in (1..self.base).chain(drafted) {
            let node = &self.nodes[at];
            if let Some(parent) = places[node.parent]
                && proposed.tree.len() < limit
                && let Ok(place) = proposed.tree.push(parent, node.token)
            {
                places[at] = Some(place);
                let sources = node.candidate.map(|candidate| candidate.by.sources);
                proposed.sources.push(sources.unwrap_or(SourceSet::NONE));
            }
        }
        proposed
    }

    /// Calls `f` with every candidate that stood beside a token of `tokens`, which followed the
    /// root, and whether it was that token.
    pub(crate) fn compare(&self, tokens: &[TokenId], mut f: impl FnMut(&Candidate, bool)) {
        let mut at = 0;
        for (i, token) in tokens.iter().enumerate() {
            if i + 1 < self.base {
                // A certain token.
                at = i + 1;
                if self.nodes[at].token != *token {
                    return;
                }
                continue;
            }
            let (first, end) = self.nodes[at].children;
            let mut next = None;
            for child in first..end {
                let node = &self.nodes[child];
                let hit = node.token == *token;
                if let Some(candidate) = &node.candidate {
                    f(candidate, hit);
                }
                if hit {
                    next = Some(child);
                }
            }
            match next {
                Some(child) => at = child,
                None => return,
            }
        }
    }
}
