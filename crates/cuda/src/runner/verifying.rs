//! Verify calls of the runner, at once or begun and finished later.

use contract::protocol::{invalid_call, scatter_rows};
use contract::{DeviceError, LogitsRequest, LogitsRow, LogitsSelection, VerifyItem};

use super::CudaRunner;
use crate::exec::BegunStep;
use crate::step::{self, Step};

/// A verify call that has begun.
pub(super) struct BegunVerify {
    /// Its step, unless no logits come of it.
    step: Option<BegunStep>,
    /// Those of each item.
    requests: Vec<Vec<LogitsRequest>>,
}

impl CudaRunner {
    /// Verifies items, in as many steps as they need.
    pub(super) fn verify_all(
        &mut self,
        items: &[VerifyItem<'_>],
    ) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.prepare_verify(items)?;
        let mut rows = Vec::with_capacity(items.len());
        let mut rest = items;
        while !rest.is_empty() {
            let (pass, later) = rest.split_at(fitting(rest));
            rows.append(&mut self.verify_pass(pass)?);
            rest = later;
        }
        Ok(rows)
    }

    /// Queues the step of items that fit one; does not wait.
    pub(super) fn begin_pass(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        self.prepare_verify(items)?;
        if self.begun.is_some() || fitting(items) < items.len() {
            let detail = format!("{} items beside another step, or too many", items.len());
            return Err(invalid_call("begin_verify", detail));
        }
        let (mut step, requests) = self.step_of(items)?;
        let begun = self.engine.begin_step(&mut step, &requests);
        let step = self.record_fault(begun)?;
        self.set_pending(items);
        let requests = items.iter().map(|item| item.requests.to_vec());
        self.begun = Some(BegunVerify {
            step,
            requests: requests.collect(),
        });
        Ok(())
    }

    /// Waits for the step that has begun.
    pub(super) fn finish_pass(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.require_device()?;
        let Some(BegunVerify { step, requests }) = self.begun.take() else {
            return Err(invalid_call(
                "finish_verify",
                "nothing has begun".to_owned(),
            ));
        };
        let Some(step) = step else {
            return Ok(requests.iter().map(|_| Vec::new()).collect());
        };
        let asked = requests.iter().flatten();
        let asked = asked.filter(|ask| ask.selection != LogitsSelection::None);
        let rows = self.engine.finish_step(step, &asked.collect::<Vec<_>>());
        let mut rows = self.record_fault(rows)?.into_iter();
        let answered = requests.iter().map(|of| scatter_rows(of.iter(), &mut rows));
        Ok(answered.collect())
    }

    /// Verifies items whose nodes fit one step.
    fn verify_pass(
        &mut self,
        items: &[VerifyItem<'_>],
    ) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let (mut step, requests) = self.step_of(items)?;
        let rows = self.engine.step(&mut step, &requests);
        let mut rows = self.record_fault(rows)?.into_iter();
        self.set_pending(items);
        let answered = items
            .iter()
            .map(|item| scatter_rows(item.requests.iter(), &mut rows));
        Ok(answered.collect())
    }

    /// The header of a step of these items, and the requests of its logits rows.
    fn step_of<'a>(
        &mut self,
        items: &[VerifyItem<'a>],
    ) -> Result<(Step, Vec<&'a LogitsRequest>), DeviceError> {
        let mut step = Step::new();
        let mut requests = Vec::new();
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let first = usize::try_from(step.rows).unwrap_or(0);
            step.push(sequence.slot, sequence.position, item.tree);
            for (node, ask) in item.requests.iter().enumerate() {
                if ask.selection != LogitsSelection::None {
                    step.request_logits(first + node);
                    requests.push(ask);
                }
            }
        }
        self.host.note_pass(step::ROWS);
        Ok((step, requests))
    }

    /// The trees of these items are pending.
    fn set_pending(&mut self, items: &[VerifyItem<'_>]) {
        for item in items {
            if let Some(sequence) = self.sequences.get_mut(&item.seq) {
                sequence.pending = Some(item.tree.clone());
                sequence.drafted.clear();
            }
        }
    }

    /// Checks a verify call and takes its pages.
    fn prepare_verify(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        self.load_deferred_draft()?;
        self.validator().verify(items)?;
        if !self.windows && items.iter().any(|item| !item.tree.window().is_full()) {
            let detail = "the device was opened without windows".to_owned();
            return Err(invalid_call("verify", detail));
        }
        for item in items {
            let position = self.sequence(item.seq)?.position;
            self.ensure_pages(item.seq, position + item.tree.len())?;
        }
        Ok(())
    }
}

/// Items at the front of `rest` that fit one step.
fn fitting(rest: &[VerifyItem<'_>]) -> usize {
    let mut nodes = 0;
    let fits = rest.iter().take(step::TREES).take_while(|item| {
        nodes += item.tree.len();
        nodes <= step::ROWS
    });
    fits.count().max(1)
}
