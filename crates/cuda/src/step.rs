//! The headers that carry the data of a step; mirror of `kernels/common/step.cuh`.
//!
//! The runner fills one of these per call and uploads its bytes. Every other launch argument is
//! fixed when a plan is built. So one captured graph serves every step with the same bucket and
//! number of trees.

use contract::{NodeIdx, TokenId, Tree};

use crate::launch::gated_delta::dfs_schedule;

/// Rows of one step.
pub(crate) const ROWS: usize = 64;
/// Trees of one step.
pub(crate) const TREES: usize = 8;
/// The window of a tree that sees everything; added to a position it is still below 2^31.
const ALL: i32 = 1 << 30;
/// Padded row counts that plans are built for.
pub(crate) const BUCKETS: [usize; 8] = [1, 8, 16, 24, 32, 40, 48, 64];

/// Padded row counts of drafts with the multi-token-prediction head: a root row alone, roots of
/// several sequences or a chain, and wider trees.
pub(crate) const MTP_DRAFT_BUCKETS: [usize; 5] = [1, 8, 16, 32, ROWS];

/// The bucket of a draft of `rows` rows.
pub(crate) fn mtp_draft_bucket(rows: usize) -> usize {
    let mut buckets = MTP_DRAFT_BUCKETS.into_iter();
    buckets.find(|bucket| *bucket >= rows).unwrap_or(ROWS)
}

/// The bucket that holds `rows` rows, 1 to [`ROWS`].
pub(crate) fn bucket(rows: usize) -> usize {
    BUCKETS
        .into_iter()
        .find(|bucket| *bucket >= rows)
        .unwrap_or(ROWS)
}

/// One tree of a [`Step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct StepTree {
    pub(crate) slot: i32,
    pub(crate) committed: i32,
    pub(crate) first: i32,
    pub(crate) nodes: i32,
}

/// The nodes of up to [`TREES`] trees.
#[derive(Debug, Clone, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Step {
    pub(crate) rows: i32,
    pub(crate) trees: i32,
    pub(crate) n_logits_rows: i32,
    /// Of blocks of a draft whose candidates depend on the token before: how many of a list.
    pub(crate) candidates: i32,
    pub(crate) tree: [StepTree; TREES],
    pub(crate) token: [i32; ROWS],
    pub(crate) position: [i32; ROWS],
    pub(crate) tree_of: [i32; ROWS],
    pub(crate) parent: [i32; ROWS],
    pub(crate) depth: [i32; ROWS],
    pub(crate) ancestors: [u64; ROWS],
    pub(crate) logits_row: [i32; ROWS],
    /// A committed key at `k` is seen from `q` while `q - k` is less; [`ALL`] for no window.
    pub(crate) window: [i32; TREES],
    /// Committed keys before this position are seen whatever the window.
    pub(crate) sinks: [i32; TREES],
    /// Where the captured hidden states of a tree's root go, counted over all slots; its other
    /// nodes follow.
    pub(crate) feature_row: [i32; TREES],
    /// `conv_sources` and `dfs_schedule` of the kernels. Has [`dfs_schedule::header`] of each tree,
    /// from the entry of its first row on.
    pub(crate) conv_sources_and_schedule: [[u32; ROWS]; dfs_schedule::PARTS],
}

/// The header of a prefill chunk; its tokens follow.
#[derive(Debug, Clone, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ChunkHead {
    pub(crate) rows: i32,
    pub(crate) slot: i32,
    pub(crate) committed: i32,
    pub(crate) n_logits_rows: i32,
    pub(crate) logits_row: [i32; ROWS],
}

/// One path of a [`Commit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct StepPath {
    pub(crate) slot: i32,
    pub(crate) committed: i32,
    pub(crate) length: i32,
    pad: i32,
    pub(crate) node: [i32; ROWS],
}

/// Accepted paths. For the draft's context: rows of the slots' pending features, the first of each
/// path that of the token at `committed`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Commit {
    pub(crate) paths: i32,
    pad: [i32; 3],
    pub(crate) path: [StepPath; TREES],
}

/// Rows of the multi-token-prediction head: rows that it drafts, each tree those of one sequence;
/// or the rows of committed paths, each tree a path.
#[derive(Debug, Clone, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MtpStep {
    pub(crate) step: Step,
    /// Rows that each tree's sequence drafted before.
    pub(crate) earlier: [i32; TREES],
    /// Of committed paths: the node of the verified tree that each path ends with.
    pub(crate) last: [i32; TREES],
    /// The hidden row before each row, counted over all slots.
    pub(crate) before: [i32; ROWS],
}

/// One row to be drafted by the multi-token-prediction head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftedRow {
    pub(crate) token: TokenId,
    pub(crate) depth: usize,
    /// Bit `j`: drafted row `j` of the sequence is an ancestor or the row itself.
    pub(crate) ancestors: u64,
    /// The drafted row before it; `None` for a root row.
    pub(crate) parent: Option<usize>,
}

/// Hidden rows per slot: that of the last committed position, then those of the pending tree's
/// nodes or of drafted rows.
pub(crate) const HIDDEN_ROWS: usize = 1 + ROWS;

/// The hidden row of a node or of a drafted row; of the last committed position for `None`.
fn hidden_row(slot: usize, node: Option<usize>) -> i32 {
    int(slot * HIDDEN_ROWS + node.map_or(0, |node| 1 + node))
}

/// A number of a header; everything in one is far below 2^31.
fn int(value: usize) -> i32 {
    i32::try_from(value)
        .expect("contexts, rows and slots are refused by estimate before they reach 2^31")
}

impl Step {
    /// A step without rows.
    pub(crate) fn new() -> Step {
        Step {
            rows: 0,
            trees: 0,
            n_logits_rows: 0,
            candidates: 0,
            tree: [StepTree::default(); TREES],
            token: [0; ROWS],
            position: [0; ROWS],
            tree_of: [-1; ROWS],
            parent: [-1; ROWS],
            depth: [0; ROWS],
            ancestors: [0; ROWS],
            logits_row: [0; ROWS],
            window: [ALL; TREES],
            sinks: [0; TREES],
            feature_row: [0; TREES],
            conv_sources_and_schedule: [[0; ROWS]; dfs_schedule::PARTS],
        }
    }

    /// Adds the tree of a sequence with `committed` tokens; at most [`TREES`] trees of [`ROWS`]
    /// nodes in all.
    pub(crate) fn push(&mut self, slot: usize, committed: usize, tree: &Tree) {
        let first = self.rows as usize;
        let index = self.trees as usize;
        self.tree[index] = StepTree {
            slot: int(slot),
            committed: int(committed),
            first: self.rows,
            nodes: int(tree.len()),
        };
        let window = tree.window();
        self.window[index] = if window.is_full() {
            ALL
        } else {
            ALL.min(int(window.tokens() + 1))
        };
        self.sinks[index] = int(window.sinks());
        for node in tree.nodes() {
            let row = first + node.index();
            self.token[row] = int(tree.token(node).index());
            self.position[row] = int(committed + tree.depth(node));
            self.tree_of[row] = self.trees;
            self.parent[row] = tree.parent(node).map_or(-1, |p| int(first + p.index()));
            self.depth[row] = int(tree.depth(node));
            self.ancestors[row] = tree.ancestor_mask(node);
        }
        let parent = |node| tree.parent(node).map(|parent| parent.index());
        let parents: Vec<Option<usize>> = tree.nodes().map(parent).collect();
        for (part, list) in self
            .conv_sources_and_schedule
            .iter_mut()
            .zip(dfs_schedule::header(&parents))
        {
            part[first..][..list.len()].copy_from_slice(&list);
        }
        self.rows += int(tree.len());
        self.trees += 1;
    }

    /// Sends the captured hidden states of tree `index` to rows from `row` on, counted over all
    /// slots.
    pub(crate) fn set_feature_row(&mut self, index: usize, row: usize) {
        self.feature_row[index] = int(row);
    }

    /// The bucket of its rows.
    pub(crate) fn bucket(&self) -> usize {
        bucket(usize::try_from(self.rows).unwrap_or(0))
    }

    /// How many candidates of a list count, for blocks of a draft.
    pub(crate) fn set_candidates(&mut self, k: usize) {
        self.candidates = int(k);
    }

    /// Requests the logits of `row`.
    pub(crate) fn request_logits(&mut self, row: usize) {
        self.logits_row[self.n_logits_rows as usize] = int(row);
        self.n_logits_rows += 1;
    }
}

impl MtpStep {
    /// A step without rows.
    pub(crate) fn new() -> MtpStep {
        MtpStep {
            step: Step::new(),
            earlier: [0; TREES],
            last: [0; TREES],
            before: [0; ROWS],
        }
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.step.rows as usize
    }

    /// Whether there is room for `rows` rows of one more sequence.
    pub(crate) fn has_room(&self, rows: usize) -> bool {
        self.rows() + rows <= ROWS && (self.step.trees as usize) < TREES
    }

    /// Adds rows of a sequence with `committed` tokens and `earlier` drafted rows, and requests
    /// their logits.
    pub(crate) fn push_drafted(
        &mut self,
        slot: usize,
        (committed, earlier): (usize, usize),
        rows: &[DraftedRow],
    ) {
        let (first, index) = (self.rows(), self.step.trees as usize);
        let step = &mut self.step;
        step.tree[index] = StepTree {
            slot: int(slot),
            committed: int(committed),
            first: int(first),
            nodes: int(rows.len()),
        };
        self.earlier[index] = int(earlier);
        for (row, drafted) in (first..).zip(rows) {
            step.token[row] = int(drafted.token.index());
            step.position[row] = int(committed + drafted.depth);
            step.tree_of[row] = step.trees;
            step.depth[row] = int(drafted.depth);
            step.ancestors[row] = drafted.ancestors;
            self.before[row] = hidden_row(slot, drafted.parent);
            step.request_logits(row);
        }
        step.rows += int(rows.len());
        step.trees += 1;
    }

    /// Adds a path of the verified tree of a sequence with `committed` tokens: `tokens` of `nodes`.
    pub(crate) fn push_path(
        &mut self,
        (slot, committed): (usize, usize),
        nodes: &[NodeIdx],
        tokens: &[TokenId],
    ) {
        let (first, index) = (self.rows(), self.step.trees as usize);
        let chain = Tree::chain(tokens).expect("a path is at most a tree");
        self.step.push(slot, committed, &chain);
        let before = std::iter::once(None).chain(nodes.iter().map(|node| Some(node.index())));
        for (row, before) in (first..first + nodes.len()).zip(before) {
            self.before[row] = hidden_row(slot, before);
        }
        self.last[index] = nodes.last().map_or(0, |node| int(node.index()));
    }
}

impl ChunkHead {
    /// A chunk of `rows` tokens after `committed` ones.
    pub(crate) fn new(slot: usize, committed: usize, rows: usize) -> ChunkHead {
        ChunkHead {
            rows: int(rows),
            slot: int(slot),
            committed: int(committed),
            n_logits_rows: 0,
            logits_row: [0; ROWS],
        }
    }

    /// Sets the logits rows, at most [`ROWS`].
    pub(crate) fn request_logits(&mut self, rows: impl Iterator<Item = usize>) {
        self.n_logits_rows = 0;
        for (entry, row) in self.logits_row.iter_mut().zip(rows) {
            *entry = int(row);
            self.n_logits_rows += 1;
        }
    }

    /// Bytes of a chunk with room for `rows` tokens.
    pub(crate) fn bytes(rows: usize) -> usize {
        size_of::<ChunkHead>() + 4 * rows
    }

    /// Appends the header and its tokens to `out`.
    pub(crate) fn write(&self, tokens: &[TokenId], out: &mut Vec<u8>) {
        out.extend_from_slice(bytes_of(self));
        for token in tokens {
            out.extend_from_slice(&token.0.to_le_bytes());
        }
    }
}

impl Commit {
    /// A commit of nothing.
    pub(crate) fn new() -> Commit {
        let path = StepPath {
            slot: 0,
            committed: 0,
            length: 0,
            pad: 0,
            node: [0; ROWS],
        };
        Commit {
            paths: 0,
            pad: [0; 3],
            path: [path; TREES],
        }
    }

    /// Adds the path of a sequence with `committed` tokens.
    pub(crate) fn push(&mut self, slot: usize, committed: usize, nodes: &[NodeIdx]) {
        self.push_rows(slot, committed, nodes.iter().map(|node| node.index()));
    }

    /// Adds rows of a slot's pending features, or nodes of its tree, of tokens from `first` on; at
    /// most [`ROWS`].
    pub(crate) fn push_rows(
        &mut self,
        slot: usize,
        first: usize,
        rows: impl ExactSizeIterator<Item = usize>,
    ) {
        let path = &mut self.path[self.paths as usize];
        path.slot = int(slot);
        path.committed = int(first);
        path.length = int(rows.len());
        for (entry, row) in path.node.iter_mut().zip(rows) {
            *entry = int(row);
        }
        self.paths += 1;
    }
}

/// Headers whose bytes are what the device reads.
///
/// # Safety
/// The type is `repr(C)`, has no padding and no pointer.
pub(crate) unsafe trait Header: Sized {}

// SAFETY: `repr(C)`, 4-byte fields, then 8-byte ones at a multiple of 8, then 4-byte ones filling a
// multiple of 8.
unsafe impl Header for Step {}
// SAFETY: `repr(C)`, a `Step`, then 4-byte fields filling a multiple of 8.
unsafe impl Header for MtpStep {}
// SAFETY: `repr(C)`, only 4-byte fields.
unsafe impl Header for ChunkHead {}
// SAFETY: `repr(C)`, only 4-byte fields.
unsafe impl Header for Commit {}

/// The bytes of a header.
pub(crate) fn bytes_of<T: Header>(header: &T) -> &[u8] {
    // SAFETY: a `Header` has no padding, so every byte of it is initialised; the slice borrows it.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(header).cast(), size_of::<T>()) }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!(size_of::<StepTree>(), 16);
        assert_eq!(offset_of!(Step, tree), 16);
        assert_eq!(offset_of!(Step, token), 144);
        assert_eq!(offset_of!(Step, ancestors), 144 + 5 * 256);
        assert_eq!(offset_of!(Step, logits_row), 1424 + 512);
        assert_eq!(offset_of!(Step, window), 2192);
        assert_eq!(offset_of!(Step, feature_row), 2256);
        assert_eq!(offset_of!(Step, conv_sources_and_schedule), 2288);
        assert_eq!(size_of::<Step>(), 2288 + 2 * 256);
        assert_eq!(offset_of!(MtpStep, earlier), size_of::<Step>());
        assert_eq!(offset_of!(MtpStep, before), size_of::<Step>() + 64);
        assert_eq!(size_of::<MtpStep>(), size_of::<Step>() + 64 + 256);
        assert_eq!(size_of::<ChunkHead>(), 16 + 256);
        assert_eq!(size_of::<StepPath>(), 16 + 256);
        assert_eq!(size_of::<Commit>(), 16 + 8 * 272);
    }

    #[test]
    fn second_tree_has_the_rows_after_the_first() {
        let tokens: Vec<TokenId> = [5, 6, 7].map(TokenId).to_vec();
        let fork = Tree::new(&tokens, &[NodeIdx(0), NodeIdx(0)]).unwrap();
        let mut step = Step::new();
        step.push(3, 10, &fork);
        step.push(1, 20, &Tree::chain(&tokens).unwrap());
        step.request_logits(4);
        assert_eq!((step.rows, step.trees, step.n_logits_rows), (6, 2, 1));
        assert_eq!(step.parent[..7], [-1, 0, 0, -1, 3, 4, -1]);
        assert_eq!(step.position[..6], [10, 11, 11, 20, 21, 22]);
        assert_eq!(step.tree_of[..7], [0, 0, 0, 1, 1, 1, -1]);
        assert_eq!(step.ancestors[..6], [1, 3, 5, 1, 3, 7]);
        assert_eq!(step.tree[1].first, 3);
        assert_eq!(step.logits_row[0], 4);
    }

    #[test]
    fn drafted_rows_and_paths_name_the_hidden_row_before_them() {
        let drafted = |token, depth, ancestors, parent| DraftedRow {
            token: TokenId(token),
            depth,
            ancestors,
            parent,
        };
        let mut step = MtpStep::new();
        step.push_drafted(3, (10, 0), &[drafted(7, 0, 1, None)]);
        let rows = [
            drafted(8, 1, 0b101, Some(0)),
            drafted(9, 2, 0b1011, Some(1)),
        ];
        assert!(step.has_room(63) && !step.has_room(64));
        step.push_drafted(1, (20, 2), &rows);
        assert_eq!(
            (step.rows(), step.step.trees, step.step.n_logits_rows),
            (3, 2, 3)
        );
        assert_eq!(step.step.tree[1].first, 1);
        assert_eq!(step.earlier[..3], [0, 2, 0]);
        assert_eq!(step.step.position[..3], [10, 21, 22]);
        assert_eq!(step.step.ancestors[..3], [1, 0b101, 0b1011]);
        assert_eq!(step.step.tree_of[..4], [0, 1, 1, -1]);
        let [three, one] = [3, 1].map(|slot| slot * HIDDEN_ROWS as i32);
        assert_eq!(step.before[..3], [three, one + 1, one + 2]);

        let mut step = MtpStep::new();
        let tokens = [5, 6, 7].map(TokenId);
        step.push_path((0, 30), &[0, 2, 5].map(NodeIdx), &tokens);
        step.push_path((2, 40), &[NodeIdx(0)], &tokens[..1]);
        assert_eq!((step.rows(), step.step.trees), (4, 2));
        assert_eq!(step.step.position[..4], [30, 31, 32, 40]);
        assert_eq!(step.step.token[..4], [5, 6, 7, 5]);
        let two = 2 * HIDDEN_ROWS as i32;
        assert_eq!(step.before[..4], [0, 1, 3, two]);
        assert_eq!(step.last[..2], [5, 0]);
    }

    #[test]
    fn every_row_count_has_the_smallest_bucket_that_holds_it() {
        assert_eq!(
            [1, 2, 8, 9, 23, 25, 33, 41, 49, 64].map(bucket),
            [1, 8, 8, 16, 24, 32, 40, 48, 64, 64]
        );
    }
}
