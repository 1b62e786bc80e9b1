//! Costs of passes, and the tree sizes that are worth them.
//!
//! With `E` the expected tokens of a step and `C` its cost in seconds, nodes are added while `E /
//! C` grows. The costs are measured on the device and model in use. Without a table, the budget
//! alone decides.

mod measure;
mod online;
mod table;
#[cfg(test)]
mod tests;
mod tree_sizes;

pub use measure::measure;
pub(crate) use online::OnlineCostModel;
pub(crate) use table::DraftUse;
pub use table::{Clock, CostTable};
pub(crate) use tree_sizes::{NodeAcceptance, choose_sizes};

/// Depths of a usual draft of the multi-token-prediction head.
pub(crate) const MTP_USUAL_DEPTH: usize = 3;
