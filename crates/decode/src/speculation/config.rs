//! The settings of speculative decoding.

use std::time::Duration;

use contract::RunnerInfo;

use super::build_tree::TreeInit;
use super::costs::CostTable;
use super::sources::{DraftSource, SourceSet};

/// Settings of speculative decoding.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeculationConfig {
    /// Maximum number of drafted nodes of one sequence's tree, 0 to 63. The runner's limit applies
    /// too. 0 disables drafting.
    pub budget: usize,
    /// How a tree starts; [`TreeInit::ChainOnly`] makes it a chain.
    pub init: TreeInit,
    /// The sources that may draft, if the runner has them.
    pub sources: SourceSet,
    /// Candidates per position requested from the draft model and the head.
    pub candidates: usize,
    /// Draft temperature: flattens its probabilities above 1.0, sharpens them below; above 0.
    pub temperature: f32,
    /// Minimum number of tokens at the end of a text that must have occurred before for a suffix
    /// match. 0 disables suffix matches.
    pub min_match: usize,
    /// Costs of passes. With them, trees are sized, and drafting pauses where it does not pay.
    /// Without them, every source drafts and every tree uses its whole budget.
    pub costs: Option<CostTable>,
    /// Time limit for measuring the costs before the first job that may speculate, if there is no
    /// table and the scheduler has a clock. This serves draft models that are loaded at their first
    /// use.
    pub measure_time_limit: Option<Duration>,
}

impl Default for SpeculationConfig {
    fn default() -> SpeculationConfig {
        SpeculationConfig {
            budget: 22,
            init: TreeInit::None,
            sources: SourceSet::ALL,
            candidates: 8,
            temperature: 1.0,
            min_match: SpeculationConfig::MIN_MATCH,
            costs: None,
            measure_time_limit: None,
        }
    }
}

impl SpeculationConfig {
    /// Default minimum number of matching tokens. A match of two is mostly chance.
    pub const MIN_MATCH: usize = 3;

    /// The sources that draft on a runner.
    pub fn active_sources(&self, info: &RunnerInfo) -> SourceSet {
        let available = self.sources.available(info);
        if self.budget == 0 {
            SourceSet::NONE
        } else if self.min_match == 0 {
            available.without(DraftSource::Suffix)
        } else {
            available
        }
    }
}

/// Minimum speed-up over plain decoding, at full acceptance, for a source to be tried at all. Below
/// it the trials cost more than the gain.
pub const MIN_SPEEDUP: f64 = 1.5;
