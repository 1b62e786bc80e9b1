//! The status of a step that was one persistent launch.

use contract::DeviceError;

use super::Engine;
use crate::plan::{PlanKey, STATUS_BYTES};

impl Engine {
    /// Fails if the step was one persistent launch in which a wait took too long.
    pub(super) fn check_one_launch(&self, key: PlanKey) -> Result<(), DeviceError> {
        let PlanKey::Step { rows, .. } = key else {
            return Ok(());
        };
        if !self.plans.one_launch.contains(&key) {
            return Ok(());
        }
        let begin = self.plans.reduce.out_bytes(rows);
        let bytes = &self.headers.down.rows.as_slice()[begin..begin + STATUS_BYTES];
        let status = bytes
            .iter()
            .rev()
            .fold(0_u32, |status, byte| status << 8 | u32::from(*byte));
        if status == 0 {
            return Ok(());
        }
        Err(DeviceError::DeviceLost {
            during: "one_launch",
            detail: format!(
                "a wait for another block took too long (status {status}: 1 for a row, 2 for a \
                 counter); run with --one-launch off"
            ),
        })
    }
}
