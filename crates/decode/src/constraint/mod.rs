//! Constraints on the next token besides sampling: grammars, reasoning budgets, forced tokens.
//!
//! A [`Constraint`] follows one choice. It is queried at tree nodes, which may never be accepted,
//! and advanced by accepted tokens. Forced tokens are verified and committed like others, a whole
//! run in one pass, draft or not.

mod grammar;
mod interface;
mod reasoning;

pub use grammar::{Grammar, GrammarCompiler, GrammarError, Tokenize, VocabEntry};
pub use interface::{Constraint, Constraints, LogitBoost};
pub use reasoning::{
    InitialPhase, ReasoningBudget, ReasoningConfig, ReasoningEnd, ReasoningHandle,
    ReasoningMachine, ReasoningTags,
};
