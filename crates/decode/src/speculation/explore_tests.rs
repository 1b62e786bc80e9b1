//! The tree of all sources against the tree of one draft, and its properties.

use contract::{DraftCandidates, NodeIdx, TokenId, Tree};
use proptest::prelude::*;

use super::build_tree::{TreeBudget, TreeInit, TreeInputs, build_tree};
use super::calibration::{Calibration, Trust};
use super::candidates::{Chances, Drafts};
use super::explore::{Exploration, Stem, explore};
use super::sources::{DraftSource, SourceSet};
use super::suffix::SuffixAutomaton;

fn explored(drafts: &Drafts<'_>, forced: &[TokenId], budget: TreeBudget) -> Exploration {
    let (calibration, trust) = (Calibration::default(), Trust::default());
    let chances = Chances {
        calibration: &calibration,
        trust: &trust,
    };
    let root = TokenId(99);
    explore(Stem { root, forced }, drafts, chances, budget)
}

/// Candidates whose chances are `[depth, k]` weights over their sum and one more.
fn candidates(weights: &[Vec<u32>]) -> DraftCandidates {
    let k = weights[0].len();
    let row = |weights: &Vec<u32>| {
        let sum = f64::from(weights.iter().sum::<u32>() + 1);
        let mut row: Vec<f64> = weights.iter().map(|w| f64::from(*w) / sum).collect();
        row.sort_by(|a, b| b.total_cmp(a));
        row
    };
    let log_probs = weights.iter().flat_map(row).map(|p| p.ln() as f32);
    DraftCandidates {
        log_probs: log_probs.collect(),
        ids: (0..(weights.len() * k) as u32).map(TokenId).collect(),
        lse: vec![0.0; weights.len()],
        k,
        ..DraftCandidates::default()
    }
}

fn ids(tree: &Tree) -> Vec<u32> {
    tree.tokens().iter().map(|token| token.0).collect()
}

fn init() -> impl Strategy<Value = TreeInit> {
    prop::sample::select(vec![TreeInit::None, TreeInit::Chain, TreeInit::ChainOnly])
}

proptest! {
    /// Uncalibrated, one draft gives the tree of the builder for one draft.
    #[test]
    fn one_draft_gives_the_tree_of_the_likeliest_prefixes(
        weights in prop::collection::vec(prop::collection::vec(40..2000_u32, 3), 1..6),
        forced in prop::collection::vec((50..60_u32).prop_map(TokenId), 0..3),
        max_nodes in 0..40_usize, max_depth in 0..8_usize, init in init(),
    ) {
        let candidates = candidates(&weights);
        let budget = TreeBudget { max_nodes, max_depth, init };
        let inputs = TreeInputs {
            root: TokenId(99),
            forced: &forced,
            hints: &[],
            candidates: &candidates,
        };
        let expected = build_tree(inputs, budget);
        let drafts = Drafts { block: Some(candidates.clone()), ..Drafts::default() };
        let found = explored(&drafts, &forced, budget);
        let tree = found.tree(usize::MAX, Tree::MAX_NODES);
        prop_assert_eq!(ids(&tree.tree), ids(&expected.tree));
        prop_assert_eq!(tree.tree.depths(), expected.tree.depths());
        let drafted = expected.weights[found.base()..].iter();
        for (chance, weight) in found.reached().zip(drafted) {
            // Chances are bounded, weights are not.
            prop_assert!((chance - weight.exp()).abs() < 1e-3, "{} {}", chance, weight.exp());
        }
        // Every prefix of the order is a tree.
        for n in 0..=found.reached().len() {
            let part = found.tree(n, Tree::MAX_NODES);
            prop_assert_eq!(part.tree.len(), found.base() + n);
            prop_assert_eq!(part.sources.len(), part.tree.len());
        }
        prop_assert!(found.tree(usize::MAX, 3).tree.len() <= 3);
    }

    /// With more sources, a tree of as many nodes promises at least as much.
    #[test]
    fn more_sources_never_promise_less(
        weights in prop::collection::vec(prop::collection::vec(40..2000_u32, 3), 1..6),
        text in prop::collection::vec((0..9_u32).prop_map(TokenId), 10..80),
        max_nodes in 1..30_usize,
    ) {
        let mut automaton = SuffixAutomaton::default();
        text.iter().for_each(|token| automaton.push(*token));
        let budget = TreeBudget { max_nodes, max_depth: 12, init: TreeInit::None };
        let block = || Some(candidates(&weights));
        let suffix = Some((&automaton, 1));
        let sum = |drafts: Drafts<'_>| {
            let found = explored(&drafts, &[], budget);
            let reached: Vec<f64> = found.reached().collect();
            assert!(reached.is_sorted_by(|a, b| a >= b), "{reached:?}");
            let tree = found.tree(usize::MAX, Tree::MAX_NODES);
            for node in tree.tree.nodes().skip(1) {
                assert!(!tree.sources[node.index()].is_empty());
            }
            reached.iter().sum::<f64>()
        };
        let both = sum(Drafts { block: block(), suffix, ..Drafts::default() });
        let alone = sum(Drafts { block: block(), ..Drafts::default() });
        // Where chances of rivals exceed 1 together, all of them shrink.
        prop_assert!(both > 0.5 * alone, "{} for {}", both, alone);
        let matches = sum(Drafts { suffix, ..Drafts::default() });
        prop_assert!(both > 0.5 * matches, "{} for {}", both, matches);
    }
}

#[test]
fn suffix_matches_continue_what_the_draft_proposes() {
    // The draft proposes one token; the text goes on from there as it did before.
    let mut automaton = SuffixAutomaton::default();
    let text = [5, 6, 7, 8, 9, 1, 99];
    text.iter().for_each(|id| automaton.push(TokenId(*id)));
    let mut block = candidates(&[vec![900, 50]]);
    block.ids = vec![TokenId(5), TokenId(6)];
    let drafts = Drafts {
        block: Some(block),
        suffix: Some((&automaton, 1)),
        ..Drafts::default()
    };
    let budget = TreeBudget {
        max_nodes: 6,
        max_depth: 9,
        init: TreeInit::None,
    };
    let found = explored(&drafts, &[], budget);
    let tree = found.tree(usize::MAX, Tree::MAX_NODES);
    let mut at = NodeIdx::ROOT;
    let mut by = Vec::new();
    for id in [5, 6, 7, 8] {
        at = tree.tree.child_with(at, TokenId(id)).unwrap();
        by.push(tree.sources[at.index()]);
    }
    let block = SourceSet::of(&[DraftSource::Block]);
    let suffix = SourceSet::of(&[DraftSource::Suffix]);
    assert_eq!(by, [block, suffix, suffix, suffix]);
}

#[test]
fn candidates_beside_sampled_tokens_are_hits_and_misses() {
    let drafts = Drafts {
        block: Some(candidates(&[vec![900, 50], vec![900, 50]])),
        ..Drafts::default()
    };
    let budget = TreeBudget {
        max_nodes: 2,
        max_depth: 9,
        init: TreeInit::None,
    };
    let found = explored(&drafts, &[TokenId(50)], budget);
    let compared = |tokens: &[u32]| {
        let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
        let mut all = Vec::new();
        found.compare(&tokens, |candidate, hit| all.push((candidate.token.0, hit)));
        all
    };
    // The forced token is certain; a sample beside it teaches nothing.
    assert_eq!(compared(&[50, 2]), [(2, true), (3, false)]);
    assert_eq!(compared(&[50, 9]), [(2, false), (3, false)]);
    assert_eq!(compared(&[51, 2]), []);
}
