//! Fits plans with the model's own multi-token-prediction head.

use contract::Backend;

use crate::cli::DeviceArgs;
use crate::open::drafting::Drafting;
use crate::open::memory_fit::{FittedConfig, MemoryRequest, fit_with_draft};

/// Fits a plan. The multi-token-prediction head yields if nothing fits with it, or at most half of
/// the context that fits without it; the log says so.
pub(crate) fn fit_drafting(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    device: &DeviceArgs,
    (request, drafting): (MemoryRequest, &mut Drafting),
) -> anyhow::Result<FittedConfig> {
    let fitted = fit_with_draft(backend, loaded, device, (request, drafting));
    if !drafting.mtp {
        return fitted;
    }
    let sources = drafting.speculation.sources;
    drafting.drop_mtp();
    let plain = fit_with_draft(backend, loaded, device, (request, drafting));
    let context = |fitted: &FittedConfig| fitted.config.limits.context;
    let yields = match (&fitted, &plain) {
        (Ok(with), Ok(without)) => 2 * context(with) <= context(without),
        (Err(_), Ok(_)) => true,
        (_, Err(_)) => false,
    };
    if yields {
        tracing::warn!(
            "the multi-token-prediction head is not used: with it, the memory holds at most half \
             of the context"
        );
        return plain;
    }
    drafting.mtp = true;
    drafting.speculation.sources = sources;
    fitted
}

/// Fits a plan with the head, if the model has one, as what a benchmark measures; it never yields.
pub(crate) fn fit_with_head(
    backend: &dyn Backend,
    loaded: &model::LoadedModel,
    device: &DeviceArgs,
    request: MemoryRequest,
) -> anyhow::Result<FittedConfig> {
    let drafting = Drafting::own_head(&loaded.spec);
    fit_with_draft(backend, loaded, device, (request, &drafting))
}
