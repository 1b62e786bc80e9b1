//! Several devices as a [`Backend`].

use std::ops::Range;

use super::groups::StepGroups;
use super::runner::SplitRunner;
use super::stage::{SplitMode, StageConfig};
use super::stages::Stages;
use crate::checked::CheckedRunner;
use crate::placement::place;
use crate::{
    Backend, DeviceError, DeviceInfo, KvPool, LayerSplit, LoadConfig, LoadProgress, MemoryPlan,
    PlacedPart, Placement, PlacementDevice, PlacementRequest, Runner, RunnerInfo, Shard,
    ShardedModel,
};

/// One of the devices of a [`SplitBackend`].
pub struct SplitDevice {
    /// Its id, such as `cuda:0`.
    pub id: String,
    /// The device.
    pub backend: Box<dyn Backend>,
    /// Bytes that a model may take of it.
    pub usable_bytes: u64,
}

/// Several devices that run one model together.
pub struct SplitBackend {
    /// First the devices of the layers, bottom to top.
    devices: Vec<SplitDevice>,
    n_targets: usize,
    split: LayerSplit,
    /// Index of the draft's device; `None` is the device of the LM head.
    draft_device: Option<usize>,
    groups: StepGroups,
    mode: SplitMode,
}

impl SplitBackend {
    /// The first `n_targets` of `devices` share the layers; `draft_device` is an index in
    /// `devices`, `None` for the device of the LM head.
    pub fn new(
        devices: Vec<SplitDevice>,
        (n_targets, split): (usize, LayerSplit),
        draft_device: Option<usize>,
    ) -> SplitBackend {
        SplitBackend {
            devices,
            n_targets,
            split,
            draft_device,
            groups: StepGroups::default(),
            mode: SplitMode::Layer,
        }
    }

    /// The same with layers split in another way; of a tensor split the shares are equal.
    #[must_use]
    pub fn with_split_mode(self, mode: SplitMode) -> SplitBackend {
        SplitBackend { mode, ..self }
    }

    /// Runs steps of several sequences as named, for tests and benches.
    #[must_use]
    pub fn with_step_groups(self, groups: StepGroups) -> SplitBackend {
        SplitBackend { groups, ..self }
    }

    /// Which device runs what; it may exceed a device's memory.
    fn place(&self, config: &LoadConfig) -> Result<Placement, DeviceError> {
        if self.mode == SplitMode::Tensor {
            return self.place_shards(config);
        }
        let mut devices: Vec<PlacementDevice> = Vec::with_capacity(self.devices.len());
        for device in &self.devices {
            devices.push(PlacementDevice {
                id: device.id.clone(),
                usable_bytes: device.usable_bytes,
                whole: device.backend.estimate(config)?,
            });
        }
        Ok(place(&PlacementRequest {
            spec: &config.target,
            kv: config.kv,
            draft: config.draft.as_ref().map(|draft| &*draft.spec),
            devices: &devices,
            n_targets: self.n_targets,
            split: &self.split,
            draft_device: self.draft_device,
        })?)
    }

    /// The share of each device in a tensor split.
    fn place_shards(&self, config: &LoadConfig) -> Result<Placement, DeviceError> {
        let mut parts = Vec::with_capacity(self.n_targets);
        for (device, stage) in self.shards(config)? {
            let device = &self.devices[device];
            parts.push(PlacedPart {
                device: device.id.clone(),
                memory: device.backend.estimate_stage(&stage)?,
                part: stage.part(),
                usable_bytes: device.usable_bytes,
            });
        }
        Ok(Placement { parts })
    }

    /// The shards of a tensor split, each with the index of its device.
    fn shards(&self, config: &LoadConfig) -> Result<Vec<(usize, StageConfig)>, DeviceError> {
        let unsupported = |what: String, instead: &str| DeviceError::Unsupported {
            what,
            device: "--split-mode tensor".to_owned(),
            instead: instead.to_owned(),
        };
        let last = self.n_targets.saturating_sub(1);
        if self.draft_device.is_some_and(|device| device != last) {
            return Err(unsupported(
                "a draft on another device than the last of --target-devices".to_owned(),
                "remove --draft-device, or use --split-mode layer",
            ));
        }
        let mut shards = Vec::with_capacity(self.n_targets);
        for shard in Shard::all(self.n_targets) {
            let sharded = ShardedModel::new(&config.target, shard);
            let sharded = sharded
                .map_err(|error| unsupported(error.to_string(), "use --split-mode layer"))?;
            let stage = StageConfig::sharded(config.clone(), sharded);
            shards.push((shard.index, stage));
        }
        Ok(shards)
    }

    fn placed(&self, config: &LoadConfig) -> Result<Placement, DeviceError> {
        let placement = self.place(config)?;
        placement.require_memory()?;
        Ok(placement)
    }
}

impl Backend for SplitBackend {
    /// All devices as one: ids joined by commas, memory added up.
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        let mut all: Option<DeviceInfo> = None;
        for device in &self.devices {
            let mut info = device.backend.probe()?;
            info.free_bytes = device.usable_bytes;
            all = Some(match all {
                None => info,
                Some(all) => merged(all, info),
            });
        }
        all.ok_or_else(|| DeviceError::Unsupported {
            what: "a list of no devices".to_owned(),
            device: "the placement".to_owned(),
            instead: "name one with --device".to_owned(),
        })
    }

    fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
        Ok(self.placed(config)?.memory())
    }

    fn placement(&self, config: &LoadConfig) -> Result<Option<Placement>, DeviceError> {
        Ok(Some(self.place(config)?))
    }

    fn open(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        let placement = self.placed(&config)?;
        let configs = match self.mode {
            SplitMode::Layer => self.stage_configs(&placement, &config),
            SplitMode::Tensor => self.shards(&config)?,
        };
        self.require_one_kind()?;
        let all = || {
            configs.iter().map(|(device, stage)| {
                let device = &self.devices[*device];
                let name = format!("{} ({})", device.id, stage.part().text());
                (name, &*device.backend, stage)
            })
        };
        // Every device is asked before any of them loads.
        let mut below: Option<(String, String)> = None;
        for (name, backend, stage) in all() {
            let asked = backend
                .estimate_stage(stage)
                .and_then(|_| backend.stage_format(stage));
            let format = asked.map_err(|error| error.at_open(&name))?;
            if stage.layers.is_empty() {
                // A draft of its own reads captured rows only.
                continue;
            }
            if let Some((lower, other)) = below
                && other != format
            {
                return Err(other_kernels(&name, &lower));
            }
            below = Some((name, format));
        }
        self.require_peer_access(configs.iter().map(|(device, _)| *device))?;
        let weights = config.target.weights();
        let total = weights.iter().map(|weight| weight.bytes() as u64).sum();
        let mut before = 0;
        let mut stages = Stages::new(self.mode);
        for (name, backend, stage) in all() {
            let mut of_stage = 0;
            let opened = backend.open_stage(stage.clone(), &mut |at| {
                of_stage = at.total_bytes;
                progress(LoadProgress {
                    done_bytes: (before + at.done_bytes).min(total),
                    total_bytes: total,
                });
            });
            let opened = opened.map_err(|error| error.at_open(&name))?;
            before += of_stage;
            stages.push(name, opened)?;
        }
        let with_layers = configs.iter().filter(|(_, of)| !of.layers.is_empty());
        let info = self.info(&config, &stages, with_layers.count())?;
        let layers = configs.into_iter().map(|(_, stage)| stage.layers).collect();
        let target = config.target.clone();
        let mut runner = SplitRunner::new(info, stages, (layers, sections(&config)), self.groups);
        if self.mode == SplitMode::Tensor {
            runner = runner.with_shards(target);
        }
        Ok(Box::new(CheckedRunner::new(runner)))
    }
}

impl SplitBackend {
    /// Refuses a CPU beside GPUs, since their residual rows differ by rounding where layers are
    /// fused, and a GPU that would draft for a CPU.
    fn require_one_kind(&self) -> Result<(), DeviceError> {
        let targets = self.devices.iter().take(self.n_targets);
        let infos = targets.map(|device| device.backend.probe());
        let infos = infos.collect::<Result<Vec<DeviceInfo>, DeviceError>>()?;
        let cpu = infos.iter().find(|info| info.is_cpu());
        let Some(cpu) = cpu else {
            return Ok(());
        };
        if !infos.iter().all(DeviceInfo::is_cpu) {
            return Err(DeviceError::Unsupported {
                what: "layers beside those of a GPU".to_owned(),
                device: cpu.id.clone(),
                instead: "name GPUs only with --target-devices, or only cpu".to_owned(),
            });
        }
        let draft = self.draft_device.map(|device| &self.devices[device]);
        match draft.map(|draft| draft.backend.probe()).transpose()? {
            Some(draft) if !draft.is_cpu() => Err(DeviceError::Unsupported {
                what: "a draft of layers on the CPU".to_owned(),
                device: draft.id,
                instead: "name cpu with --draft-device, or remove it".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Asks the GPUs of neighbouring stages, given bottom to top, whether they reach each other's
    /// memory.
    fn require_peer_access(&self, stages: impl Iterator<Item = usize>) -> Result<(), DeviceError> {
        let mut below = None;
        for device in stages {
            let backend = &self.devices[device].backend;
            if let Some(below) = below {
                backend.require_peer_access(below, self.mode)?;
            }
            below = backend.gpu_ordinal();
        }
        Ok(())
    }

    /// The stages of a placement, bottom to top, each with the index of its device. A draft apart
    /// from the LM head is a stage of its own, whatever else its device runs.
    fn stage_configs(
        &self,
        placement: &Placement,
        config: &LoadConfig,
    ) -> Vec<(usize, StageConfig)> {
        let n_layers = config.target.layers.len();
        let apart = placement
            .parts
            .iter()
            .any(|of| of.part.draft && !of.part.head);
        let stage = |layers: Range<usize>| StageConfig {
            model: config.clone(),
            layers,
            draft_apart: apart,
            shard: None,
        };
        let parts = placement.parts.iter().enumerate();
        let with_layers = parts.filter(|(_, part)| !part.part.layers.is_empty());
        let layers = with_layers.map(|(device, part)| (device, stage(part.part.layers.clone())));
        let draft = self.draft_device.filter(|_| apart);
        let draft = draft.map(|device| (device, stage(n_layers..n_layers)));
        layers.chain(draft).collect()
    }

    /// The properties of all stages together: the least of each.
    fn info(
        &self,
        config: &LoadConfig,
        stages: &Stages,
        n_with_layers: usize,
    ) -> Result<RunnerInfo, DeviceError> {
        let all = || stages.iter().map(Runner::info);
        let last = all().last();
        let page_size = all().map(|info| info.pool.page_size).max().unwrap_or(1);
        let tokens = all().map(|info| info.pool.tokens()).min().unwrap_or(0);
        let batch_invariant = all().all(|info| info.batch_invariant);
        // Tensor shards work on every pass together. Other groups would change the bits of devices
        // that are not batch-invariant.
        let begins_in_head = stages.len() > 1 && all().any(|info| info.begins_verify);
        let overlaps = self.mode == SplitMode::Layer && (n_with_layers > 1 || begins_in_head);
        Ok(RunnerInfo {
            device: self.probe()?,
            vocab: config.target.vocab,
            limits: config.limits,
            pool: KvPool {
                pages: tokens / page_size,
                page_size,
            },
            kv: config.kv,
            model: config.target.hash,
            draft_depth: last.and_then(|info| info.draft_depth),
            narrow_draft: last.and_then(|info| info.narrow_draft),
            mtp: last.and_then(|info| info.mtp),
            batch_invariant,
            begins_verify: overlaps && batch_invariant && self.groups != StepGroups::One,
            prefill_align: all().map(|info| info.prefill_align).max().unwrap_or(1),
            memory: all().fold(MemoryPlan::default(), |sum, info| sum.plus(&info.memory)),
        })
    }
}

/// The refusal of a device that would go on with the results of other kernels.
fn other_kernels(device: &str, below: &str) -> DeviceError {
    DeviceError::Unsupported {
        what: format!("layers beside those of {below}, which runs other kernels,"),
        device: device.to_owned(),
        instead: "name GPUs of one architecture with --target-devices, or another \
                  --target-layer-split"
            .to_owned(),
    }
}

/// Sections of a snapshot of the whole model: two per layer, those of drafts included, and the
/// hidden row of a multi-token-prediction head.
fn sections(config: &LoadConfig) -> u32 {
    let mtp = usize::from(config.target.mtp.is_some());
    let of_draft = config
        .draft
        .as_ref()
        .map_or(0, |draft| draft.spec.layers.len());
    (2 * (config.target.layers.len() + mtp + of_draft) + mtp) as u32
}

/// Two devices as one.
fn merged(all: DeviceInfo, other: DeviceInfo) -> DeviceInfo {
    let mut features = all.features;
    for feature in other.features {
        if !features.contains(&feature) {
            features.push(feature);
        }
    }
    DeviceInfo {
        id: format!("{},{}", all.id, other.id),
        name: if all.name == other.name {
            all.name
        } else {
            format!("{}, {}", all.name, other.name)
        },
        features,
        class: all.class.or(other.class),
        total_bytes: all.total_bytes + other.total_bytes,
        free_bytes: all.free_bytes + other.free_bytes,
    }
}
