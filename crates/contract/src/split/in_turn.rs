//! Verify calls that have begun and whose rows are not asked for yet.
//!
//! A call begins in the stages below the LM head, which return before their pass ends. Its rows
//! come from the stage with the LM head, where the host waits, once they are asked for. In between
//! the caller drafts for other sequences, begins their call and finishes it: then the stages below
//! work on one group of sequences while the stage with the LM head and the draft work on the other.
//!
//! | host | stages below | LM head, draft |
//! |---|---|---|
//! | draft B, begin B | A, then B | draft B |
//! | finish A | B | A |
//! | commit A, draft A, begin A | A | draft A |
//! | finish B | A | B |

//!
//! With all layers on one device and the draft on another, the stage with the LM head begins too,
//! as soon as it has committed what it verified before, and works while the other group drafts.

use super::begun::{BegunTree, BegunVerify, Progress};
use super::runner::SplitRunner;
use super::stage::Stage;
use super::stages::StoppedPass;
use crate::{DeviceError, LogitsRequest, LogitsRow, VerifyItem};

impl SplitRunner {
    /// Begins a call: takes its pages in every stage, and queues its pass in the stages below the
    /// LM head.
    pub(super) fn begin(&mut self, items: &[VerifyItem<'_>]) -> Result<(), DeviceError> {
        let mut trees = Vec::with_capacity(items.len());
        for item in items {
            let sequence = self.sequence(item.seq)?;
            let (ids, position) = (sequence.ids.clone(), sequence.position);
            self.reserve(item.seq, position + item.tree.len())?;
            trees.push(BegunTree {
                seq: item.seq,
                ids,
                tree: item.tree.clone(),
                requests: item.requests.to_vec(),
            });
        }
        let mut begun = BegunVerify::new(trees);
        let nodes: Vec<usize> = items.iter().map(|item| item.tree.len()).collect();
        let fits = |stage: &dyn Stage| stage.items_per_pass(&nodes) >= items.len();
        let is_one_pass = self.stages.iter().all(fits);
        let waits = |of: &BegunVerify| matches!(of.progress, Progress::Waits);
        if is_one_pass && !self.begun.iter().any(waits) {
            self.hand_over_begun();
            if let Err(StoppedPass { stage, error }) = self.run_stages(&begun, 0..self.head) {
                self.stages.require()?;
                self.discard_begun(&begun, stage)?;
                return Err(error);
            }
            begun.progress = Progress::BelowHead;
        }
        self.begun.push_back(begun);
        self.begin_in_head();
        Ok(())
    }

    /// Has the stage with the LM head begin the call that began first, if it can.
    pub(super) fn begin_in_head(&mut self) {
        let head = self.head;
        if !self.begins_in_head {
            return;
        }
        let Some(first) = self.begun.front_mut() else {
            return;
        };
        if let Progress::BelowHead = first.progress {
            let items = first.items(head, &[], true);
            let begun = self.stages.call(head, |of| of.begin_verify(&items));
            first.progress = match begun {
                Ok(()) => Progress::InHead,
                Err(error) => Progress::Failed(error),
            };
        }
    }

    /// Ends the call that began first.
    pub(super) fn finish(&mut self) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        self.hand_over_begun();
        let Some(mut begun) = self.begun.pop_front() else {
            return Err(DeviceError::InvalidCall {
                call: "finish_verify",
                detail: "nothing has begun".to_owned(),
            });
        };
        let (head, n_stages) = (self.head, self.stages.len());
        let stopped = match std::mem::replace(&mut begun.progress, Progress::Waits) {
            Progress::Waits => {
                let items = begun.trees.iter().map(|of| VerifyItem {
                    seq: of.seq,
                    tree: &of.tree,
                    requests: &of.requests,
                });
                return self.step(&items.collect::<Vec<_>>());
            }
            Progress::Failed(error) => StoppedPass { stage: head, error },
            Progress::BelowHead | Progress::HandedOver => {
                match self.run_stages(&begun, head..n_stages) {
                    Ok(rows) => return Ok(rows),
                    Err(stopped) => stopped,
                }
            }
            Progress::InHead => match self.finish_in_head(&begun) {
                Ok(rows) => return Ok(rows),
                Err(stopped) => stopped,
            },
        };
        self.stages.require()?;
        self.discard_begun(&begun, stopped.stage)?;
        Err(stopped.error)
    }

    /// Waits for the stage with the LM head, and queues the pass of the stage above it.
    fn finish_in_head(&mut self, begun: &BegunVerify) -> Result<Vec<Vec<LogitsRow>>, StoppedPass> {
        let head = self.head;
        let done = self.stages.call(head, |of| of.finish_verify());
        let rows = done.map_err(|error| StoppedPass { stage: head, error })?;
        if head + 1 < self.stages.len() {
            let stage = head + 1;
            let received = self.stages.hand_over(stage, begun.n_rows);
            received.map_err(|error| StoppedPass { stage, error })?;
            self.run_stages(begun, stage..self.stages.len())?;
        }
        Ok(rows)
    }

    /// Has the stage with the LM head take the rows of the call that began first, which the stages
    /// below overwrite in their next pass.
    fn hand_over_begun(&mut self) {
        let head = self.head;
        let Some(first) = self.begun.front_mut() else {
            return;
        };
        if let (Progress::BelowHead, false) = (&first.progress, head == 0) {
            first.progress = match self.stages.hand_over(head, first.n_rows) {
                Ok(()) => Progress::HandedOver,
                Err(error) => Progress::Failed(error),
            };
        }
    }

    /// Runs a call in some stages, the first of which has its rows; returns those of the LM head.
    fn run_stages(
        &mut self,
        begun: &BegunVerify,
        stages: std::ops::Range<usize>,
    ) -> Result<Vec<Vec<LogitsRow>>, StoppedPass> {
        let longest = begun.trees.iter().map(|of| of.tree.len()).max();
        let none = vec![LogitsRequest::NONE; longest.unwrap_or(0)];
        let mut rows = Vec::new();
        for stage in stages.clone() {
            let has_head = stage == self.head;
            let items = begun.items(stage, &none, has_head);
            let received = if stage == stages.start {
                Ok(())
            } else {
                self.stages.hand_over(stage, begun.n_rows)
            };
            let done = received.and_then(|()| self.stages.call(stage, |of| of.verify(&items)));
            let done = done.map_err(|error| StoppedPass { stage, error })?;
            if has_head {
                rows = done;
            }
        }
        Ok(rows)
    }

    /// Drops the trees of a call in the first `n_stages` stages.
    fn discard_begun(&mut self, begun: &BegunVerify, n_stages: usize) -> Result<(), DeviceError> {
        let mut trees = begun.trees.iter();
        trees.try_for_each(|of| self.discard_in(of.seq, n_stages))
    }
}
