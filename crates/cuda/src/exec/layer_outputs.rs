//! Stopping after every layer of a chunk, for conformance only: it says which layer diverged.

use contract::DeviceError;

use super::Engine;
use crate::plan::PlanKey;

impl Engine {
    /// Begins or ends watching; while it lasts, chunks leave their residual streams behind.
    pub(crate) fn watch_layers(&mut self, on: bool) {
        self.captured_layers = on.then(Vec::new);
    }

    /// The residual streams of the last chunk, f32 `[rows, hidden]` for each layer.
    pub(crate) fn take_layers(&mut self) -> Vec<Vec<u8>> {
        self.captured_layers
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Runs a chunk's plan layer by layer, reading the residual stream of `rows` rows after each.
    pub(super) fn queue_captured(&mut self, key: PlanKey, rows: usize) -> Result<(), DeviceError> {
        let ends = self.plans.all.get(&key).map(|plan| plan.layer_ends.clone());
        let mut begin = 0;
        for (layer, end) in ends.unwrap_or_default().into_iter().enumerate() {
            self.launcher.run_part(&self.gpu, key, begin..end)?;
            let bytes = 4 * rows * self.spec.hidden;
            let mut seen = self.read(self.plans.addresses.residual, bytes)?;
            if let Some(captured_layers) = &mut self.captured_layers {
                captured_layers.resize(captured_layers.len().max(layer + 1), Vec::new());
                captured_layers[layer].append(&mut seen);
            }
            begin = end;
        }
        Ok(())
    }
}
