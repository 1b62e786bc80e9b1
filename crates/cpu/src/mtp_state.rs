//! A sequence's state for the multi-token-prediction head, besides its cached keys and values.

use contract::protocol::{MAX_WAITING_TOKENS, push_mtp_row};
use contract::{MtpRow, NodeIdx, TokenId, Tree};

/// Maximum number of committed tokens whose keys and values the head's cache does not hold yet.
/// Each row depends on its token and its hidden row alone, so one pass over many rows gives the
/// bits of a pass per token, and it costs less.
pub(crate) const MAX_UNCACHED_ROWS: usize = MAX_WAITING_TOKENS;

/// Hidden rows that the head reads, and the rows that it has drafted. Dropped with the sequence.
pub(crate) struct MtpState {
    /// `[hidden]`: the row of the last committed position after the final norm; zeros at position
    /// 0.
    pub(crate) hidden: Vec<f32>,
    /// The rows of the pending tree's nodes after the final norm, `[n_nodes, hidden]`.
    pub(crate) tree_hidden: Vec<f32>,
    /// The last committed tokens, whose keys and values are not cached yet.
    pub(crate) uncached_tokens: Vec<TokenId>,
    /// The hidden row before each of them, `[n, hidden]`.
    pub(crate) uncached_hidden: Vec<f32>,
    /// Depth of each drafted row.
    depths: Vec<usize>,
    /// Path of each drafted row from its root row, itself included.
    paths: Vec<Vec<NodeIdx>>,
    /// Output of each drafted row, `[n, hidden]`.
    outputs: Vec<f32>,
}

impl MtpState {
    /// The state of an empty sequence.
    pub(crate) fn new(hidden: usize) -> MtpState {
        MtpState {
            hidden: vec![0.0; hidden],
            tree_hidden: Vec::new(),
            uncached_tokens: Vec::new(),
            uncached_hidden: Vec::new(),
            depths: Vec::new(),
            paths: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// Commits `path` of the pending tree. Its keys and values stay uncached.
    pub(crate) fn commit(&mut self, tree: &Tree, path: &[NodeIdx]) {
        let width = self.hidden.len();
        for node in path {
            self.uncached_tokens.push(tree.token(*node));
            self.uncached_hidden.extend_from_slice(&self.hidden);
            let row = &self.tree_hidden[node.index() * width..][..width];
            self.hidden.copy_from_slice(row);
        }
    }

    /// Restores the state behind a position whose keys and values are cached.
    pub(crate) fn restore(&mut self, hidden: &[f32]) {
        self.hidden.copy_from_slice(hidden);
        self.mark_cached();
        self.drop_drafted();
    }

    /// Marks all committed tokens as cached.
    pub(crate) fn mark_cached(&mut self) {
        self.uncached_tokens.clear();
        self.uncached_hidden.clear();
    }

    /// Depths of the drafted rows.
    pub(crate) fn depths(&self) -> &[usize] {
        &self.depths
    }

    /// Forgets the drafted rows.
    pub(crate) fn drop_drafted(&mut self) {
        self.depths.clear();
        self.paths.clear();
        self.outputs.clear();
    }

    /// Adds a drafted row, still without output, and returns its index.
    pub(crate) fn add_row(&mut self, parent: Option<MtpRow>) -> usize {
        if parent.is_none() {
            self.drop_drafted();
        }
        push_mtp_row(&mut self.depths, parent);
        let row = self.paths.len();
        let mut path = parent.map_or(Vec::new(), |parent| self.paths[parent.index()].clone());
        path.push(NodeIdx(row as u16));
        self.paths.push(path);
        self.outputs
            .resize(self.paths.len() * self.hidden.len(), 0.0);
        row
    }

    /// The path to a drafted row, itself included.
    pub(crate) fn path(&self, row: usize) -> &[NodeIdx] {
        &self.paths[row]
    }

    /// The hidden row that a drafted row reads: its parent's output, or the last committed row.
    pub(crate) fn input(&self, row: usize) -> &[f32] {
        match self.paths[row].iter().rev().nth(1) {
            Some(parent) => {
                let width = self.hidden.len();
                &self.outputs[parent.index() * width..][..width]
            }
            None => &self.hidden,
        }
    }

    /// The output of a drafted row, to be written.
    pub(crate) fn output_mut(&mut self, row: usize) -> &mut [f32] {
        let width = self.hidden.len();
        &mut self.outputs[row * width..][..width]
    }
}
