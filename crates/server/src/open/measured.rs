//! What the first load of a model measured, for its next loads.

use std::sync::{Arc, Mutex, PoisonError};

use contract::LoadConfig;
use decode::{CostTable, DraftSource, SourceSet};

use crate::open::drafting::Drafting;

/// Measured costs of one model, shared by its loads.
///
/// A later load measures nothing: it is faster by that, and opens the drafts of the first load. The
/// folder of stored prompt states depends on the drafts, so a draft that a busy machine finds too
/// slow once, and fast enough the next time, would lose the states.
#[derive(Debug, Clone, Default)]
pub(crate) struct MeasuredOnce(Arc<Mutex<Option<FirstLoad>>>);

/// Costs, and what follows from them.
#[derive(Debug, Clone)]
pub(crate) struct FirstLoad {
    /// The drafts that were opened: costs hold beside these only.
    pub(crate) opened: SourceSet,
    /// Costs of passes.
    pub(crate) costs: CostTable,
    /// The drafts that are too slow for this device.
    pub(crate) slow: SourceSet,
}

impl MeasuredOnce {
    /// What was measured with the drafts of `config`.
    pub(crate) fn with(&self, config: &LoadConfig) -> Option<FirstLoad> {
        // Nothing panics while it is locked.
        let measured = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        measured
            .clone()
            .filter(|measured| measured.opened == drafts(config))
    }

    /// Keeps what was measured.
    pub(crate) fn keep(&self, measured: FirstLoad) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(measured);
    }
}

/// The drafts that a configuration opens.
pub(crate) fn drafts(config: &LoadConfig) -> SourceSet {
    let mut drafts = SourceSet::NONE;
    if config.draft.is_some() {
        drafts = drafts.with(DraftSource::Block);
    }
    if config.target.mtp.is_some() {
        drafts = drafts.with(DraftSource::Mtp);
    }
    drafts
}

/// A configuration without the drafts of `slow`.
pub(crate) fn without(mut config: LoadConfig, slow: SourceSet) -> LoadConfig {
    if slow.contains(DraftSource::Block) {
        config.draft = None;
    }
    if slow.contains(DraftSource::Mtp) {
        config.target = Drafting::none().target(&config.target);
    }
    config
}
