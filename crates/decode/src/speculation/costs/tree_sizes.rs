//! Tree sizes of a step: the node counts with the most expected tokens per second.

use super::table::CostTable;

/// Acceptance probabilities of one sequence's nodes, in order of creation.
pub(crate) struct NodeAcceptance {
    /// Nodes in the tree in any case: the root and forced tokens.
    pub(crate) base_nodes: usize,
    /// `[drafted nodes]`.
    pub(crate) probabilities: Vec<f64>,
}

/// Drafted nodes of each sequence in a step, and the step's expectation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TreeSizes {
    pub(crate) nodes: Vec<usize>,
    /// Expected tokens over all sequences.
    pub(crate) tokens: f64,
    /// Expected seconds, draft included.
    pub(crate) seconds: f64,
}

impl TreeSizes {
    /// Expected tokens per second.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds
    }
}

/// The sizes with the most tokens per second, behind drafts of `draft` seconds and beside `others`
/// nodes of sequences that do not draft.
///
/// Nodes are added by descending probability over all sequences, and every count is evaluated, so
/// that steps in the cost table are respected.
pub(crate) fn choose_sizes(
    costs: &CostTable,
    acceptance_by_sequence: &[NodeAcceptance],
    (draft, others): (f64, usize),
) -> TreeSizes {
    let base_nodes = others
        + acceptance_by_sequence
            .iter()
            .map(|node| node.base_nodes)
            .sum::<usize>();
    let mut nodes = vec![0; acceptance_by_sequence.len()];
    let (mut rows, mut tokens) = (base_nodes, base_nodes as f64);
    let mut best = TreeSizes {
        nodes: nodes.clone(),
        tokens,
        seconds: draft + costs.verify(rows),
    };
    loop {
        let next = acceptance_by_sequence.iter().zip(&nodes).enumerate();
        let next = next.filter_map(|(i, (p, n))| Some((i, *p.probabilities.get(*n)?)));
        let Some((i, probability)) = next.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
        else {
            return best;
        };
        nodes[i] += 1;
        rows += 1;
        tokens += probability;
        let seconds = draft + costs.verify(rows);
        if tokens / seconds > best.tokens_per_second() {
            best = TreeSizes {
                nodes: nodes.clone(),
                tokens,
                seconds,
            };
        }
    }
}
