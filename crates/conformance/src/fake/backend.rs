//! The fake runner as a backend, to test the suite.

use contract::{
    Backend, DeviceError, DeviceInfo, KvPool, LoadConfig, LoadProgress, MemoryPlan, Runner,
};

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
        let mut spec = self.spec.clone();
        spec.language.vocab = config.target.vocab;
        spec.limits = config.limits;
        spec.pool_tokens = KvPool::for_limits(config.limits, spec.page_size).tokens();
        let mut runner = FakeRunner::new(spec);
        runner.info.kv = config.kv;
        progress(LoadProgress {
            done_bytes: 0,
            total_bytes: 0,
        });
        Ok(Box::new(runner))
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
