//! A draft sets memory is reserved at the start and sets weights come at their first use.
//!
//! Committing a token appends to the draft's context, so the first use is the first prompt.

use std::sync::Arc;

use contract::{DeviceError, WeightSource};

use crate::driver::Gpu;
use crate::weights::{Sources, WeightSet, Weights};

/// Weights that are not on the card yet.
pub(crate) struct DeferredDraft {
    /// Where they go; the memory belongs to the engine.
    weights: Weights,
    source: Arc<dyn WeightSource>,
    name: String,
}

impl DeferredDraft {
    /// The draft's part of `weights`, to be read from `source` later.
    pub(crate) fn new(
        weights: Weights,
        source: Arc<dyn WeightSource>,
        name: &str,
    ) -> DeferredDraft {
        DeferredDraft {
            weights,
            source,
            name: name.to_owned(),
        }
    }

    /// Bytes of page-locked memory that loading will take.
    pub(crate) fn staging_bytes(weights: &Weights) -> usize {
        weights.staging_bytes(&[WeightSet::Draft])
    }

    /// Brings the weights to their places. After a refusal it may be tried again.
    pub(crate) fn load(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        let sources = Sources {
            target: &*self.source,
            draft: Some(&*self.source),
        };
        let (name, sets) = (&self.name, [WeightSet::Draft]);
        match self.weights.load(gpu, (sources, &sets), &mut |_| {}) {
            Ok(()) => tracing::info!(draft = name, "draft loaded at its first use"),
            Err(error) => {
                tracing::error!(draft = name, %error, "the draft could not be loaded at its first use");
                return Err(error);
            }
        }
        Ok(())
    }
}
