//! Tree sizes of a step: the node counts with the most expected tokens per second.

use super::table::CostTable;

/// One sequence's nodes in the order they would be added: the probability that each is kept.
pub(crate) struct NodeChances {
    /// Nodes that are in any case: the root and what is forced.
    pub(crate) certain: usize,
    /// `[drafted nodes]`.
    pub(crate) chances: Vec<f64>,
}

/// How many drafted nodes of each sequence a round should carry, and what it may hope for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TreeSizes {
    pub(crate) nodes: Vec<usize>,
    /// Tokens expected over all sequences.
    pub(crate) tokens: f64,
    /// Seconds expected, draft included.
    pub(crate) seconds: f64,
}

/// The sizes at which tokens per second are most, beside `others` nodes of sequences that do not draft. Nodes are
/// taken by falling chance over all sequences, and every number of them is tried, so that steps in the table are
/// seen for what they are.
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
