//! A draft whose memory is reserved at open and whose weights load at first use.
//!
//! A commit appends to the draft's context, so the first use is the first prompt.

use std::sync::Arc;

use contract::{DeviceError, WeightSource};

use crate::driver::Gpu;
use crate::weights::{Sources, WeightSet, Weights};

/// Draft weights that are not loaded yet.
pub(crate) struct DeferredDraft {
    /// Their device addresses. The engine owns the memory.
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

    /// Page-locked memory that loading needs, in bytes.
    pub(crate) fn staging_bytes(weights: &Weights) -> usize {
        weights.staging_bytes(&[WeightSet::Draft])
    }

    /// Loads the weights. A failed load may be retried.
    pub(crate) fn load(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        let sources = Sources {
            target: &*self.source,
            draft: Some(&*self.source),
        };
        let (name, sets) = (&self.name, [WeightSet::Draft]);
        match self.weights.load(gpu, (sources, &sets), &mut |_| {}) {
            Ok(()) => tracing::info!(draft = name, "draft loaded at its first use"),
            Err(error) => {
                tracing::error!(draft = name, %error, "draft failed to load at first use");
                return Err(error);
            }
        }
        Ok(())
    }
}
