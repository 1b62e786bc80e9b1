//! Tree sizes of a step: the node counts with the most expected tokens per second.

use super::table::CostTable;

/// Acceptance probabilities of one sequence's nodes, in order of creation.
pub(crate) struct NodeChances {
    /// Nodes in the tree in any case: the root and forced tokens.
    pub(crate) certain: usize,
    /// `[drafted nodes]`.
    pub(crate) chances: Vec<f64>,
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

/// The sizes with the most tokens per second, beside `others` nodes of sequences that do not draft.
///
/// Nodes are added by descending probability over all sequences, and every count is evaluated, so
/// that steps in the cost table are respected.
pub(crate) fn choose_sizes(
    costs: &CostTable,
    chances_by_sequence: &[NodeChances],
    others: usize,
) -> TreeSizes {
    let certain = others + chances_by_sequence.iter().map(|p| p.certain).sum::<usize>();
    let draft = costs.draft(chances_by_sequence.len());
    let mut nodes = vec![0; chances_by_sequence.len()];
    let (mut rows, mut tokens) = (certain, certain as f64);
    let mut best = TreeSizes {
        nodes: nodes.clone(),
        tokens,
        seconds: draft + costs.verify(rows),
    };
    loop {
        let next = chances_by_sequence.iter().zip(&nodes).enumerate();
        let next = next.filter_map(|(i, (p, n))| Some((i, *p.chances.get(*n)?)));
        let Some((i, chance)) = next.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))) else {
            return best;
        };
        nodes[i] += 1;
        rows += 1;
        tokens += chance;
        let seconds = draft + costs.verify(rows);
        if tokens / seconds > best.tokens / best.seconds {
            best = TreeSizes {
                nodes: nodes.clone(),
                tokens,
                seconds,
            };
        }
    }
}
