//! Speculative decoding: which trees are proposed, how large they are, and whether drafting pays.
//!
//! [`TreeProposer`] is the interface; `MixedProposer` implements it over all [`DraftSource`]s:
//!
//! | part | what it does |
//! |---|---|
//! | `suffix` | finds where the end of a text has occurred before |
//! | `candidates` | the candidates of a node from every source, equal tokens as one |
//! | `calibration` | from a source's figure to the chance of acceptance |
//! | `explore` | the tree of the likeliest prefixes, whatever proposed them |
//! | `head_growth` | lets the head extend that tree depth by depth |
//! | `costs` | measures passes and sizes trees |
//! | `narrow_draft` | drafts less deep for many sequences |
//! | `controller` | chooses the sources per sequence and limits what drafting may lose |
//! | `trial_budget` | what all sequences together may lose by trials |
//! | `proposer` | a step of all of them |
//!
//! `build_tree` turns the candidates of one draft into a tree, for checks and benchmarks.

pub mod build_tree;
mod calibration;
mod candidates;
mod config;
mod controller;
#[cfg(test)]
mod controller_tests;
pub mod costs;
mod explore;
#[cfg(test)]
mod explore_tests;
mod head_growth;
#[cfg(test)]
mod mix_tests;
mod narrow_draft;
mod proposer;
mod sequence_draft;
#[cfg(test)]
mod short_reply_tests;
#[cfg(test)]
mod simulated;
mod sources;
pub mod suffix;
mod surprisal;
mod tree_proposer;
mod trial_budget;
mod waiting;

pub use build_tree::{TreeBudget, TreeInit, TreeInputs, build_tree};
pub use config::{MIN_SPEEDUP, SpeculationConfig};
pub use costs::{Clock, CostTable, measure};
pub(crate) use proposer::MixedProposer;
pub use sources::{DraftSource, SourceSet};
pub(crate) use surprisal::SurprisalEma;
pub(crate) use tree_proposer::NoDraft;
pub use tree_proposer::{ProposedTree, TreeProposer, TreeRequest, TreeResult};
