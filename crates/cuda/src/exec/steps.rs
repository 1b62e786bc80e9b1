//! Steps over trees: queued, and waited for.

use contract::{DeviceError, LogitsRequest, LogitsRow};

use super::{Engine, Reduced};
use crate::plan::PlanKey;
use crate::step::{self, Step};

/// A step that is queued.
pub(crate) struct BegunStep {
    key: PlanKey,
    reduced: Reduced,
}

impl Engine {
    /// Runs a step, waits, and returns a row for each of `requests`, one per logits row of the
    /// header.
    pub(crate) fn step(
        &mut self,
        step: &mut Step,
        requests: &[&LogitsRequest],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        match self.begin_step(step, requests)? {
            Some(begun) => self.finish_step(begun, requests),
            None => Ok(Vec::new()),
        }
    }

    /// Queues a step; does not wait. `None` if no logits come of it, in a stage that hands its rows
    /// over. The rows of another pass would replace those that are waited for.
    pub(crate) fn begin_step(
        &mut self,
        step: &mut Step,
        requests: &[&LogitsRequest],
    ) -> Result<Option<BegunStep>, DeviceError> {
        let rows = usize::try_from(step.rows).unwrap_or(0);
        let key = PlanKey::of_step(step);
        if self.hands_over() {
            // The step before may not have read its header yet.
            self.wait_for_headers()?;
        }
        self.wait_for_tree_copies(step)?;
        self.join_commit()?;
        self.place_features(step)?;
        let bytes = step::bytes_of(step);
        self.headers.up.step.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        #[cfg(feature = "inspect")]
        if self.captured_layers.is_some() {
            let (to, plans) = (self.plans.addresses, &self.plans);
            self.headers.up.queue(&self.gpu, to, plans, key)?;
            self.queue_captured(key, rows)?;
            return Ok(None);
        }
        self.begin_pass(rows)?;
        self.queue(key)?;
        self.end_pass(key, rows)?;
        self.queue_expert_counts()?;
        if self.hands_over() {
            return Ok(None);
        }
        let edited = self.queue_edits(PlanKey::EditedStep(step::bucket(rows)), requests)?;
        let masses = self.queue_masses(rows, edited, requests)?;
        let reduced = Reduced { edited, masses };
        Ok(Some(BegunStep { key, reduced }))
    }

    /// Waits for a step, and returns a row for each of its requests.
    pub(crate) fn finish_step(
        &mut self,
        BegunStep { key, reduced }: BegunStep,
        requests: &[&LogitsRequest],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        self.sync()?;
        self.check_one_launch(key)?;
        self.move_experts()?;
        self.answer(requests, reduced)
    }
}
