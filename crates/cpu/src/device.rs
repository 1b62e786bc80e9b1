//! The CPU as a [`Backend`].

use contract::snapshot::SnapshotIdentity;
use contract::{
    Backend, DeviceError, DeviceInfo, LoadConfig, LoadProgress, MemoryPlan, MtpInfo, Runner,
    RunnerInfo, Scorer, ScorerConfig, Stage, StageConfig,
};

use crate::draft::Draft;
use crate::kernels::Kernels;
use crate::pass::CHUNK;
use crate::runner::{CpuRunner, Parts};
use crate::scorer::CpuScorer;
use crate::shard::ShardThread;
use crate::simd::dispatch::Dispatch;
use crate::snapshot_pages::PAGE;
use crate::stage::StageRows;
use crate::thread_pool::ThreadPool;
use crate::weights::ModelWeights;
use crate::{check, memory};

/// Options of the CPU device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Scalar f32 arithmetic over dequantized weights: the reference.
    pub reference: bool,
    /// Threads including the caller; default: one per processor.
    pub threads: Option<usize>,
}

/// The CPU before a model is loaded.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    dispatch: Dispatch,
    threads: usize,
    rotated: bool,
}

impl CpuBackend {
    /// Chooses instruction set and number of threads.
    pub fn new(options: CpuOptions) -> CpuBackend {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        CpuBackend {
            dispatch: if options.reference {
                Dispatch::reference()
            } else {
                Dispatch::detect()
            },
            threads: options.threads.unwrap_or(processors).max(1),
            rotated: false,
        }
    }

    /// Stores quantized keys and values Hadamard-rotated, which reduces the error from outliers
    /// ([`contract::quant::hadamard`]). Off by default, because the states would differ from those
    /// of devices without rotation.
    #[must_use]
    pub fn with_rotation(self) -> CpuBackend {
        CpuBackend {
            rotated: true,
            ..self
        }
    }

    /// A backend with given kernels, for tests and benches.
    pub fn with_dispatch(dispatch: Dispatch, threads: usize) -> CpuBackend {
        CpuBackend {
            dispatch,
            threads: threads.max(1),
            rotated: false,
        }
    }

    fn info(&self) -> DeviceInfo {
        let memory = memory::of_system().unwrap_or_default();
        DeviceInfo {
            id: "cpu".to_owned(),
            name: processor_name(),
            features: vec![
                self.dispatch.name().to_owned(),
                format!("{} threads", self.threads),
            ],
            class: None,
            total_bytes: memory.total,
            free_bytes: memory.free,
        }
    }

    /// Opens a runner of the concrete type, for tests.
    pub(crate) fn open_runner(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CpuRunner, DeviceError> {
        self.open_part(&StageConfig::whole(config), progress)
    }

    /// Opens a stage; one of all layers is a whole model.
    fn open_part(
        &self,
        stage: &StageConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CpuRunner, DeviceError> {
        let memory = self.estimate_stage(stage)?;
        memory::require(memory.total_bytes())?;
        let (whole, config) = (&stage.model, stage.load_config());
        let mut info = RunnerInfo {
            device: self.info(),
            vocab: config.target.vocab,
            limits: config.limits,
            pool: contract::KvPool::for_limits(config.limits, PAGE),
            kv: config.kv,
            model: config.target.hash,
            draft_depth: config.draft.as_ref().map(|draft| draft.spec.depth()),
            narrow_draft: config.draft.as_ref().and_then(|draft| draft.spec.narrow()),
            mtp: config.target.mtp.as_ref().map(|_| MtpInfo::DEFAULT),
            batch_invariant: true,
            begins_verify: false,
            prefill_align: CHUNK,
            memory,
        };
        let identity = SnapshotIdentity {
            model: whole.target.hash,
            kv: whole.kv,
            rotated: self.rotated,
            draft: whole
                .draft
                .as_ref()
                .map(|draft| (draft.spec.hash, draft.kv)),
            mtp: whole.target.mtp.is_some(),
        };
        let pool = ThreadPool::new(self.threads);
        let target = (config.target, config.weights);
        let weights = ModelWeights::load(target, &self.dispatch, &pool, progress)?;
        let draft = config
            .draft
            .map(|draft| Draft::new(draft, self.dispatch, &pool, &mut |_| {}));
        let draft = draft.transpose()?;
        info.memory.weights_bytes = weights.owned_bytes();
        tracing::info!(
            kernels = self.dispatch.name(),
            threads = pool.threads(),
            part = %stage.part().text(),
            weights_bytes = info.memory.weights_bytes,
            kv_bytes = info.memory.kv_bytes,
            "model opened on the cpu"
        );
        let kernels = Kernels::of(self.dispatch);
        let parts = Parts {
            weights,
            draft,
            pool,
            kernels,
            identity,
            stage: StageRows::of(stage),
        };
        Ok(CpuRunner::new(info, parts))
    }
}

impl Backend for CpuBackend {
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        Ok(self.info())
    }

    fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
        check::require_supported(config, "the cpu")?;
        Ok(memory::estimate(config, &self.dispatch, self.threads))
    }

    fn open(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        Ok(Box::new(self.open_runner(config, progress)?))
    }

    fn estimate_stage(&self, stage: &StageConfig) -> Result<MemoryPlan, DeviceError> {
        check::require_supported(&stage.model, "the cpu")?;
        let config = stage.load_config();
        Ok(memory::estimate(&config, &self.dispatch, self.threads))
    }

    fn open_stage(
        &self,
        stage: StageConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Stage>, DeviceError> {
        match stage.which_shard() {
            Some(shard) if !shard.is_last() => {
                let backend = self.clone();
                let open = move || backend.open_part(&stage, &mut |_| {});
                Ok(Box::new(ShardThread::open(shard, open)?))
            }
            _ => Ok(Box::new(self.open_part(&stage, progress)?)),
        }
    }

    fn open_scorer(
        &self,
        config: ScorerConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Scorer>, DeviceError> {
        let compute = (self.dispatch, self.threads);
        Ok(Box::new(CpuScorer::open(config, compute, progress)?))
    }
}

/// The processor's name, if the system reports it.
fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':'));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim())
        .to_owned()
}
