//! The settings of speculative decoding.

use std::time::Duration;

use super::build_tree::TreeInit;
use super::costs::CostTable;

/// Settings of speculative decoding.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculation {
    /// Most drafted nodes of one sequence's tree, 0 to 63. The runner's limit applies too. 0
    /// disables drafting.
    pub budget: usize,
    /// How a tree starts; [`TreeInit::ChainOnly`] makes it a chain.
    pub init: TreeInit,
    /// Candidates per position requested from the draft.
    pub candidates: usize,
    /// Draft temperature: flattens its probabilities above 1.0, sharpens them below; above 0.
    pub temperature: f32,
    /// Prompt lookup: tokens that must repeat before what followed them is tried; 0 disables it.
    pub lookup: usize,
    /// Costs of passes. With them, trees are sized and drafting is paused where it does not pay.
    /// Without, every tree uses its whole budget.
    pub costs: Option<CostTable>,
    /// Time limit for measuring the costs before the first job that may speculate, if there is no
    /// table and the scheduler has a clock. This serves draft models that are loaded at their first
    /// use.
    pub measures: Option<Duration>,
}

impl Default for Speculation {
    fn default() -> Speculation {
        Speculation {
            budget: 22,
            init: TreeInit::None,
            candidates: 8,
            temperature: 1.0,
            lookup: 0,
            costs: None,
            measures: None,
        }
    }
}

/// Least speed-up over plain decoding, at full acceptance, for drafting to be tried at all. Below
/// it the trials cost more than the gain.
pub const MIN_SPEEDUP: f64 = 1.5;
