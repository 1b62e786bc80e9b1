//! The fake runner as a backend, to test the suite.

use contract::{
    Backend, DeviceError, DeviceInfo, KvPool, LoadConfig, LoadProgress, MemoryPlan, Runner, Stage,
    StageConfig,
};

use super::stage::FakeStage;
use super::{FakeRunner, FakeSpec};

/// Opens fake runners with the vocabulary, limits and formats of the configuration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FakeBackend {
    /// Properties of the runners that the configuration does not set.
    pub spec: FakeSpec,
}

impl Backend for FakeBackend {
    fn probe(&self) -> Result<DeviceInfo, DeviceError> {
        Ok(device_info())
    }

    fn estimate(&self, _plan: &LoadConfig) -> Result<MemoryPlan, DeviceError> {
        Ok(MemoryPlan::default())
    }

    fn open(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError> {
        progress(LoadProgress {
            done_bytes: 0,
            total_bytes: 0,
        });
        Ok(Box::new(self.runner(&config, self.spec.clone())))
    }

    fn estimate_stage(&self, _stage: &StageConfig) -> Result<MemoryPlan, DeviceError> {
        Ok(MemoryPlan::default())
    }

    fn open_stage(
        &self,
        stage: StageConfig,
        _progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Stage>, DeviceError> {
        let mut spec = self.spec.clone();
        if !stage.is_last() {
            (spec.draft, spec.mtp) = (None, None);
        }
        let mut runner = self.runner(&stage.model, spec);
        runner.info.begins_verify = stage.draft_apart && stage.has_head();
        Ok(Box::new(FakeStage::new(runner, stage.is_first())))
    }
}

impl FakeBackend {
    fn runner(&self, config: &LoadConfig, mut spec: FakeSpec) -> FakeRunner {
        spec.language.vocab = config.target.vocab;
        spec.limits = config.limits;
        spec.pool_tokens = KvPool::for_limits(config.limits, spec.page_size).tokens();
        let mut runner = FakeRunner::new(spec);
        runner.info.kv = config.kv;
        runner
    }
}

pub(super) fn device_info() -> DeviceInfo {
    DeviceInfo {
        id: "fake".to_owned(),
        name: "a hash function".to_owned(),
        features: Vec::new(),
        class: None,
        total_bytes: 0,
        free_bytes: 0,
    }
}
