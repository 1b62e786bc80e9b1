//! Trees from the model's multi-token-prediction head, grown depth by depth.
//!
//! A node's candidates depend on its path, so its children have the weight `w(parent) + log p`. At
//! each depth, the likeliest nodes of all sequences are drafted together. The tree then holds the
//! likeliest nodes of all depths.

use contract::{
    DeviceError, DraftCandidates, MtpDraftItem, MtpRow, NodeIdx, Runner, TokenId, Tree,
};

use super::build_tree::{DraftTree, HINT_LOG_PROB, TreeBudget, TreeInit, with_temperature};
use super::tree_proposer::TreeRequest;

/// Nodes of one sequence that are drafted together at one depth. More add little: their weights
/// are far below the best one's.
const MAX_WIDTH: usize = 4;

/// One sequence to draft for.
pub(super) struct MtpTreeRequest<'a> {
    pub(super) root: &'a TreeRequest<'a>,
    pub(super) hints: &'a [TokenId],
    pub(super) budget: TreeBudget,
    /// Ratio of accepted to predicted tokens.
    pub(super) calibration: f64,
}

/// How far and how wide the head drafts.
#[derive(Debug, Clone, Copy)]
pub(super) struct MtpReach {
    /// Rows of the longest path.
    pub(super) max_depth: usize,
    /// Rows of one sequence.
    pub(super) max_rows: usize,
    /// Candidates per row.
    pub(super) candidates: usize,
    /// Draft temperature.
    pub(super) temperature: f32,
    /// Expected tokens that one more depth must promise, which are what it costs.
    pub(super) least_gain: f64,
}

/// A candidate token behind a drafted row.
struct Candidate {
    /// `None` behind the root and the forced tokens.
    parent: Option<usize>,
    token: TokenId,
    weight: f64,
    /// Whether it is the best child of the best child, and so on.
    in_chain: bool,
    /// Its own row, if it was drafted.
    row: Option<MtpRow>,
}

/// A tree that is being drafted.
struct Growth<'a> {
    request: MtpTreeRequest<'a>,
    reach: MtpReach,
    /// Drafted depths.
    depth: usize,
    /// Drafted rows.
    rows: usize,
    all: Vec<Candidate>,
    /// First candidate of the last depth.
    newest: usize,
    /// The candidates whose rows are in the current call; `None` for the root or a forced token.
    asked: Vec<Option<usize>>,
}

/// One tree per request.
pub(super) fn grow_trees(
    runner: &mut dyn Runner,
    requests: Vec<MtpTreeRequest<'_>>,
    reach: MtpReach,
) -> Result<Vec<DraftTree>, DeviceError> {
    let growth = |request| Growth {
        request,
        reach,
        depth: 0,
        rows: 0,
        all: Vec::new(),
        newest: 0,
        asked: Vec::new(),
    };
    let mut trees: Vec<Growth<'_>> = requests.into_iter().map(growth).collect();
    for _ in 0..reach.max_depth {
        let items: Vec<MtpDraftItem> = trees.iter_mut().flat_map(Growth::next_rows).collect();
        if items.is_empty() {
            break;
        }
        let drafted = runner.draft_mtp(&items, reach.candidates)?;
        let mut drafted = drafted.iter();
        for tree in &mut trees {
            tree.absorb(&mut drafted);
        }
    }
    Ok(trees.iter().map(Growth::finish).collect())
}

impl Growth<'_> {
    /// The rows of the next depth; none if the tree is complete.
    fn next_rows(&mut self) -> Vec<MtpDraftItem> {
        let root = self.request.root;
        let (depth, forced) = (self.depth, root.forced.len());
        self.asked.clear();
        if depth >= self.reach.max_depth.min(root.max_depth) {
            return Vec::new();
        }
        if depth <= forced {
            let row = |row: usize| MtpRow(row as u16);
            self.asked.push(None);
            return vec![MtpDraftItem {
                seq: root.seq,
                parent: depth.checked_sub(1).map(row),
                token: match depth.checked_sub(1) {
                    Some(at) => root.forced[at],
                    None => root.token(),
                },
            }];
        }
        let mut likeliest = self.order();
        // A candidate beyond the budget is not in the tree, and neither are its children.
        likeliest.truncate(self.request.budget.max_nodes);
        likeliest.retain(|at| *at >= self.newest);
        let room = self.reach.max_rows.saturating_sub(self.rows);
        likeliest.truncate(MAX_WIDTH.min(room));
        let reached = likeliest.iter().map(|at| self.all[*at].weight.exp());
        if reached.sum::<f64>() * self.request.calibration < self.reach.least_gain {
            return Vec::new();
        }
        let mut items = Vec::with_capacity(likeliest.len());
        for at in likeliest {
            let candidate = &self.all[at];
            let parent = match candidate.parent {
                Some(parent) => self.all[parent].row,
                None => Some(MtpRow(forced as u16)),
            };
            items.push(MtpDraftItem {
                seq: root.seq,
                parent,
                token: candidate.token,
            });
            self.asked.push(Some(at));
        }
        items
    }

    /// Takes the results of its own rows of a call.
    fn absorb<'a>(&mut self, drafted: &mut impl Iterator<Item = &'a DraftCandidates>) {
        let asked = std::mem::take(&mut self.asked);
        if asked.is_empty() {
            // The tree is complete.
            self.depth = self.reach.max_depth;
            return;
        }
        self.newest = self.all.len();
        for (at, found) in asked.into_iter().zip(drafted) {
            let row = MtpRow(self.rows as u16);
            self.rows += 1;
            let (weight, in_chain) = match at {
                Some(at) => {
                    self.all[at].row = Some(row);
                    (self.all[at].weight, self.all[at].in_chain)
                }
                // Only the last of the forced tokens has children of its own.
                None if self.depth < self.request.root.forced.len() => continue,
                None => (0.0, true),
            };
            let found = with_temperature(found, self.reach.temperature);
            let first = self.all.len();
            for (token, log_prob) in found.ids.iter().zip(&found.log_probs) {
                // A token may repeat among the candidates; the first stands for all.
                if self.all[first..].iter().any(|c| c.token == *token) {
                    continue;
                }
                self.all.push(Candidate {
                    parent: at,
                    token: *token,
                    weight: weight + f64::from(*log_prob),
                    in_chain: in_chain && self.all.len() == first,
                    row: None,
                });
            }
        }
        self.depth += 1;
    }

    /// The candidates in the order of the tree: likeliest first, or the chain before them. A parent
    /// precedes its children, which are at most as likely.
    fn order(&self) -> Vec<usize> {
        let init = self.request.budget.init;
        let candidate = |at: &usize| &self.all[*at];
        let mut order: Vec<usize> = (0..self.all.len()).collect();
        if init == TreeInit::ChainOnly {
            order.retain(|at| candidate(at).in_chain);
        }
        order.sort_by(|a, b| {
            let behind = |at| init != TreeInit::None && !candidate(at).in_chain;
            let weights = candidate(b).weight.total_cmp(&candidate(a).weight);
            behind(a).cmp(&behind(b)).then(weights).then(a.cmp(b))
        });
        order
    }

    /// The root and forced tokens, then hints, then the likeliest candidates.
    fn finish(&self) -> DraftTree {
        let request = &self.request;
        let (root, hints, budget) = (request.root, request.hints, request.budget);
        let mut built = DraftTree {
            tree: Tree::root(root.token()),
            weights: vec![0.0],
        };
        let add = |built: &mut DraftTree, parent: NodeIdx, token: TokenId, weight: f64| {
            if let Some(node) = built.tree.child_with(parent, token) {
                return Some(node);
            }
            let node = built.tree.push(parent, token).ok()?;
            built.weights.push(weight);
            Some(node)
        };
        let mut base = NodeIdx::ROOT;
        for token in root.forced.iter().take(budget.max_depth) {
            let Some(node) = add(&mut built, base, *token, 0.0) else {
                return built;
            };
            base = node;
        }
        let most = built.tree.len() + budget.max_nodes;
        // Half of the budget at most, so that wrong hints leave a tree worth verifying.
        let (mut at, mut weight) = (base, 0.0);
        for token in hints.iter().take(budget.max_nodes / 2) {
            if built.tree.depth(at) >= budget.max_depth {
                break;
            }
            weight += HINT_LOG_PROB;
            match add(&mut built, at, *token, weight) {
                Some(node) => at = node,
                None => break,
            }
        }
        let mut nodes: Vec<Option<NodeIdx>> = vec![None; self.all.len()];
        for at in self.order() {
            let candidate = &self.all[at];
            let parent = candidate.parent.map_or(Some(base), |parent| nodes[parent]);
            let Some(parent) = parent.filter(|_| built.tree.len() < most) else {
                continue;
            };
            nodes[at] = add(&mut built, parent, candidate.token, candidate.weight);
        }
        built
    }
}

#[cfg(test)]
mod tests {
    use conformance::fake::{FakeDraft, FakeRunner, FakeSpec};

    use super::*;

    const REACH: MtpReach = MtpReach {
        max_depth: 7,
        max_rows: 64,
        candidates: 4,
        temperature: 1.0,
        least_gain: 0.0,
    };

    fn drafted(
        forced: &[TokenId],
        hints: &[TokenId],
        budget: (usize, usize, TreeInit),
        reach: MtpReach,
    ) -> DraftTree {
        let mut runner = FakeRunner::new(FakeSpec {
            mtp: Some(FakeDraft {
                depth: 7,
                acceptance_rate: 1.0,
            }),
            ..FakeSpec::default()
        });
        let seq = runner.open(200).unwrap();
        runner.prefill(seq, &[TokenId(1), TokenId(2)], &[]).unwrap();
        let root = TreeRequest {
            seq,
            history: &[TokenId(1), TokenId(2), TokenId(5)],
            max_depth: budget.1,
            forced,
            speculate: true,
            surprisal: 0.0,
        };
        let request = MtpTreeRequest {
            root: &root,
            hints,
            budget: TreeBudget {
                max_nodes: budget.0,
                max_depth: budget.1,
                init: budget.2,
            },
            calibration: 1.0,
        };
        grow_trees(&mut runner, vec![request], reach)
            .unwrap()
            .remove(0)
    }

    #[test]
    fn tree_holds_conditional_weights_in_descending_order() {
        let built = drafted(&[], &[], (22, 40, TreeInit::None), REACH);
        assert_eq!(built.tree.len(), 23);
        assert!(built.weights.is_sorted_by(|a, b| a >= b), "{built:?}");
        // Ranks cost 0.25, 1.25, ... at each depth: seven first ranks weigh as much as a path of
        // a second rank and one first.
        let deepest = built.tree.depths().iter().max();
        assert_eq!(deepest, Some(&7));
        for node in built.tree.nodes().skip(1) {
            let parent = built.tree.parent(node).unwrap();
            let step = built.weights[parent.index()] - built.weights[node.index()];
            assert!((0.25..4.0).contains(&step), "{step}");
        }
    }

    #[test]
    fn chains_forced_tokens_and_hints_lead_the_tree() {
        let chain = drafted(&[], &[], (22, 5, TreeInit::ChainOnly), REACH).tree;
        assert_eq!(chain.depths(), [0, 1, 2, 3, 4, 5]);
        let seeded = drafted(&[], &[], (9, 40, TreeInit::Chain), REACH).tree;
        assert_eq!(seeded.depths()[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(seeded.len(), 10);
        let forced = [TokenId(50), TokenId(51)];
        let hints = [TokenId(60), TokenId(61)];
        let built = drafted(&forced, &hints, (6, 40, TreeInit::None), REACH).tree;
        let ids: Vec<u32> = built.tokens()[..5].iter().map(|t| t.0).collect();
        assert_eq!(ids, [5, 50, 51, 60, 61]);
        assert_eq!(built.len(), 9);
        assert_eq!(built.depth(NodeIdx(5)), 3);
    }

    #[test]
    fn growth_ends_where_another_depth_does_not_pay() {
        let short = MtpReach {
            least_gain: 1.2,
            ..REACH
        };
        // Four first ranks of one row sum to 1.22, and at the next depth to less.
        let built = drafted(&[], &[], (22, 40, TreeInit::None), short);
        let deepest = built.tree.depths().iter().max().copied().unwrap();
        assert!((1..7).contains(&deepest), "{deepest}");
        let few = MtpReach {
            max_rows: 3,
            ..REACH
        };
        assert!(drafted(&[], &[], (22, 40, TreeInit::None), few).tree.len() <= 13);
    }
}
