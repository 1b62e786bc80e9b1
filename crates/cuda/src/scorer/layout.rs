//! The memory and the launches of a scorer.

use std::sync::Arc;

use contract::{
    BlockSparsity, DeviceError, KvFormat, KvFormats, Limits, LoadConfig, MemoryPlan, Mixer,
    ModelSpec, ScorerConfig, ScorerInfo,
};

use super::exit_of;
use crate::check;
use crate::memory::{BumpAllocator, REGION_ALIGN};
use crate::pack::WeightKind;
use crate::plan::{ScoringModel, ScoringPlans};
use crate::probe::GpuInfo;
use crate::weights::{WeightSet, Weights};

/// Rows of a chunk: enough to fill a large GPU, and a third of a gigabyte of buffers for the layers
/// of a small model.
pub(super) const CHUNK_ROWS: usize = 4096;
/// Most tail queries of a call.
pub(super) const MAX_TAIL: usize = 32;
/// Device memory for the code of the scorer's kernels, in bytes. The context is the served model's.
const MODULE_BYTES: u64 = 64 << 20;

/// Everything about a scorer before its memory exists, or at its addresses.
pub(crate) struct ScorerLayout {
    pub(super) info: ScorerInfo,
    pub(super) is_attention: Vec<bool>,
    pub(super) weights: Weights,
    pub(crate) plans: ScoringPlans,
    /// Bytes of weights, of one layer's keys and values, of one layer's states, of the rest.
    pub(super) device_sizes: [u64; 4],
    /// Bytes of the embedding table in page-locked host memory.
    pub(super) table_bytes: u64,
    pub(super) hidden: usize,
    pub(super) rows: usize,
}

impl ScorerLayout {
    /// Plans a scorer at addresses 0.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] and [`DeviceError::Weight`] for models that the kernels do not
    /// run.
    pub(crate) fn new(
        config: &ScorerConfig,
        gpu: &GpuInfo,
        bases: [u64; 4],
    ) -> Result<ScorerLayout, DeviceError> {
        ScorerLayout::at(config, gpu, (bases, 0))
    }

    /// As [`ScorerLayout::new`], at device addresses and that of the host table.
    pub(super) fn at(
        config: &ScorerConfig,
        gpu: &GpuInfo,
        (bases, table_base): ([u64; 4], u64),
    ) -> Result<ScorerLayout, DeviceError> {
        let device = format!("cuda:{} ({})", gpu.ordinal, gpu.name);
        let unsupported = |what: String, instead: &str| DeviceError::Unsupported {
            what,
            device: device.clone(),
            instead: instead.to_owned(),
        };
        if let Some(refusal) = gpu.refusal(device.clone()) {
            return Err(refusal);
        }
        let Some((exit_layer, attention_layers)) = exit_of(&config.model, config.exit_layer) else {
            let what = format!("scoring with {}", config.model.name);
            return Err(unsupported(what, "use a scorer with attention layers"));
        };
        let rows = CHUNK_ROWS.min(
            config
                .max_tokens
                .max(1)
                .next_multiple_of(BlockSparsity::BLOCK),
        );
        let load_config = load_config(config, exit_layer, rows);
        check::require_supported(&load_config, &device)?;
        if let Some(part) = check::unscored_block(&load_config.target) {
            let what = format!("scoring with {part}");
            return Err(unsupported(what, "use another scorer, or --device cpu"));
        }
        let spec = &*load_config.target;
        let [mut weights, mut kv, mut states, mut scratch] = bases.map(BumpAllocator::new);
        let mut table = BumpAllocator::new(table_base);
        let placed = Weights::of_scorer(spec, &mut weights, &mut table);
        let model = ScoringModel {
            load_config: &load_config,
            weights: &placed,
            gpu: gpu.props(),
            rows,
            max_tokens: config.max_tokens,
            max_tail: MAX_TAIL,
        };
        let plans = ScoringPlans::new(&model, [&mut kv, &mut states, &mut scratch]);
        let is_attention = |layer: &contract::LayerSpec| matches!(layer.mixer, Mixer::Attention(_));
        let weights_bytes = weights.used() + table.used();
        Ok(ScorerLayout {
            info: ScorerInfo {
                device: format!("cuda:{}", gpu.ordinal),
                exit_layer,
                attention_layers,
                vocab: spec.vocab,
                max_tokens: config.max_tokens,
                weights_bytes,
            },
            is_attention: spec.layers.iter().map(is_attention).collect(),
            weights: placed,
            plans,
            device_sizes: [weights, kv, states, scratch].map(|arena| arena.used() + REGION_ALIGN),
            table_bytes: table.used() + REGION_ALIGN,
            hidden: spec.hidden,
            rows,
        })
    }

    /// Device bytes beside the weights.
    pub(super) fn working_bytes(&self) -> u64 {
        self.device_sizes[1..].iter().sum()
    }

    /// Memory of the scorer on the GPU, and its page-locked memory of the host.
    pub(crate) fn memory(&self) -> MemoryPlan {
        let [weights, kv, states, scratch] = self.device_sizes;
        let staging = self.weights.staging_bytes(&[WeightSet::Target]) as u64;
        MemoryPlan {
            weights_bytes: weights,
            kv_bytes: kv,
            state_bytes: states,
            scratch_bytes: scratch,
            driver_bytes: MODULE_BYTES,
            pinned_bytes: self.table_bytes + staging,
            ..MemoryPlan::default()
        }
    }

    /// Refuses a scorer that takes more than `unused` bytes of the GPU.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`]: the CPU scores instead.
    pub(super) fn require(&self, unused: u64) -> Result<(), DeviceError> {
        let wanted = self.memory().total_bytes();
        if wanted <= unused {
            return Ok(());
        }
        Err(DeviceError::Unsupported {
            what: format!(
                "a scorer of prompts of {} tokens, which takes {wanted} bytes of the {unused} that are unused,",
                self.info.max_tokens
            ),
            device: self.info.device.clone(),
            instead: "scoring runs on the CPU; a shorter --max-ctx leaves more memory".to_owned(),
        })
    }
}

/// The model up to its exit layer. Keys and values are f16; in a model of f32 matrices, f32.
fn load_config(config: &ScorerConfig, exit_layer: usize, rows: usize) -> LoadConfig {
    let spec = ModelSpec {
        layers: config.model.layers[..=exit_layer].to_vec(),
        mtp: None,
        ..(*config.model).clone()
    };
    let is_f32 = spec
        .attention_layers()
        .any(|a| WeightKind::of(a.k.ty) == WeightKind::F32);
    let format = if is_f32 { KvFormat::F32 } else { KvFormat::F16 };
    LoadConfig {
        target: Arc::new(spec),
        weights: Arc::clone(&config.weights),
        draft: None,
        batch_invariant: false,
        kv: KvFormats {
            k: format,
            v: format,
        },
        limits: Limits {
            sequences: 1,
            context: config.max_tokens,
            tree_nodes: 1,
            prefill_chunk: rows,
            pool_tokens: None,
        },
    }
}
