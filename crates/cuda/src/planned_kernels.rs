//! What a GPU would run, planned without opening it.

use contract::{DeviceError, LoadConfig, ScorerConfig};

use crate::backend::CudaBackend;
use crate::launch::{CompileUnit, Launch};
use crate::opened_part::OpenedPart;
use crate::plan::PlanKey;
use crate::plan::explain::{ExplainedKernel, explain};
use crate::plan::select::Depth;
use crate::scorer::ScorerLayout;
use crate::step;

impl CudaBackend {
    /// All kernels that are compiled to run a model, for filling a cache ahead of time.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a configuration that `open` would refuse.
    pub fn units(&self, config: &LoadConfig) -> Result<Vec<CompileUnit>, DeviceError> {
        self.checked(config)?;
        Ok(self.planned(&OpenedPart::whole(config)).plans.units())
    }

    /// The kernels that run a model, for which rows, and why; the GPU need not be in this machine.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a configuration that `open` would refuse.
    pub fn explain(&self, config: &LoadConfig) -> Result<Vec<ExplainedKernel>, DeviceError> {
        self.checked(config)?;
        Ok(explain(&self.planned(&OpenedPart::whole(config)).plans))
    }

    /// The launches of a decode step of one tree of `rows` rows after `depth` tokens, in order; the
    /// GPU need not be in this machine.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a configuration that `open` would refuse.
    pub fn step_launches(
        &self,
        config: &LoadConfig,
        (rows, depth): (usize, usize),
    ) -> Result<Vec<Launch>, DeviceError> {
        let rows = step::bucket(rows.min(config.limits.tree_nodes));
        let depth = Depth::of(rows, depth);
        let trees = 1;
        self.plan_launches(config, PlanKey::Step { rows, trees, depth })
    }

    /// The launches of the longest chunk of a prompt; otherwise as [`CudaBackend::step_launches`].
    ///
    /// # Errors
    /// As there.
    pub fn chunk_launches(&self, config: &LoadConfig) -> Result<Vec<Launch>, DeviceError> {
        self.plan_launches(config, PlanKey::Chunk(config.limits.prefill_chunk))
    }

    fn plan_launches(&self, config: &LoadConfig, key: PlanKey) -> Result<Vec<Launch>, DeviceError> {
        self.checked(config)?;
        let mut plans = self.planned(&OpenedPart::whole(config)).plans;
        let launches = plans.take_launches().remove(&key);
        Ok(launches.expect("every bucket of rows within the limits has a plan"))
    }

    /// All kernels of a scorer, for filling a cache ahead of time.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] and [`DeviceError::Weight`] for a scorer that `open_scorer`
    /// would refuse.
    pub fn scorer_units(&self, config: &ScorerConfig) -> Result<Vec<CompileUnit>, DeviceError> {
        let layout = ScorerLayout::new(config, &self.gpu, [0; 4])?;
        Ok(layout.plans.units())
    }
}
