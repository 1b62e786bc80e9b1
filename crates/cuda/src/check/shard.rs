//! Checks of a shard of a tensor split.

use std::sync::Arc;

use contract::{DeviceError, LoadConfig, ModelSpec, StageConfig};

use super::require_supported;
use crate::options::Options;

/// Rejects a shard that this device does not run, with its heads and channels. Errors name
/// `device`.
pub(crate) fn require_shard(
    stage: &StageConfig,
    options: &Options,
    device: &str,
) -> Result<(), DeviceError> {
    let Some(shard) = stage.which_shard() else {
        return Ok(());
    };
    let refused = |what: String| DeviceError::Unsupported {
        what,
        device: device.to_owned(),
        instead: "use --split-mode layer".to_owned(),
    };
    if shard.count != 2 {
        return Err(refused(format!("a tensor split over {} GPUs", shard.count)));
    }
    if options.rows_through_host {
        return Err(refused("a tensor split through host memory".to_owned()));
    }
    if options.eager {
        return Err(refused("a tensor split without CUDA graphs".to_owned()));
    }
    let config = stage.load_config();
    let whole = &stage.model.target;
    // What only one shard has was checked with the whole model.
    let target = ModelSpec {
        head: whole.head.clone(),
        ..(*config.target).clone()
    };
    let config = LoadConfig {
        target: Arc::new(target),
        ..config
    };
    require_supported(&config, device)
}
