//! Suffix matches: draft tokens from earlier places of the same text.
//!
//! Agents repeat files, diffs and JSON. Where the end of a text has occurred before, the tokens
//! that followed it then are likely again. `automaton` finds the longest such end in constant time;
//! `index` keeps one automaton per decoding sequence.

mod automaton;
mod index;
#[cfg(test)]
mod tests;

pub use automaton::{Continuation, SuffixAutomaton, SuffixMatch};
pub use index::{SuffixIndex, SuffixIndexLimits};
