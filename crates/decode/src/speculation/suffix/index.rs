//! One suffix automaton per decoding sequence, within a bound of memory.
//!
//! An automaton is a function of the text alone. So a preempted or restored sequence needs nothing
//! saved: its automaton is built again from its history.

use std::collections::HashMap;

use contract::{SeqId, TokenId};

use super::automaton::SuffixAutomaton;

/// Bounds of a [`SuffixIndex`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuffixIndexLimits {
    /// Tokens that all automata together are built for. Each covers an equal share, from the end
    /// of its text; while it grows, up to twice its share. An automaton takes at most 180 bytes
    /// per token.
    pub tokens: usize,
    /// Tokens that one sequence's automaton grows by in a call. A long prompt is read over several
    /// steps, so that it delays none of them.
    pub tokens_per_call: usize,
}

impl Default for SuffixIndexLimits {
    fn default() -> SuffixIndexLimits {
        SuffixIndexLimits {
            tokens: 1 << 19,
            tokens_per_call: 1 << 13,
        }
    }
}

/// The automata of all decoding sequences.
#[derive(Debug, Default)]
pub struct SuffixIndex {
    limits: SuffixIndexLimits,
    texts: HashMap<SeqId, IndexedText>,
}

#[derive(Debug, Default)]
struct IndexedText {
    /// Position in the history of the automaton's first token.
    start: usize,
    automaton: SuffixAutomaton,
}

impl IndexedText {
    /// Position behind its last token.
    fn end(&self) -> usize {
        self.start + self.automaton.len()
    }
}

impl SuffixIndex {
    /// An index without sequences.
    pub fn new(limits: SuffixIndexLimits) -> SuffixIndex {
        SuffixIndex {
            limits,
            texts: HashMap::new(),
        }
    }

    /// Drops sequences that are not in `seqs`.
    pub fn retain(&mut self, seqs: impl Iterator<Item = SeqId> + Clone) {
        self.texts.retain(|seq, _| seqs.clone().any(|s| s == *seq));
    }

    /// Extends a sequence's automaton towards its history, which only grows. `sequences` share the
    /// memory.
    pub fn extend(&mut self, seq: SeqId, history: &[TokenId], sequences: usize) {
        let share = (self.limits.tokens / sequences.max(1)).max(1);
        let text = self.texts.entry(seq).or_default();
        let is_too_long = text.automaton.len() > 2 * share;
        if text.automaton.is_empty() || is_too_long || text.end() > history.len() {
            *text = IndexedText {
                start: history.len().saturating_sub(share),
                automaton: SuffixAutomaton::default(),
            };
        }
        let new = &history[text.end()..];
        for token in new.iter().take(self.limits.tokens_per_call) {
            text.automaton.push(*token);
        }
    }

    /// The automaton of a sequence, if it covers the text up to the end of `history`.
    pub fn automaton(&self, seq: SeqId, history: &[TokenId]) -> Option<&SuffixAutomaton> {
        let text = self.texts.get(&seq)?;
        (text.end() == history.len()).then_some(&text.automaton)
    }

    /// Bytes of memory of all automata.
    pub fn bytes(&self) -> usize {
        self.texts.values().map(|text| text.automaton.bytes()).sum()
    }
}
