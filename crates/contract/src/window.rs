//! Sliding attention window with attention sinks, for decode steps.

use std::ops::Range;

/// The committed tokens that tree nodes attend to: the last `tokens` and the first `sinks`.
///
/// The KV cache stays complete, and prefill uses no window. A node at position `q` attends to
/// committed keys from `q - tokens` on, the same as a token decoded alone. Recurrent layers have no
/// window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AttentionWindow {
    tokens: usize,
    sinks: usize,
}

impl AttentionWindow {
    /// Attends to everything.
    pub const FULL: AttentionWindow = AttentionWindow {
        tokens: 0,
        sinks: 0,
    };
    /// The smallest window. A smaller one could mask a node's own ancestors.
    pub const MIN_TOKENS: usize = 64;

    /// The last `tokens` tokens before a node and the first `sinks` tokens of the context.
    ///
    /// `tokens` 0 means [`AttentionWindow::FULL`]; other values are raised to
    /// [`AttentionWindow::MIN_TOKENS`].
    pub fn new(tokens: usize, sinks: usize) -> AttentionWindow {
        match tokens {
            0 => AttentionWindow::FULL,
            _ => AttentionWindow {
                tokens: tokens.max(AttentionWindow::MIN_TOKENS),
                sinks,
            },
        }
    }

    /// Whether it masks nothing at any context length.
    pub fn is_full(self) -> bool {
        self.tokens == 0
    }

    /// Window length in tokens; 0 for all.
    pub fn tokens(self) -> usize {
        self.tokens
    }

    /// Number of sink tokens at the beginning of the context.
    pub fn sinks(self) -> usize {
        self.sinks
    }

    /// The masked committed positions for a node at `position`; empty if none is masked.
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
    use crate::Tree;

    #[test]
    fn window_masks_older_tokens_but_never_the_sinks() {
        assert_eq!(AttentionWindow::FULL.masked(1 << 20), 0..0);
        assert_eq!(AttentionWindow::new(100, 0).masked(100), 0..0);
        assert_eq!(AttentionWindow::new(100, 0).masked(101), 0..1);
        assert_eq!(AttentionWindow::new(100, 4).masked(103), 3..3);
        assert_eq!(AttentionWindow::new(100, 4).masked(1000), 4..900);
    }

    #[test]
    fn window_is_at_least_as_long_as_the_deepest_tree() {
        let narrow = AttentionWindow::new(1, 0);
        assert_eq!(narrow.tokens(), Tree::MAX_NODES);
        // The deepest node of a tree at position 200 attends to its root.
        assert!(narrow.masked(200 + Tree::MAX_NODES - 1).end <= 200);
        assert!(AttentionWindow::new(0, 9).is_full());
    }
}
