//! A draft's weights, loaded with the target's or at the first use.

use contract::{
    DeviceError, DraftLoad, DraftLoadConfig, DraftSpec, LoadProgress, WeightError, WeightRef,
};

use crate::linear::Linear;
use crate::simd::dispatch::Dispatch;
use crate::thread_pool::ThreadPool;
use crate::weights::{Attention, Dense, Loader};

/// Every weight of a draft in the form its pass uses.
pub(crate) struct DraftWeights {
    pub(crate) fc: Linear,
    /// `[hidden]`.
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) layers: Vec<DraftLayerWeights>,
    /// `[hidden]`.
    pub(crate) final_norm: Vec<f32>,
}

/// One layer.
pub(crate) struct DraftLayerWeights {
    /// `[hidden]`.
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) attention: Attention,
    /// `[hidden]`.
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: Dense,
}

/// How to load a draft and, once loaded, its weights.
pub(crate) struct LazyWeights {
    config: DraftLoadConfig,
    dispatch: Dispatch,
    loaded: Option<DraftWeights>,
}

impl LazyWeights {
    /// Loads now, unless the configuration defers it.
    pub(crate) fn new(
        config: DraftLoadConfig,
        dispatch: Dispatch,
        pool: &ThreadPool,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<LazyWeights, DeviceError> {
        let loaded = match config.load {
            DraftLoad::AtOpen => Some(load(&config, &dispatch, pool, progress)?),
            DraftLoad::AtFirstUse => None,
        };
        Ok(LazyWeights {
            config,
            dispatch,
            loaded,
        })
    }

    pub(crate) fn spec(&self) -> &DraftSpec {
        &self.config.spec
    }

    /// The weights, loaded if necessary.
    pub(crate) fn get(&mut self, pool: &ThreadPool) -> Result<&DraftWeights, DeviceError> {
        if self.loaded.is_none() {
            self.loaded = Some(load(&self.config, &self.dispatch, pool, &mut |_| {})?);
            tracing::info!(
                draft = self.config.spec.name,
                "draft loaded at its first use"
            );
        }
        Ok(self.loaded.as_ref().expect("it was loaded just now"))
    }
}

fn load(
    config: &DraftLoadConfig,
    dispatch: &Dispatch,
    pool: &ThreadPool,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<DraftWeights, DeviceError> {
    let spec = &config.spec;
    let bytes = |weight: &&WeightRef| weight.bytes() as u64;
    let total = spec.weights().iter().map(bytes).sum();
    let mut loader = Loader::new(&*config.weights, dispatch, pool, progress, total);
    let layers = spec.layers.iter().map(|layer| {
        Ok(DraftLayerWeights {
            attention_norm: loader.vector(&layer.attention_norm)?,
            attention: Attention::load(&layer.attention, &mut loader)?,
            ffn_norm: loader.vector(&layer.ffn_norm)?,
            ffn: Dense::load(&layer.ffn, &mut loader)?,
        })
    });
    let layers = layers.collect::<Result<_, WeightError>>()?;
    Ok(DraftWeights {
        layers,
        fc: loader.matrix(&spec.fc)?,
        hidden_norm: loader.vector(&spec.hidden_norm)?,
        final_norm: loader.vector(&spec.final_norm)?,
    })
}
