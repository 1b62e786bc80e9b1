//! Drafting with the multi-token-prediction head, depth by depth, over what other sources drafted.
//!
//! The draft model and suffix matches draft first, since their candidates come at once. The head
//! then extends the likeliest nodes of one depth of the tree so far, whatever proposed them, for
//! all sequences in one call. Its candidates join the tree, which is explored anew. So where a
//! suffix match already covers what follows, the head would add little: a depth is drafted only
//! where it promises more tokens than it costs.

use contract::{DeviceError, MtpDraftItem, MtpRow, Runner, TokenId};

use super::build_tree::with_temperature;
use super::candidates::HeadRow;
use super::explore::Exploration;
use super::sequence_draft::SequenceDraft;

/// Nodes of one sequence that are drafted together at one depth. More add little: their chances
/// are far below the best one's.
const MAX_WIDTH: usize = 4;
/// Chance that one of the head's candidates is the next token, where nothing is known.
const COVERAGE: f64 = 0.8;

/// How far and how wide the head drafts.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadLimits {
    /// Rows of the longest path.
    pub(super) max_depth: usize,
    /// Rows of one sequence.
    pub(super) max_rows: usize,
    /// Candidates per row.
    pub(super) candidates: usize,
    /// Draft temperature.
    pub(super) temperature: f32,
}

/// Drafts for all sequences and explores their trees. `explore` gives the tree of what a sequence
/// has drafted; `least_gain`, the expected tokens that one more depth must add to such a tree.
/// Returns the number of depths.
pub(super) fn grow(
    runner: &mut dyn Runner,
    sequences: &mut [&mut SequenceDraft<'_>],
    limits: HeadLimits,
    explore: &dyn Fn(&SequenceDraft<'_>) -> Exploration,
    least_gain: &dyn Fn(&SequenceDraft<'_>) -> f64,
) -> Result<usize, DeviceError> {
    let mut open: Vec<usize> = (0..sequences.len()).collect();
    for depth in 0..limits.max_depth {
        let mut rows: Vec<(usize, Option<MtpRow>, TokenId)> = Vec::new();
        open.retain(|at| {
            let sequence = &*sequences[*at];
            let next = next_rows(sequence, depth, limits, least_gain(sequence));
            rows.extend(next.iter().map(|(parent, token)| (*at, *parent, *token)));
            !next.is_empty()
        });
        if rows.is_empty() {
            return Ok(depth);
        }
        let item = |(at, parent, token): &(usize, Option<MtpRow>, TokenId)| MtpDraftItem {
            seq: sequences[*at].root.seq,
            parent: *parent,
            token: *token,
        };
        let items: Vec<MtpDraftItem> = rows.iter().map(item).collect();
        let drafted = runner.draft_mtp(&items, limits.candidates)?;
        for ((at, parent, token), candidates) in rows.into_iter().zip(&drafted) {
            sequences[at].drafts.mtp.push(HeadRow {
                parent,
                token,
                candidates: with_temperature(candidates, limits.temperature),
            });
        }
        for at in &open {
            sequences[*at].exploration = explore(&*sequences[*at]);
        }
    }
    Ok(limits.max_depth)
}

/// The rows of the next depth, each with its parent and token; none if the draft is complete.
fn next_rows(
    sequence: &SequenceDraft<'_>,
    depth: usize,
    limits: HeadLimits,
    least_gain: f64,
) -> Vec<(Option<MtpRow>, TokenId)> {
    let root = sequence.root;
    if depth >= limits.max_depth.min(root.max_depth) {
        return Vec::new();
    }
    // The root and the forced tokens have one row each.
    let Some(certain) = depth.checked_sub(1) else {
        return vec![(None, root.token())];
    };
    if let Some(token) = root.forced.get(certain) {
        return vec![(Some(MtpRow(certain as u16)), *token)];
    }
    let exploration = &sequence.exploration;
    let mut likeliest: Vec<_> = exploration
        .drafted()
        .filter(|(node, _)| node.depth == depth && node.cursors.mtp.is_none())
        .filter_map(|(node, covered)| {
            let parent = exploration.parent(node).cursors.mtp?;
            Some((node, covered, parent))
        })
        .collect();
    likeliest.sort_by(|a, b| b.0.reached.total_cmp(&a.0.reached));
    let room = limits.max_rows.saturating_sub(sequence.drafts.mtp.len());
    likeliest.truncate(MAX_WIDTH.min(room));
    let gain = |covered: f64| (COVERAGE - covered).max(0.0);
    let gains = likeliest
        .iter()
        .map(|(node, covered, _)| node.reached * gain(*covered));
    if gains.sum::<f64>() <= least_gain {
        return Vec::new();
    }
    likeliest
        .into_iter()
        .map(|(node, _, parent)| (Some(parent), node.token))
        .collect()
}

#[cfg(test)]
mod tests {
    use conformance::fake::{FakeDraft, FakeRunner, FakeSpec};
    use contract::Tree;

    use super::super::build_tree::{TreeBudget, TreeInit};
    use super::super::calibration::{Calibration, Trust};
    use super::super::candidates::Drafts;
    use super::super::sources::{DraftSource, SourceSet};
    use super::super::suffix::SuffixAutomaton;
    use super::super::tree_proposer::{ProposedTree, TreeRequest};
    use super::*;

    const LIMITS: HeadLimits = HeadLimits {
        max_depth: 7,
        max_rows: 64,
        candidates: 4,
        temperature: 1.0,
    };

    const BUDGET: TreeBudget = TreeBudget {
        max_nodes: 22,
        max_depth: 40,
        init: TreeInit::None,
    };

    fn runner() -> FakeRunner {
        FakeRunner::new(FakeSpec {
            mtp: Some(FakeDraft {
                depth: 7,
                acceptance_rate: 1.0,
            }),
            ..FakeSpec::default()
        })
    }

    /// The tree behind `drafts`, and its depths.
    fn grown(
        forced: &[TokenId],
        drafts: Drafts<'_>,
        (budget, limits): (TreeBudget, HeadLimits),
        least_gain: f64,
    ) -> (ProposedTree, usize) {
        let mut runner = runner();
        let seq = runner.open(200).unwrap();
        runner.prefill(seq, &[TokenId(1), TokenId(2)], &[]).unwrap();
        let root = TreeRequest {
            seq,
            history: &[TokenId(1), TokenId(2), TokenId(5)],
            max_depth: budget.max_depth,
            forced,
            speculate: true,
            surprisal: 0.0,
        };
        let calibration = Calibration::default();
        let trust = (&calibration, Trust::default());
        let mut sequence = SequenceDraft::new((0, &root), drafts, trust, budget);
        let depths = grow(
            &mut runner,
            &mut [&mut sequence],
            limits,
            &|sequence| sequence.explore(&calibration),
            &|_| least_gain,
        );
        let tree = sequence.exploration.tree(usize::MAX, Tree::MAX_NODES);
        (tree, depths.unwrap())
    }

    #[test]
    fn head_grows_a_tree_of_its_likeliest_paths() {
        let (proposed, depths) = grown(&[], Drafts::default(), (BUDGET, LIMITS), 0.0);
        assert_eq!((proposed.tree.len(), depths), (23, 7));
        assert_eq!(proposed.tree.depths().iter().max(), Some(&7));
        let mtp = SourceSet::of(&[DraftSource::Mtp]);
        assert!(proposed.sources[1..].iter().all(|sources| *sources == mtp));
        let chain = TreeBudget {
            max_depth: 5,
            init: TreeInit::ChainOnly,
            ..BUDGET
        };
        let (proposed, _) = grown(&[], Drafts::default(), (chain, LIMITS), 0.0);
        assert_eq!(proposed.tree.depths(), [0, 1, 2, 3, 4, 5]);
        let seeded = TreeBudget {
            max_nodes: 9,
            init: TreeInit::Chain,
            ..BUDGET
        };
        let (proposed, _) = grown(&[], Drafts::default(), (seeded, LIMITS), 0.0);
        assert_eq!(proposed.tree.depths()[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(proposed.tree.len(), 10);
    }

    #[test]
    fn forced_tokens_lead_the_tree() {
        let forced = [TokenId(50), TokenId(51)];
        let few = TreeBudget {
            max_nodes: 6,
            ..BUDGET
        };
        let (proposed, _) = grown(&forced, Drafts::default(), (few, LIMITS), 0.0);
        let ids: Vec<u32> = proposed.tree.tokens()[..3].iter().map(|t| t.0).collect();
        assert_eq!((ids, proposed.tree.len()), (vec![5, 50, 51], 9));
        assert_eq!(proposed.tree.depth(contract::NodeIdx(3)), 3);
    }

    #[test]
    fn growth_ends_where_another_depth_does_not_pay() {
        let (_, all) = grown(&[], Drafts::default(), (BUDGET, LIMITS), 0.0);
        let (_, some) = grown(&[], Drafts::default(), (BUDGET, LIMITS), 0.25);
        let (_, one) = grown(&[], Drafts::default(), (BUDGET, LIMITS), 9.0);
        assert!(one == 1 && 1 < some && some < all, "{one} {some} {all}");
        let few = HeadLimits {
            max_rows: 3,
            ..LIMITS
        };
        let (proposed, _) = grown(&[], Drafts::default(), (BUDGET, few), 0.0);
        assert!(proposed.tree.len() <= 13);
    }

    #[test]
    fn head_extends_nodes_of_other_sources_and_leaves_covered_ones() {
        let mut text = SuffixAutomaton::default();
        // The end of the text has occurred before, and the same tokens followed it often.
        for id in [1, 2, 5, 30, 31, 32].repeat(20) {
            text.push(TokenId(id));
        }
        [1, 2, 5].iter().for_each(|id| text.push(TokenId(*id)));
        let with_match = || Drafts {
            suffix: Some((&text, 3)),
            ..Drafts::default()
        };
        let (proposed, depths) = grown(&[], with_match(), (BUDGET, LIMITS), 0.0);
        let first = proposed
            .tree
            .child_with(contract::NodeIdx::ROOT, TokenId(30));
        let first = first.unwrap();
        let below = proposed.tree.nodes().filter(|node| {
            let by = proposed.sources[node.index()];
            proposed.tree.parent(*node) == Some(first) && by.contains(DraftSource::Mtp)
        });
        assert!(below.count() > 0 && depths > 1, "{proposed:?}");
        // Alone, the same least gain lets the head draft deeper.
        let (_, beside) = grown(&[], with_match(), (BUDGET, LIMITS), 0.3);
        let (_, alone) = grown(&[], Drafts::default(), (BUDGET, LIMITS), 0.3);
        assert!(beside < alone, "{beside} of {alone}");
    }
}
