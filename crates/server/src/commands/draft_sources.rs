//! The part of `hearth inspect` about drafts: which sources can draft for the model, and what each
//! costs in memory.

use contract::{Backend, DeviceError, DraftLoadConfig, LoadConfig};
use model::{DraftKind, LoadedModel};

use super::shape::{Fact, fact, shown};
use crate::open::drafting::Drafting;
use crate::progress::bytes_text;

/// The draft model of `--draft`.
pub(super) enum BlockDraft {
    /// None was given.
    None,
    /// It was made for the model.
    Fits(DraftKind, DraftLoadConfig),
    /// It was not, for this reason.
    Refused(anyhow::Error),
}

impl BlockDraft {
    /// Why the draft does not fit.
    pub(super) fn refusal(self) -> Option<anyhow::Error> {
        match self {
            BlockDraft::Refused(error) => Some(error),
            BlockDraft::None | BlockDraft::Fits(..) => None,
        }
    }
}

/// What a source takes beside the model.
struct Cost {
    memory_bytes: u64,
    /// Tables that are read in place from the file.
    mapped_bytes: u64,
}

/// One line per source, for the limits of `config`.
pub(super) fn facts(
    backend: &dyn Backend,
    loaded: &LoadedModel,
    config: &LoadConfig,
    block: &BlockDraft,
) -> Vec<Fact> {
    let plain = LoadConfig {
        target: Drafting::none().target(&loaded.spec),
        draft: None,
        ..config.clone()
    };
    let cost = |with: &LoadConfig| -> Result<Cost, DeviceError> {
        let (with, without) = (backend.estimate(with)?, backend.estimate(&plain)?);
        Ok(Cost {
            memory_bytes: with.total_bytes().saturating_sub(without.total_bytes()),
            mapped_bytes: with.mapped_bytes.saturating_sub(without.mapped_bytes),
        })
    };
    let mut all = Vec::new();
    match &loaded.spec.mtp {
        None => all.push(fact("mtp", "the model has no multi-token-prediction head")),
        Some(_) => {
            let with = LoadConfig {
                target: loaded.spec.clone(),
                ..plain.clone()
            };
            all.extend(lines("mtp", "mtp_bytes", "fits", cost(&with)));
        }
    }
    match block {
        BlockDraft::None => all.push(fact("block", "none given; --draft FILE names one")),
        BlockDraft::Refused(error) => {
            let why = super::all_causes(error);
            all.push(fact("block", format!("does not fit: {why}")));
        }
        BlockDraft::Fits(kind, draft) => {
            let with = LoadConfig {
                draft: Some(draft.clone()),
                ..plain.clone()
            };
            let how = format!("{} fits, {} tokens a pass", kind.name(), draft.spec.depth());
            all.extend(lines("block", "block_bytes", &how, cost(&with)));
        }
    }
    all.push(fact("suffix", "fits any model; it takes no device memory"));
    all
}

/// A source with its cost, or why the device does not run it.
fn lines(
    key: &'static str,
    bytes_key: &'static str,
    how: &str,
    cost: Result<Cost, DeviceError>,
) -> Vec<Fact> {
    match cost {
        Err(error) => vec![fact(key, format!("the device does not run it: {error}"))],
        Ok(cost) => {
            let mapped = match cost.mapped_bytes {
                0 => String::new(),
                bytes => format!(", and {} read in place", bytes_text(bytes)),
            };
            let bytes = bytes_text(cost.memory_bytes);
            vec![
                fact(key, how),
                shown(bytes_key, cost.memory_bytes, format!("{bytes}{mapped}")),
            ]
        }
    }
}
