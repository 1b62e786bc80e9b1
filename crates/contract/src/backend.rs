//! The device interface before a model is loaded: one [`Backend`] per kind of device.

use crate::{
    DeviceError, DeviceInfo, LoadConfig, LoadProgress, MemoryPlan, Placement, Runner, Scorer,
    ScorerConfig, SplitMode, Stage, StageConfig,
};

/// A kind of device, before anything is loaded on it.
pub trait Backend {
    /// Describes the device and its free memory.
    fn probe(&self) -> Result<DeviceInfo, DeviceError>;

    /// Bytes that opening a model with `config` needs.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] names the part of `config` that the device cannot run.
    fn estimate(&self, config: &LoadConfig) -> Result<MemoryPlan, DeviceError>;

    /// Which device runs what of a model, memory lacking or not; `None` if this is one device.
    ///
    /// # Errors
    /// As [`Backend::estimate`], except that a placement may exceed a device's memory.
    fn placement(&self, config: &LoadConfig) -> Result<Option<Placement>, DeviceError> {
        let _ = config;
        Ok(None)
    }

    /// Loads the model. The calling thread will own the runner.
    fn open(
        &self,
        config: LoadConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Runner>, DeviceError>;

    /// Bytes that [`Backend::open_stage`] needs.
    ///
    /// # Errors
    /// Those of [`Backend::open_stage`].
    fn estimate_stage(&self, stage: &StageConfig) -> Result<MemoryPlan, DeviceError> {
        Err(no_stage(self, stage))
    }

    /// What the stages of one model must have in common: the layout of the rows between them, and
    /// the kernels whose results the next stage goes on with. Stages are compared before any of
    /// them loads.
    ///
    /// # Errors
    /// Those of [`Backend::open_stage`].
    fn stage_format(&self, stage: &StageConfig) -> Result<String, DeviceError> {
        let _ = stage;
        Ok(String::new())
    }

    /// The driver's number of a GPU; `None` for another kind of device.
    fn gpu_ordinal(&self) -> Option<u32> {
        None
    }

    /// Asks the driver whether this GPU reaches the memory of GPU `below`, whose stage is the one
    /// below, and whether both reach each other's where they have shards. Called before any weight
    /// is read.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] names both GPUs, where the split needs what they lack.
    fn require_peer_access(&self, below: u32, mode: SplitMode) -> Result<(), DeviceError> {
        let _ = (below, mode);
        Ok(())
    }

    /// Loads a contiguous range of a model's layers, or its draft alone, as one of several pipeline
    /// stages. The calling thread will own it.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] by default: the device runs whole models only.
    fn open_stage(
        &self,
        stage: StageConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Stage>, DeviceError> {
        let _ = progress;
        Err(no_stage(self, &stage))
    }

    /// Loads a model that scores prompts, beside any runner. The calling thread will own it.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] by default: scoring then runs on the CPU.
    fn open_scorer(
        &self,
        config: ScorerConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Scorer>, DeviceError> {
        let _ = progress;
        Err(no_scorer(self, &config))
    }

    /// Bytes that [`Backend::open_scorer`] needs with `config`, in addition to any runner.
    ///
    /// # Errors
    /// Those of [`Backend::open_scorer`].
    fn estimate_scorer(&self, config: &ScorerConfig) -> Result<MemoryPlan, DeviceError> {
        Err(no_scorer(self, config))
    }
}

fn id_of<B: Backend + ?Sized>(backend: &B) -> String {
    backend
        .probe()
        .map_or_else(|_| "this device".to_owned(), |info| info.id)
}

/// The answer of a device without a scorer.
fn no_scorer<B: Backend + ?Sized>(backend: &B, config: &ScorerConfig) -> DeviceError {
    DeviceError::Unsupported {
        what: format!("scoring prompts with {}", config.model.name),
        device: id_of(backend),
        instead: "scoring runs on the CPU".to_owned(),
    }
}

/// The answer of a device without stages.
fn no_stage<B: Backend + ?Sized>(backend: &B, stage: &StageConfig) -> DeviceError {
    DeviceError::Unsupported {
        what: format!("running {} alone", stage.part().text()),
        device: id_of(backend),
        instead: "remove --target-devices and name one device that holds the whole model with \
                  --device"
            .to_owned(),
    }
}
