//! Prefill as decode steps over single-branch trees, each committed: the slow path that separates
//! faults of the prefill kernels from others.

use contract::{DeviceError, LogitsRequest, LogitsRow, TokenId, Tree, TreePath};

use super::Engine;
use crate::step::{Commit, MtpStep, ROWS, Step};

impl Engine {
    /// Runs and commits `tokens` of the sequence in `slot` after `committed` ones.
    pub(crate) fn prefill_as_steps(
        &mut self,
        (slot, mut committed): (usize, usize),
        tokens: &[TokenId],
        requests: &[(usize, &LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let mut rows = Vec::with_capacity(requests.len());
        let mut requests = requests.iter().peekable();
        let nodes = self.plans.tree_nodes().min(ROWS);
        for (i, piece) in tokens.chunks(nodes).enumerate() {
            let tree = Tree::chain(piece).expect("a piece is at most a tree");
            let mut step = Step::new();
            step.push(slot, committed, &tree);
            let mut asked = Vec::new();
            while let Some((row, ask)) = requests.next_if(|(row, _)| *row < (i + 1) * nodes) {
                step.request_logits(row - i * nodes);
                asked.push(*ask);
            }
            rows.append(&mut self.step(&mut step, &asked)?);
            let path: TreePath = tree.path_to(contract::NodeIdx(piece.len() as u16 - 1));
            let mut commit = Commit::new();
            commit.push(slot, committed, path.nodes());
            let mtp = self.state.hidden.map(|_| {
                let mut paths = MtpStep::new();
                paths.push_path((slot, committed), path.nodes(), piece);
                paths
            });
            self.commit(&commit, mtp.as_ref())?;
            committed += piece.len();
        }
        Ok(rows)
    }
}
