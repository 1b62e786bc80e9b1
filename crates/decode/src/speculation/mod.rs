//! Speculative decoding: which trees are proposed, how large they are, and whether drafting pays.
//!
//! [`TreeSource`] is the interface; `DraftModelSource` implements it over the
//! runner's draft model. `build_tree` turns candidates into a tree, `costs` sizes it, and
//! `controller` limits what drafting may lose.

pub mod build_tree;
mod config;
mod controller;
#[cfg(test)]
mod controller_tests;
pub mod costs;
mod draft_model;
mod prompt_lookup;
mod surprisal;
mod tree_source;

pub use build_tree::{TreeBudget, TreeInit, TreeInputs, build_tree};
pub use config::{MIN_SPEEDUP, Speculation};
pub use costs::{Clock, CostTable, measure};
pub(crate) use draft_model::DraftModelSource;
pub(crate) use surprisal::SurprisalEma;
pub(crate) use tree_source::NoDraft;
pub use tree_source::{TreeRequest, TreeResult, TreeSource};
