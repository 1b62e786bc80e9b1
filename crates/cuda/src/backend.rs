//! The GPU as a [`Backend`]: its description, the memory that a model needs, and opening a model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{
    Backend, DeviceError, DeviceInfo, DraftLoad, ExpertPlacement, KvPool, LoadConfig, LoadProgress,
    MemoryPlan, MtpInfo, Runner, RunnerInfo, Scorer, ScorerConfig, SplitMode, Stage, StageConfig,
};

use crate::check;
use crate::compile::Modules;
use crate::deferred_draft::DeferredDraft;
use crate::driver::{Gpu, can_access_peer};
use crate::exec::{Engine, LaunchMode, Launcher, PeerAccess, Regions, expert_slots, pinned_bytes};
use crate::experts::prediction::{StepReads, placement};
use crate::memory::{BumpAllocator, CONTEXT_BYTES, DRIVER_BYTES, MemoryBudget, REGION_ALIGN};
use crate::meter::Meter;
use crate::numerics::Numerics;
use crate::opened_part::OpenedPart;
use crate::options::{OneLaunch, Options};
use crate::plan::{PlanConfig, Plans, numerics_of, rope_factors};
use crate::probe::GpuInfo;
use crate::runner::{CudaRunner, CudaStage, DraftProperties};
use crate::scorer::{CudaScorer, ScorerLayout};
use crate::state::{PAGE_SIZE, State};
use crate::weights::{PlacedLayers, Sources, WeightSet, Weights};

/// Prefill gives the same values however it is cut at multiples of this many tokens, up to
/// rounding.
const PREFILL_ALIGN: usize = 64;

/// How long a shard of a tensor split waits for the sums of the other: longer than a pass takes.
const SHARD_WATCHDOG: Duration = Duration::from_secs(20);

/// One GPU as a device.
#[derive(Debug, Clone)]
pub struct CudaBackend {
    pub(crate) gpu: GpuInfo,
    options: Options,
}

/// The memory layout and the launches of a model.
pub(crate) struct Layout {
    weights: Weights,
    state: State,
    pub(crate) plans: Plans,
    /// Numerics of decode steps.
    numerics: Numerics,
    /// Bytes of weights, KV pages, states, scratch, all of the draft, and of the table on the host.
    sizes: [u64; 6],
    /// Whether the draft's weights are loaded at its first use.
    deferred_draft: bool,
    /// Where experts lie, if not all of them are on the device.
    experts: Option<ExpertPlacement>,
}

/// Where experts lie and what a step then costs; `bytes` are those of all weights on the device.
fn experts_of(
    config: &LoadConfig,
    weights: &Weights,
    bytes: u64,
    capability: (u32, u32),
) -> Option<ExpertPlacement> {
    let placed = weights.experts.as_ref()?;
    let expert_bytes = placed.expert_bytes();
    let reads = StepReads {
        layers: config.target.layers.len(),
        expert_layers: placed.layers.len(),
        n_experts: placed.n_experts,
        n_used: placed.n_used,
        n_slots: placed.n_slots,
        expert_bytes,
        other_bytes: bytes.saturating_sub(placed.n_slots as u64 * expert_bytes),
    };
    Some(placement(reads, capability))
}

/// Weights that are loaded when the model is opened.
fn at_open(deferred_draft: bool) -> &'static [WeightSet] {
    if deferred_draft {
        &[WeightSet::Target]
    } else {
        &[WeightSet::Target, WeightSet::Draft]
    }
}

impl Layout {
    /// With `slots`, experts lie in host memory and in so many slots of each layer.
    fn new(
        part: &OpenedPart,
        (gpu, options): (&GpuInfo, &Options),
        slots: Option<usize>,
        bases: [u64; 6],
    ) -> Layout {
        let [
            mut weights,
            mut kv,
            mut states,
            mut scratch,
            mut draft,
            mut table,
        ] = bases.map(BumpAllocator::new);
        let config = &part.config;
        let spec = config.draft.as_ref().map(|draft| &*draft.spec);
        let stage = &part.stage;
        let is_whole = stage.is_first() && stage.has_head() && stage.is_last();
        // A part has no status to check; where prompts run as steps, layers are captured in them.
        let is_one_possible = is_whole && stage.shard.is_none() && !options.prefill_as_steps;
        let one_launch = if is_one_possible {
            options.one_launch
        } else {
            OneLaunch::Off
        };
        // One launch is made of those of single GEMMs.
        let is_one = matches!(one_launch, OneLaunch::On | OneLaunch::Clocks);
        let separate_gemms = options.separate_gemms || is_one;
        let of_target = (part.weights(separate_gemms, slots), &mut weights);
        let placed = Weights::new(of_target, &mut table, (spec, &mut draft));
        let regions = [&mut kv, &mut states, &mut scratch, &mut draft];
        let state = State::new(config, regions);
        let capability = gpu.run_as.unwrap_or(gpu.capability);
        let gpu = gpu.props();
        let numerics = numerics_of(&part.stage.model, gpu, options.numerics);
        let plan_config = PlanConfig {
            gpu,
            tree_windows: options.windows,
            numerics,
            as_large_model: options.as_large_model,
            one_launch,
            separate_gemms,
            draft_vocab: options.draft_vocab,
            stage: Some(&part.stage),
        };
        let plans = Plans::new(config, &placed, &state, plan_config, &mut scratch);
        let deferred_draft =
            config.draft.as_ref().map(|draft| draft.load) == Some(DraftLoad::AtFirstUse);
        Layout {
            deferred_draft,
            state,
            plans,
            numerics,
            experts: experts_of(config, &placed, weights.used(), capability),
            weights: placed,
            sizes: [weights, kv, states, scratch, draft, table]
                .map(|arena| arena.used() + REGION_ALIGN),
        }
    }

    fn memory(&self) -> MemoryPlan {
        let [weights, kv, states, scratch, draft, table] = self.sizes;
        let loading = self.weights.staging_bytes(at_open(self.deferred_draft));
        let mut running: usize = pinned_bytes(&self.plans, &self.state).iter().sum();
        if let Some(placed) = &self.weights.experts {
            running += expert_slots::pinned_bytes(placed);
        }
        if self.deferred_draft {
            running += DeferredDraft::staging_bytes(&self.weights);
        }
        MemoryPlan {
            weights_bytes: weights,
            kv_bytes: kv,
            state_bytes: states,
            scratch_bytes: scratch,
            draft_bytes: draft,
            mapped_bytes: 0,
            driver_bytes: DRIVER_BYTES,
            experts: self.experts,
            pinned_bytes: table + loading.max(running) as u64,
        }
    }
}

impl CudaBackend {
    /// A GPU that [`probe`](crate::probe()) found, with all of its free memory.
    pub fn new(gpu: GpuInfo) -> CudaBackend {
        CudaBackend::with_options(gpu, Options::default())
    }

    /// A GPU that [`probe`](crate::probe()) found, with options.
    pub fn with_options(gpu: GpuInfo, options: Options) -> CudaBackend {
        CudaBackend { gpu, options }
    }

    fn name(&self) -> String {
        format!("cuda:{} ({})", self.gpu.ordinal, self.gpu.name)
    }

    fn info(&self, free_bytes: u64) -> DeviceInfo {
        let gpu = &self.gpu;
        let mut features = vec![gpu.arch(), format!("{} multiprocessors", gpu.sm_count)];
        let mut name = gpu.name.clone();
        if let Some((major, minor)) = gpu.run_as {
            let class = format!("run as sm_{major}{minor}");
            name = format!("{name} {class}");
            features.push(class);
        }
        if let Some(limit) = self.options.vram_limit {
            features.push(format!("limited to {limit} bytes"));
        }
        DeviceInfo {
            id: format!("cuda:{}", gpu.ordinal),
            name,
            features,
            class: Some(gpu.class().description()),
            total_bytes: gpu.total_bytes,
            free_bytes,
        }
    }

    /// The layout at addresses from 0 on.
    pub(crate) fn planned(&self, part: &OpenedPart) -> Layout {
        let slots = self.slots(part);
        self.layout(part, slots, [0; 6])
    }

    fn layout(&self, part: &OpenedPart, slots: Option<usize>, bases: [u64; 6]) -> Layout {
        Layout::new(part, (&self.gpu, &self.options), slots, bases)
    }

    /// Slots of each layer for experts, as many as fit; `None` if all experts fit, or may take any
    /// memory. A shard has all of its parts of experts on the device.
    fn slots(&self, part: &OpenedPart) -> Option<usize> {
        let mut layers = part.config.target.layers.iter();
        if !layers.any(|layer| layer.ffn.experts().is_some()) || part.stage.shard.is_some() {
            return None;
        }
        if self.options.expert_slots.is_some() {
            return self.options.expert_slots;
        }
        let room = self.options.expert_room.or(self.options.vram_limit)?;
        let bytes_with = |slots| {
            let layout = self.layout(part, slots, [0; 6]);
            let each = layout.weights.experts.as_ref();
            let each = each.map_or(0, PlacedLayers::expert_bytes);
            (layout.memory().total_bytes(), each)
        };
        if bytes_with(None).0 <= room {
            return None;
        }
        let (least, each) = bytes_with(Some(1));
        // The slots of a layer begin at multiples of 256 and are such themselves.
        let more = room.saturating_sub(least).checked_div(each)?;
        Some(1 + usize::try_from(more).unwrap_or(usize::MAX))
    }

    pub(crate) fn checked(&self, config: &LoadConfig) -> Result<(), DeviceError> {
        if let Some(refusal) = self.gpu.refusal(self.name()) {
            return Err(refusal);
        }
        let mut layers = config.target.attention_layers();
        if self.options.windows && layers.any(|a| a.window.is_some()) {
            return Err(DeviceError::Unsupported {
                what: "an attention window beside the sliding windows of the model".to_owned(),
                device: self.name(),
                instead: "remove --attention-window".to_owned(),
            });
        }
        check::require_supported(config, &self.name())?;
        check::check_shared_memory(config, self.gpu.props(), &self.name())
    }

    /// Opens a runner as its concrete type, so that tests can inspect it.
    pub(crate) fn open_runner(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CudaRunner, DeviceError> {
        self.open_part(&OpenedPart::whole(&config), progress)
    }

    /// Opens a whole model or a pipeline stage.
    fn open_part(
        &self,
        part: &OpenedPart,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CudaRunner, DeviceError> {
        self.checked(&part.stage.model)?;
        check::require_shard(&part.stage, &self.options, &self.name())?;
        let config = &part.config;
        for a in config.target.attention_layers() {
            rope_factors(a, &*config.weights)?;
        }
        let slots = self.slots(part);
        let planned = self.layout(part, slots, [0; 6]);
        let memory = planned.memory();
        // Decode steps go before a scorer's launches.
        let gpu = Gpu::open_known(self.gpu.clone())?.with_first_stream()?;
        let free = gpu.memory()?.0;
        let budget = MemoryBudget {
            free: free + CONTEXT_BYTES,
            limit: self.options.vram_limit,
        };
        let with_context = |context: usize| {
            let other = part.with_context(context);
            self.planned(&other).memory().total_bytes()
        };
        let context = config.limits.context;
        budget.require(&memory, context, &self.name(), with_context)?;
        let started = Instant::now();
        let units = planned.plans.units();
        let modules = Modules::compile(&gpu, &units, &self.options.compile, &mut |at| {
            tracing::debug!(done = at.done, total = at.total, unit = %at.unit, "kernel ready");
        })?;
        let compiled = started.elapsed();
        let byte = if self.options.poison { 0xff } else { 0 };
        let mut regions = Regions::new(&gpu, planned.sizes, byte)?;
        let mut layout = self.layout(part, slots, regions.bases());
        let sources = Sources {
            target: &*config.weights,
            draft: config.draft.as_ref().map(|draft| &*draft.weights),
        };
        let began = Instant::now();
        let sets = at_open(layout.deferred_draft);
        layout.weights.load(&gpu, (sources, sets), progress)?;
        let table = (regions.table.device_ptr(), regions.table.as_mut_slice());
        layout.weights.load_table(sources, table, progress)?;
        let loaded = began.elapsed();
        let mode = match part.stage.shard {
            Some(_) => LaunchMode::GraphWithChunks,
            None if self.options.eager => LaunchMode::Eager,
            None => LaunchMode::Graph,
        };
        let launcher = Launcher::new(&gpu, modules, layout.plans.take_launches(), mode)?;
        let info = RunnerInfo {
            device: self.info(gpu.memory()?.0),
            vocab: config.target.vocab,
            limits: config.limits,
            pool: KvPool::for_limits(config.limits, PAGE_SIZE),
            kv: config.kv,
            model: config.target.hash,
            draft_depth: config.draft.as_ref().map(|draft| draft.spec.depth()),
            narrow_draft: config.draft.as_ref().and_then(|draft| draft.spec.narrow()),
            mtp: layout.state.hidden.map(|_| MtpInfo {
                vocab: layout.plans.mtp_vocab(),
                ..MtpInfo::DEFAULT
            }),
            batch_invariant: layout.numerics == Numerics::BatchInvariant,
            // Of a stage: the rows of a whole model are due at once.
            begins_verify: part.stage.draft_apart && part.stage.has_head(),
            prefill_align: PREFILL_ALIGN,
            memory,
        };
        let target = config.target.clone();
        let made = (layout.plans, launcher);
        let prefill_as_steps = self.options.prefill_as_steps;
        let mut engine = Engine::new(gpu, target, layout.state, regions, made, prefill_as_steps)?;
        if let Some(experts) = &layout.weights.experts {
            engine.place_experts(experts)?;
        }
        let taken = free.saturating_sub(engine.gpu().memory()?.0);
        let planned: u64 = planned.sizes[..5].iter().sum();
        tracing::info!(
            device = %info.device.id,
            part = %part.stage.part().text(),
            kernels = units.len(),
            compile_ms = compiled.as_millis() as u64,
            load_ms = loaded.as_millis() as u64,
            open_ms = started.elapsed().as_millis() as u64,
            weights_bytes = info.memory.weights_bytes,
            kv_bytes = info.memory.kv_bytes,
            driver_bytes = taken.saturating_sub(planned),
            "model opened on the GPU"
        );
        let draft = config.draft.as_ref().map(|draft| DraftProperties {
            spec: Arc::clone(&draft.spec),
        });
        let mut runner = CudaRunner::new(info, part.identity(), engine, draft, &self.options);
        if let Some(draft) = config.draft.as_ref().filter(|_| layout.deferred_draft) {
            let (source, name) = (Arc::clone(&draft.weights), &draft.spec.name);
            runner.defer_draft(DeferredDraft::new(layout.weights, source, name));
        }
        Ok(runner)
    }
}

impl Backend for CudaBackend {
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        // The driver needs a context to report free memory, which takes hundreds of megabytes of
        // the GPU. NVML needs none. Without NVML, the free memory is known once a model is opened.
        let total = self.gpu.total_bytes;
        let reported = if self.options.assume_free {
            None
        } else {
            Meter::open(&self.gpu).and_then(|meter| meter.free_bytes())
        };
        let free = reported.unwrap_or(total).min(total);
        let limit = self.options.vram_limit.unwrap_or(free);
        Ok(self.info(free.min(limit)))
    }

    fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
        self.checked(config)?;
        Ok(self.planned(&OpenedPart::whole(config)).memory())
    }

    fn estimate_stage(&self, stage: &StageConfig) -> Result<MemoryPlan, DeviceError> {
        self.checked(&stage.model)?;
        check::require_shard(stage, &self.options, &self.name())?;
        if self.options.prefill_as_steps {
            return Err(DeviceError::Unsupported {
                what: "prefilling as decode steps in a pipeline stage".to_owned(),
                device: self.name(),
                instead: "name one device with --device".to_owned(),
            });
        }
        Ok(self.planned(&OpenedPart::of(stage)).memory())
    }

    fn stage_format(&self, stage: &StageConfig) -> Result<String, DeviceError> {
        let plans = self.planned(&OpenedPart::of(stage)).plans;
        Ok(format!("{:?} {:?}", plans.stage.block, plans.kernels))
    }

    fn gpu_ordinal(&self) -> Option<u32> {
        Some(self.gpu.ordinal)
    }

    fn require_peer_access(&self, below: u32, mode: SplitMode) -> Result<(), DeviceError> {
        let gpus = check::Neighbours {
            name: &self.name(),
            ordinals: [self.gpu.ordinal, below],
        };
        gpus.require_access(mode, self.options.require_peer_access, can_access_peer)
    }

    fn open_stage(
        &self,
        stage: StageConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Stage>, DeviceError> {
        let runner = self.open_part(&OpenedPart::of(&stage), progress)?;
        let peer_access = match &self.options {
            options if options.require_peer_access => PeerAccess::Required,
            options if options.rows_through_host => PeerAccess::Avoided,
            _ => PeerAccess::IfPossible,
        };
        let watchdog = self.options.shard_watchdog.unwrap_or(SHARD_WATCHDOG);
        Ok(Box::new(CudaStage::new(runner, peer_access, watchdog)))
    }

    fn open(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        Ok(Box::new(self.open_runner(config, progress)?))
    }

    fn open_scorer(
        &self,
        config: ScorerConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Scorer>, DeviceError> {
        let gpu = (&self.gpu, &self.options);
        Ok(Box::new(CudaScorer::open(&config, gpu, progress)?))
    }

    fn estimate_scorer(&self, config: &ScorerConfig) -> Result<MemoryPlan, DeviceError> {
        Ok(ScorerLayout::new(config, &self.gpu, [0; 4])?.memory())
    }
}

#[cfg(test)]
mod tests {
    use conformance::synthetic_model::{SyntheticLayout, SyntheticModel};
    use contract::{KvFormat, KvFormats, Limits, QuantType};

    use super::*;
    use crate::plan::PlanKey;

    /// The plans of a small model with delta layers, for so many sequences.
    fn plans(
        model: &SyntheticModel,
        (number, numerics): (u32, Numerics),
        sequences: usize,
    ) -> Plans {
        let config = LoadConfig {
            target: model.spec.clone(),
            weights: model.weights.clone(),
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::Q8_0,
                v: KvFormat::Q8_0,
            },
            limits: Limits {
                sequences,
                context: 600,
                tree_nodes: 64,
                prefill_chunk: 192,
                pool_tokens: None,
            },
        };
        let gpu = GpuInfo {
            ordinal: 0,
            name: "a GPU".to_owned(),
            capability: (number / 10, number % 10),
            run_as: None,
            sm_count: 82,
            total_bytes: 24 << 30,
        };
        let options = Options {
            numerics: Some(numerics),
            as_large_model: true,
            ..Options::default()
        };
        let backend = CudaBackend::with_options(gpu, options);
        backend.planned(&OpenedPart::whole(&config)).plans
    }

    #[test]
    fn launches_of_a_step_do_not_depend_on_the_sequence_limit() {
        let model = SyntheticModel::new(SyntheticLayout::HybridWide, QuantType::Q4_K, 1);
        let compare = |key: PlanKey, few: &Plans, many: &Plans| {
            let (few, many) = (few.bare_launches(key), many.bare_launches(key));
            assert_eq!(few.len(), many.len(), "{key:?}");
            for (few, many) in few.iter().zip(&many) {
                assert_eq!(few, many, "{key:?}");
            }
        };
        let gpus = [86, 90].map(|number| {
            [Numerics::Fastest, Numerics::BatchInvariant].map(|numerics| (number, numerics))
        });
        for gpu in gpus.into_iter().flatten() {
            let [one, two, four] = [1, 2, 4].map(|sequences| plans(&model, gpu, sequences));
            for (few, trees) in [(&one, 1), (&two, 1), (&two, 2)] {
                let keys = four.all.keys().copied();
                for key in
                    keys.filter(|key| matches!(key, PlanKey::Step { trees: n, .. } if *n == trees))
                {
                    compare(key, few, &four);
                }
                compare(PlanKey::Commit(trees), few, &four);
            }
        }
    }

    #[test]
    fn device_info_matches_the_drivers_description() {
        let gpu = GpuInfo {
            ordinal: 1,
            name: "Test GPU".to_owned(),
            capability: (8, 6),
            run_as: None,
            sm_count: 82,
            total_bytes: 24 << 30,
        };
        let limit = Options {
            vram_limit: Some(1 << 30),
            ..Options::default()
        };
        let info = CudaBackend::with_options(gpu, limit).probe().unwrap();
        assert_eq!(info.id, "cuda:1");
        assert_eq!(info.features[..2], ["sm_86", "82 multiprocessors"]);
        assert_eq!((info.total_bytes, info.free_bytes), (24 << 30, 1 << 30));
    }
}
