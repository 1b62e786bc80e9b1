//! How far back attention looks while a reply is written.

use std::ops::Range;

use crate::Tree;

/// What of the committed context the nodes of a tree see in attention: the last tokens, and maybe the first few.
///
/// It is a way of reading: everything stays stored, and prompts are read without one. A node at position `q` sees the
/// committed keys from `q - tokens` on, so it sees what the same token fed alone would see. Layers with a state have
/// no window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AttentionWindow {
    tokens: usize,
    sinks: usize,
}

impl AttentionWindow {
    /// Everything is seen.
    pub const FULL: AttentionWindow = AttentionWindow {
        tokens: 0,
        sinks: 0,
    };
    /// The narrowest window: with less, a node could lose sight of its own ancestors.
    pub const MIN_TOKENS: usize = Tree::MAX_NODES;

    /// The last `tokens` tokens before a node, and the first `sinks` of the context. `tokens` 0 is [`AttentionWindow::FULL`];
    /// otherwise there are at least [`AttentionWindow::MIN_TOKENS`].
    pub fn new(tokens: usize, sinks: usize) -> AttentionWindow {
        match tokens {
            0 => AttentionWindow::FULL,
            _ => AttentionWindow {
                tokens: tokens.max(AttentionWindow::MIN_TOKENS),
                sinks,
            },
        }
    }

    /// Whether it hides nothing, however long the context is.
    pub fn is_full(self) -> bool {
        self.tokens == 0
    }

    /// Tokens before a node that it sees; 0 for all.
    pub fn tokens(self) -> usize {
        self.tokens
    }

    /// Tokens at the beginning of the context that are seen from everywhere.
    pub fn sinks(self) -> usize {
        self.sinks
    }

    /// The committed positions that a node at `position` does not see; empty if it sees all.
    pub fn masked(self, position: usize) -> Range<usize> {
        let begin = match self.tokens {
            0 => 0,
            tokens => position.saturating_sub(tokens),
        };
        self.sinks.min(begin)..begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_hides_what_is_older_and_never_the_sinks() {
        assert_eq!(AttentionWindow::FULL.masked(1 << 20), 0..0);
        assert_eq!(AttentionWindow::new(100, 0).masked(100), 0..0);
        assert_eq!(AttentionWindow::new(100, 0).masked(101), 0..1);
        assert_eq!(AttentionWindow::new(100, 4).masked(103), 3..3);
        assert_eq!(AttentionWindow::new(100, 4).masked(1000), 4..900);
    }

    #[test]
    fn a_window_is_as_wide_as_a_tree_is_deep() {
        let narrow = AttentionWindow::new(1, 0);
        assert_eq!(narrow.tokens(), Tree::MAX_NODES);
        // The deepest node of a tree at 200 sees its root.
        assert!(narrow.masked(200 + Tree::MAX_NODES - 1).end <= 200);
        assert!(AttentionWindow::new(0, 9).is_full());
    }
}
