//! A draft's weights, loaded with the target's or at the first use.

use contract::{
    Conditioning, DeviceError, DraftLayer, DraftLoad, DraftLoadConfig, DraftSpec, DynamicConv,
    LoadProgress, WeightError, WeightRef, WeightSource,
};

use crate::linear::Linear;
use crate::simd::dispatch::Dispatch;
use crate::thread_pool::ThreadPool;
use crate::weights::{Attention, Dense, Loader, check_bytes};

use super::conv::ConvWeights;

/// Every weight of a draft in the form its pass uses.
pub(crate) struct DraftWeights {
    pub(crate) fc: Linear,
    /// `[hidden]`.
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) layers: Vec<DraftLayerWeights>,
    /// `[hidden]`.
    pub(crate) final_norm: Vec<f32>,
    /// `None` if the draft uses the target's LM head.
    pub(crate) head: Option<Linear>,
    /// The projection of a pairwise selector.
    pub(crate) selector: Option<Linear>,
    /// The bias of a Markov head.
    pub(crate) markov_next: Option<Linear>,
    /// `[hidden + rank]` and the bias of a confidence head.
    pub(crate) confidence: Option<(Vec<f32>, f32)>,
}

/// One layer.
pub(crate) struct DraftLayerWeights {
    /// `[hidden]`.
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) attention: Attention,
    /// `[n_heads]`.
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) attention_conv: Option<ConvWeights>,
    /// `[hidden]`.
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    /// `[hidden]`.
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: Dense,
    pub(crate) ffn_conv: Option<ConvWeights>,
    /// `[hidden]`.
    pub(crate) post_ffn_norm: Option<Vec<f32>>,
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

    /// Source of the tables, which are read in place.
    pub(crate) fn source(&self) -> &dyn WeightSource {
        &*self.config.weights
    }

    /// The weights that [`LazyWeights::get`] has loaded.
    pub(crate) fn loaded(&self) -> Option<&DraftWeights> {
        self.loaded.as_ref()
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
    for table in spec.tables() {
        check_bytes(table, config.weights.bytes(table)?)?;
    }
    let layers = spec
        .layers
        .iter()
        .map(|layer| load_layer(layer, &mut loader));
    let layers = layers.collect::<Result<_, WeightError>>()?;
    let (mut selector, mut markov_next, mut confidence) = (None, None, None);
    match &spec.conditioning {
        Conditioning::Independent => {}
        Conditioning::Pairwise(pairs) => selector = Some(loader.matrix(&pairs.hidden)?),
        Conditioning::Markov(markov) => {
            markov_next = Some(loader.matrix(&markov.next)?);
            if let Some(head) = &markov.confidence {
                let bias = optional(&head.bias, &mut loader)?;
                let bias = bias.and_then(|bias| bias.first().copied()).unwrap_or(0.0);
                confidence = Some((loader.vector(&head.weight)?, bias));
            }
        }
    }
    let head = spec.head.as_ref().map(|head| loader.matrix(&head.weight));
    Ok(DraftWeights {
        layers,
        fc: loader.matrix(&spec.fc)?,
        hidden_norm: loader.vector(&spec.hidden_norm)?,
        final_norm: loader.vector(&spec.final_norm)?,
        head: head.transpose()?,
        selector,
        markov_next,
        confidence,
    })
}

fn load_layer(
    layer: &DraftLayer,
    loader: &mut Loader<'_>,
) -> Result<DraftLayerWeights, WeightError> {
    Ok(DraftLayerWeights {
        attention_norm: loader.vector(&layer.attention_norm)?,
        attention: Attention::load(&layer.attention, loader)?,
        sinks: optional(&layer.sinks, loader)?,
        attention_conv: load_conv(&layer.attention_conv, loader)?,
        post_attention_norm: optional(&layer.post_attention_norm, loader)?,
        ffn_norm: loader.vector(&layer.ffn_norm)?,
        ffn: Dense::load(&layer.ffn, loader)?,
        ffn_conv: load_conv(&layer.ffn_conv, loader)?,
        post_ffn_norm: optional(&layer.post_ffn_norm, loader)?,
    })
}

fn optional(
    weight: &Option<WeightRef>,
    loader: &mut Loader<'_>,
) -> Result<Option<Vec<f32>>, WeightError> {
    let found = weight.as_ref().map(|weight| loader.vector(weight));
    found.transpose()
}

fn load_conv(
    conv: &Option<DynamicConv>,
    loader: &mut Loader<'_>,
) -> Result<Option<ConvWeights>, WeightError> {
    let Some(spec) = conv else { return Ok(None) };
    Ok(Some(ConvWeights {
        base: loader.vector(&spec.base)?,
        projection: loader.matrix(&spec.projection)?,
        spec: spec.clone(),
    }))
}
