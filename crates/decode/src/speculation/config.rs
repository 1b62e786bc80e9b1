//! The settings of speculative decoding.

use std::time::Duration;

use contract::RunnerInfo;

use super::build_tree::TreeInit;
use super::costs::CostTable;

/// Settings of speculative decoding.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeculationConfig {
    /// Maximum number of drafted nodes of one sequence's tree, 0 to 63. The runner's limit applies
    /// too. 0 disables drafting.
    pub budget: usize,
    /// How a tree starts; [`TreeInit::ChainOnly`] makes it a chain.
    pub init: TreeInit,
    /// Which of the runner's drafts may be used.
    pub sources: DraftSources,
    /// Candidates per position requested from the draft.
    pub candidates: usize,
    /// Draft temperature: flattens its probabilities above 1.0, sharpens them below; above 0.
    pub temperature: f32,
    /// N-gram length of prompt lookup: after a repeated n-gram, the tokens that followed it before
    /// are drafted. 0 disables prompt lookup.
    pub lookup_ngram: usize,
    /// Costs of passes. With them, trees are sized, and drafting pauses where it does not pay.
    /// Without them, every tree uses its whole budget.
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
            sources: DraftSources::default(),
            candidates: 8,
            temperature: 1.0,
            lookup_ngram: 0,
            costs: None,
            measure_time_limit: None,
        }
    }
}

/// A part of the runner that drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftSource {
    /// The draft model, which fills a block of positions in one pass.
    Block,
    /// The model's own multi-token-prediction head, one depth per pass.
    Mtp,
}

impl DraftSource {
    /// Maximum number of drafted tokens of a path.
    pub fn depth(self, info: &RunnerInfo) -> usize {
        match self {
            DraftSource::Block => info.draft_depth.unwrap_or(0),
            DraftSource::Mtp => info.mtp.map_or(0, |mtp| mtp.max_depth),
        }
    }
}

/// The sources that may draft, if the runner has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftSources {
    /// The draft model. It precedes the multi-token-prediction head.
    pub block: bool,
    /// The multi-token-prediction head.
    pub mtp: bool,
}

impl Default for DraftSources {
    fn default() -> DraftSources {
        DraftSources {
            block: true,
            mtp: true,
        }
    }
}

impl DraftSources {
    /// The source to use on a runner; `None` if it has none that may draft.
    pub fn choose(self, info: &RunnerInfo) -> Option<DraftSource> {
        let block = self.block.then_some(DraftSource::Block);
        let mtp = self.mtp.then_some(DraftSource::Mtp);
        let found = block.into_iter().chain(mtp);
        found.into_iter().find(|source| source.depth(info) > 0)
    }
}

/// Minimum speed-up over plain decoding, at full acceptance, for drafting to be tried at all. Below
/// it the trials cost more than the gain.
pub const MIN_SPEEDUP: f64 = 1.5;
