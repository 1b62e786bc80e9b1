//! Speculative decoding: which trees are proposed, how large they are, and whether drafting pays.
//!
//! [`TreeProposer`] is the interface; `DraftModelProposer` implements it over the runner's draft
//! model or its multi-token-prediction head. `build_tree` turns candidates into a tree, `costs`
//! sizes it, and `controller` limits what drafting may lose.

pub mod build_tree;
mod config;
mod controller;
#[cfg(test)]
mod controller_tests;
pub mod costs;
mod draft_model;
mod mtp_tree;
mod prompt_lookup;
pub mod suffix;
mod surprisal;
mod tree_proposer;

pub use build_tree::{TreeBudget, TreeInit, TreeInputs, build_tree};
pub use config::{DraftSource, DraftSources, MIN_SPEEDUP, SpeculationConfig};
pub use costs::{Clock, CostTable, measure};
pub(crate) use draft_model::DraftModelProposer;
pub(crate) use surprisal::SurprisalEma;
pub(crate) use tree_proposer::NoDraft;
pub use tree_proposer::{TreeProposer, TreeRequest, TreeResult};
