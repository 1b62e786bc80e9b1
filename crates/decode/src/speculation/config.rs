//! The settings of speculative decoding.

use std::time::Duration;

use super::build_tree::TreeInit;
use super::costs::CostTable;

/// How trees are drafted.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculation {
    /// DraftModelSource nodes of one sequence's tree, 0 to 63; the runner's own limit applies too. 0 turns drafting off.
    pub budget: usize,
    /// How a tree begins; [`TreeInit::ChainOnly`] makes it a chain.
    pub init: TreeInit,
    /// Candidates the draft is asked for per position.
    pub candidates: usize,
    /// Flattens the draft's figures above 1.0, sharpens them below; above 0.
    pub temperature: f32,
    /// Tokens that must repeat for what followed them earlier to be tried too; 0 never tries.
    pub lookup: usize,
    /// What passes cost. With it, trees stop growing where they no longer pay, and drafting rests where it
    /// does not pay at all; without it, every tree gets its whole budget.
    pub costs: Option<CostTable>,
    /// How long the costs may be measured before the first job that may be drafted for, where there is no table and
    /// the scheduler has a clock: a draft that is loaded at its first use is measured then.
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

/// What drafting must be able to bring at its very best, against plain decoding, to be tried at all: where the
/// gain is small even then, the trials cost more than it.
pub const MIN_SPEEDUP: f64 = 1.5;
