//! Several devices as one: a model whose layers, LM head and draft are placed on different devices.
//!
//! [`SplitBackend`] places the model, estimates the memory of each device and opens a [`Stage`] on
//! each. The stages together are one [`Runner`](crate::Runner). In a tensor split
//! ([`SplitMode::Tensor`]) every stage has a shard of all layers.

mod backend;
mod begun;
mod groups;
mod in_turn;
mod runner;
mod sections;
mod shards;
mod stage;
mod stages;
mod steps;

pub use backend::{SplitBackend, SplitDevice};
pub use groups::StepGroups;
pub use stage::{SplitMode, Stage, StageConfig, StageOutput};
