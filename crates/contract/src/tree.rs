//! The draft tree and a path through it.

use crate::{AttentionWindow, NodeIdx, TokenId};

/// A draft tree in an order that puts every parent before its children.
///
/// Node 0 is the root: the sampled token that is not in the KV cache yet.
/// The position of a node is the committed length plus its depth. A node sees its ancestors only,
/// in attention, in the convolution window and in the delta state.
/// Backends rely on `parent < index` and `len() <= MAX_NODES`; [`Tree::new`] and [`Tree::push`]
/// enforce both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    tokens: Vec<TokenId>,
    /// Parent of node `i + 1`; the root has none and is not stored.
    parents: Vec<NodeIdx>,
    depths: Vec<u16>,
    /// Bit `j` of entry `i` is set when node `j` is node `i` or one of its ancestors.
    ancestors: Vec<u64>,
    window: AttentionWindow,
}

// A node must see all of its ancestors through any window.
const _: () = assert!(Tree::MAX_NODES <= AttentionWindow::MIN_TOKENS);

/// Why a tree or path is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// A tree needs its root.
    #[error("a tree needs at least its root")]
    Empty,
    /// More nodes than one forward pass may carry.
    #[error("{nodes} nodes are more than the {} a tree may have", Tree::MAX_NODES)]
    TooLarge {
        /// How many nodes were given.
        nodes: usize,
    },
    /// `parents` must have one entry less than `tokens`.
    #[error("{tokens} tokens need {} parents, not {parents}", tokens.saturating_sub(1))]
    LengthMismatch {
        /// How many tokens were given.
        tokens: usize,
        /// How many parents were given.
        parents: usize,
    },
    /// A node names itself or a later node as its parent.
    #[error("node {node} has parent {parent}, which is not an earlier node")]
    ParentNotBefore {
        /// The child.
        node: usize,
        /// What it names as its parent.
        parent: usize,
    },
    /// Two children of one parent carry the same token, so acceptance would be ambiguous.
    #[error("node {node} repeats the token of a sibling")]
    DuplicateSibling {
        /// The later of the two.
        node: usize,
    },
    /// A path does not begin at the root, or skips a generation.
    #[error("entry {at} of the path is not a child of the entry before it")]
    InvalidPath {
        /// The first bad entry.
        at: usize,
    },
}

impl Tree {
    /// Maximum number of nodes of a tree, so that a node's ancestors fit one 64-bit mask.
    pub const MAX_NODES: usize = 64;

    /// A tree with only a root, for plain decoding.
    pub fn root(token: TokenId) -> Tree {
        Tree {
            tokens: vec![token],
            parents: Vec::new(),
            depths: vec![0],
            ancestors: vec![1],
            window: AttentionWindow::FULL,
        }
    }

    /// Sets the attention window over the committed context.
    pub fn with_window(mut self, window: AttentionWindow) -> Tree {
        self.window = window;
        self
    }

    /// The attention window over the committed context; [`AttentionWindow::FULL`] by default.
    pub fn window(&self) -> AttentionWindow {
        self.window
    }

    /// Builds a tree and checks order and size, so that devices need not.
    ///
    /// `tokens` is `[n_nodes]`; `parents` is `[n_nodes - 1]`, the parent of node `i + 1` at `i`.
    pub fn new(tokens: &[TokenId], parents: &[NodeIdx]) -> Result<Tree, TreeError> {
        let (&root, rest) = tokens.split_first().ok_or(TreeError::Empty)?;
        if parents.len() != rest.len() {
            return Err(TreeError::LengthMismatch {
                tokens: tokens.len(),
                parents: parents.len(),
            });
        }
        let mut tree = Tree::root(root);
        for (&token, &parent) in rest.iter().zip(parents) {
            tree.push(parent, token)?;
        }
        Ok(tree)
    }

    /// A tree with one child per node, for chain speculation.
    pub fn chain(tokens: &[TokenId]) -> Result<Tree, TreeError> {
        if tokens.len() > Tree::MAX_NODES {
            return Err(TreeError::TooLarge {
                nodes: tokens.len(),
            });
        }
        let parents: Vec<NodeIdx> = (0..tokens.len().saturating_sub(1))
            .map(|i| NodeIdx(i as u16))
            .collect();
        Tree::new(tokens, &parents)
    }

    /// Adds a node and returns its index.
    pub fn push(&mut self, parent: NodeIdx, token: TokenId) -> Result<NodeIdx, TreeError> {
        let node = self.len();
        if node >= Tree::MAX_NODES {
            return Err(TreeError::TooLarge { nodes: node + 1 });
        }
        if parent.index() >= node {
            return Err(TreeError::ParentNotBefore {
                node,
                parent: parent.index(),
            });
        }
        if self.child_with(parent, token).is_some() {
            return Err(TreeError::DuplicateSibling { node });
        }
        self.tokens.push(token);
        self.parents.push(parent);
        self.depths.push(self.depths[parent.index()] + 1);
        self.ancestors
            .push(self.ancestors[parent.index()] | (1 << node));
        Ok(NodeIdx(node as u16))
    }

    /// Number of nodes, the root included; at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a tree always has its root")]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of all nodes, `[n_nodes]`.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Depths of all nodes, `[n_nodes]`; the root has 0.
    pub fn depths(&self) -> &[u16] {
        &self.depths
    }

    /// The token of a node.
    pub fn token(&self, node: NodeIdx) -> TokenId {
        self.tokens[node.index()]
    }

    /// The depth of a node; the root has 0.
    pub fn depth(&self, node: NodeIdx) -> usize {
        usize::from(self.depths[node.index()])
    }

    /// The parent of a node, `None` for the root.
    pub fn parent(&self, node: NodeIdx) -> Option<NodeIdx> {
        node.index().checked_sub(1).map(|i| self.parents[i])
    }

    /// Bit `j` is set when node `j` is `node` itself or one of its ancestors.
    pub fn ancestor_mask(&self, node: NodeIdx) -> u64 {
        self.ancestors[node.index()]
    }

    /// All nodes in parent-first order.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = NodeIdx> + ExactSizeIterator {
        (0..self.tokens.len() as u16).map(NodeIdx)
    }

    /// The children of a node, in the order they were added.
    pub fn children(&self, node: NodeIdx) -> impl Iterator<Item = NodeIdx> + '_ {
        self.parents
            .iter()
            .enumerate()
            .filter(move |(_, parent)| **parent == node)
            .map(|(i, _)| NodeIdx(i as u16 + 1))
    }

    /// The child of `node` that carries `token`, if there is one.
    pub fn child_with(&self, node: NodeIdx, token: TokenId) -> Option<NodeIdx> {
        self.children(node)
            .find(|child| self.token(*child) == token)
    }

    /// The path from the root down to `node`, both included.
    pub fn path_to(&self, node: NodeIdx) -> TreePath {
        let mut nodes = vec![node];
        let mut at = node;
        while let Some(parent) = self.parent(at) {
            nodes.push(parent);
            at = parent;
        }
        nodes.reverse();
        TreePath { nodes }
    }

    /// Checks that `nodes` begins at the root and each entry is a child of the one before.
    pub fn path(&self, nodes: &[NodeIdx]) -> Result<TreePath, TreeError> {
        if nodes.first() != Some(&NodeIdx::ROOT) {
            return Err(TreeError::InvalidPath { at: 0 });
        }
        for (i, pair) in nodes.windows(2).enumerate() {
            if pair[1].index() >= self.len() || self.parent(pair[1]) != Some(pair[0]) {
                return Err(TreeError::InvalidPath { at: i + 1 });
            }
        }
        Ok(TreePath {
            nodes: nodes.to_vec(),
        })
    }
}

/// Nodes from the root downwards, each a child of the one before. Never empty.
///
/// Only [`Tree::path`] and [`Tree::path_to`] create one, so it is valid for the tree it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreePath {
    nodes: Vec<NodeIdx>,
}

impl TreePath {
    /// The nodes, root first.
    pub fn nodes(&self) -> &[NodeIdx] {
        &self.nodes
    }

    /// Number of tokens that a commit of this path adds; at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a path always has the root")]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The last node of the path.
    pub fn end(&self) -> NodeIdx {
        self.nodes[self.nodes.len() - 1]
    }

    /// The first `len` nodes, at least the root.
    pub fn truncated(&self, len: usize) -> TreePath {
        TreePath {
            nodes: self.nodes[..len.clamp(1, self.nodes.len())].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[u32]) -> Vec<TokenId> {
        ids.iter().copied().map(TokenId).collect()
    }

    fn nodes(ids: &[u16]) -> Vec<NodeIdx> {
        ids.iter().copied().map(NodeIdx).collect()
    }

    #[test]
    fn ancestor_masks_hold_self_and_ancestors_only() {
        let tree = Tree::new(&tokens(&[1, 2, 3, 4]), &nodes(&[0, 0, 1])).unwrap();
        assert_eq!(tree.ancestor_mask(NodeIdx(3)), 0b1011);
        assert_eq!(tree.ancestor_mask(NodeIdx(2)), 0b0101);
        assert_eq!(tree.path_to(NodeIdx(3)).nodes(), nodes(&[0, 1, 3]));
        assert_eq!(tree.depths(), [0, 1, 1, 2]);
    }

    #[test]
    fn invalid_trees_are_refused_with_the_reason() {
        let bad = |t: &[u32], p: &[u16]| Tree::new(&tokens(t), &nodes(p)).unwrap_err();
        assert_eq!(bad(&[], &[]), TreeError::Empty);
        assert_eq!(
            bad(&[1, 2], &[]),
            TreeError::LengthMismatch {
                tokens: 2,
                parents: 0
            }
        );
        assert_eq!(
            bad(&[1, 2], &[1]),
            TreeError::ParentNotBefore { node: 1, parent: 1 }
        );
        assert_eq!(
            bad(&[1, 2, 2], &[0, 0]),
            TreeError::DuplicateSibling { node: 2 }
        );
        let wide: Vec<u32> = (0..65).collect();
        assert_eq!(bad(&wide, &[0; 64]), TreeError::TooLarge { nodes: 65 });
        assert_eq!(
            Tree::chain(&tokens(&wide)).unwrap_err(),
            TreeError::TooLarge { nodes: 65 }
        );
    }

    #[test]
    fn paths_that_skip_an_edge_are_refused() {
        let tree = Tree::new(&tokens(&[1, 2, 3, 4]), &nodes(&[0, 0, 1])).unwrap();
        assert!(tree.path(&nodes(&[0, 1, 3])).is_ok());
        assert_eq!(
            tree.path(&nodes(&[1])).unwrap_err(),
            TreeError::InvalidPath { at: 0 }
        );
        assert_eq!(
            tree.path(&nodes(&[0, 2, 3])).unwrap_err(),
            TreeError::InvalidPath { at: 2 }
        );
        assert_eq!(
            tree.path(&nodes(&[0, 9])).unwrap_err(),
            TreeError::InvalidPath { at: 1 }
        );
    }
}
