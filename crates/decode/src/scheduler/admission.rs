//! Admission: from the waiting queue to each choice's first token.

use std::mem;
use std::slice;
use std::sync::Arc;

use contract::{DeviceError, LogitsRow, SeqId, SnapshotLocation, TokenId};

use crate::event::{Event, FinishReason};
use crate::prefix::{Restored, SaveInfo};

use super::Scheduler;
use super::device::pool_exhausted;
use super::outcome::{Events, StepOutcome};
use super::queue::PriorityKey;
use super::running::{PromptState, RunningJob};
use super::sequence::StopConditions;

impl Scheduler {
    /// Starts choices whose prompt is prefilled and that wait for a sequence.
    pub(super) fn start_pending_choices(
        &mut self,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        let mut outcome = StepOutcome::NothingToDo;
        let mut at = 0;
        while at < self.running.len() {
            let running = &self.running[at];
            let waits = running.prompt_state.is_some() && !running.pending_choices.is_empty();
            if !waits {
                at += 1;
                continue;
            }
            let (prompt, max_len) = (running.prompt.len(), running.max_len());
            let key = running.key;
            let Some(seq) = self.open_sequence(key, (prompt, max_len))? else {
                return Ok(StepOutcome::OutOfMemory);
            };
            let running = &mut self.running[at];
            let (Some(state), Some(choice)) =
                (&running.prompt_state, running.pending_choices.pop_front())
            else {
                continue;
            };
            let row = state.row.clone();
            if let Err(error) = self.device.runner().restore(seq, state.snapshot) {
                self.device.close(seq);
                running.pending_choices.push_front(choice);
                self.fail(at, error, out)?;
                continue;
            }
            outcome = StepOutcome::Advanced;
            self.start_choice(at, choice, seq, &row, out);
            self.running.remove_finished(&mut self.device);
        }
        Ok(outcome)
    }

    /// The waiting job to admit now: the first, or a short one while every sequence is in use and
    /// one can be freed for it.
    fn next_admission(&mut self) -> Result<Option<PriorityKey>, DeviceError> {
        if !self.has_free_sequence()
            && let Some(short) = self.queue.first_short()
            && self.free_sequence_for_short(short)?
        {
            return Ok(Some(short));
        }
        Ok(self.queue.first_key())
    }

    /// Admits jobs in the queue's order while the device has capacity.
    pub(super) fn admit_queued(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let mut outcome = StepOutcome::NothingToDo;
        while let Some(key) = self.next_admission()? {
            let Some(job) = self.queue.get(key) else {
                break;
            };
            let stop_conditions = StopConditions::new(
                &job.params,
                &self.config.eos,
                self.device.info().limits.context,
            );
            let max_len = stop_conditions.max_len(job.prompt.len());
            let (prompt, session) = (Arc::clone(&job.prompt), job.params.session.clone());
            let wanted = (key, max_len, job.params.reuses_prefixes());
            let Some((seq, cached)) = self.open_with_prefix(&prompt, session.as_ref(), wanted)?
            else {
                return Ok(StepOutcome::OutOfMemory);
            };
            let align = self.device.info().prefill_align;
            let save_points = self.prefix.save_points(&prompt, cached, align);
            let Some(queued) = self.queue.take(key) else {
                self.device.close(seq);
                break;
            };
            let id = queued.job.id;
            let mut running = RunningJob::new(key, queued, seq, self.model());
            running.cached = cached;
            running.prefill = running
                .prefill
                .map(|prefill| prefill.resumed(cached, save_points));
            self.running.push(running);
            out.push((id, Event::Started { cached }));
            outcome = StepOutcome::Advanced;
        }
        Ok(outcome)
    }

    /// Opens a sequence that holds the longest cached prefix of a prompt, and returns that prefix's
    /// length.
    ///
    /// Prefixes are used only if `use_prefixes`. Returns `None` if no sequence can be opened now.
    pub(super) fn open_with_prefix(
        &mut self,
        prompt: &[TokenId],
        session: Option<&Arc<str>>,
        (key, max_len, use_prefixes): (PriorityKey, usize, bool),
    ) -> Result<Option<(SeqId, usize)>, DeviceError> {
        let sizes = (prompt.len(), max_len);
        let Some(seq) = self.open_sequence(key, sizes)? else {
            return Ok(None);
        };
        if !use_prefixes {
            return Ok(Some((seq, 0)));
        }
        let runner = self.device.runner();
        match self.prefix.restore(runner, seq, prompt, session)? {
            Restored::At(position) => Ok(Some((seq, position))),
            Restored::NotFound => Ok(Some((seq, 0))),
            Restored::Broken => {
                self.device.close(seq);
                let fresh = self.open_sequence(key, sizes)?;
                Ok(fresh.map(|seq| (seq, 0)))
            }
        }
    }

    /// Whether one more sequence may be open.
    pub(super) fn has_free_sequence(&self) -> bool {
        self.running.n_open_sequences() < self.config.max_sequences.max(1)
            && self.device.capacity().sequences > 0
    }

    /// Opens a sequence of `len` tokens soon and at most `max_len`, for work of this priority.
    ///
    /// Returns `None` if no sequence is free, the pool lacks capacity, or preempted work goes
    /// first.
    pub(super) fn open_sequence(
        &mut self,
        key: PriorityKey,
        (len, max_len): (usize, usize),
    ) -> Result<Option<SeqId>, DeviceError> {
        // A short prompt may start while a prompt that made way for short ones waits.
        let preempted = if len <= self.device.chunk() {
            self.running.first_preempted_for_memory()
        } else {
            self.running.first_preempted().map(|(_, key)| key)
        };
        if !self.has_free_sequence() || preempted.is_some_and(|first| first < key) {
            return Ok(None);
        }
        if !self.has_capacity(len, max_len) {
            self.stats.blocked_on_pool = true;
            return Ok(None);
        }
        match self.device.runner().open(max_len) {
            Ok(seq) => Ok(Some(seq)),
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                self.note_out_of_memory(&error);
                Ok(None)
            }
        }
    }

    /// Prefills one chunk of the prompt whose turn it is.
    pub(super) fn run_prefill_chunk(
        &mut self,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        let next = self
            .running
            .next_prefill(self.stats.chunks, self.device.chunk());
        let Some(at) = next else {
            return Ok(StepOutcome::NothingToDo);
        };
        if self.running[at].prefill.is_none() {
            return self.recompute_chunk(at, out);
        }
        let size = self.device.chunk();
        let last = self.running[at].first_request(size, self.model());
        let running = &mut self.running[at];
        let Some(prefill) = &mut running.prefill else {
            return Ok(StepOutcome::NothingToDo);
        };
        let before = prefill.done;
        let chunk = prefill.chunk(self.device.runner(), &running.prompt, size, last.as_ref());
        let row = match chunk {
            Ok(row) => row,
            Err(error) => return self.prefill_failed(at, error, out),
        };
        self.stats.chunks += 1;
        self.stats.prompt_tokens += (prefill.done - before) as u64;
        let (done, total) = (prefill.done, running.prompt.len());
        if let Some(save_point) = prefill
            .take_reached()
            .filter(|_| running.params.use_prefix_cache)
        {
            let info = SaveInfo {
                system_prefix: save_point.system_prefix,
                session: running.params.session.as_ref(),
                from_warmup: false,
            };
            let tokens = &running.prompt[..done];
            self.prefix
                .save(self.device.runner(), prefill.seq, tokens, info)?;
        }
        let running = &self.running[at];
        out.push((running.id, Event::Prefill { done, total }));
        if let Some(row) = row {
            self.finish_prefill(at, row, out)?;
        }
        Ok(StepOutcome::Advanced)
    }

    /// Handles the error of a prefill call: preempts a sequence if the pool ran out, or fails the
    /// job.
    pub(super) fn prefill_failed(
        &mut self,
        at: usize,
        error: DeviceError,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        if !error.is_out_of_memory() {
            self.fail(at, error, out)?;
            return Ok(StepOutcome::Advanced);
        }
        self.note_out_of_memory(&error);
        if pool_exhausted(&error) && self.preempt_last()? {
            Ok(StepOutcome::Advanced)
        } else {
            Ok(StepOutcome::OutOfMemory)
        }
    }

    /// Starts the first choice of a job whose prompt is prefilled, and saves the prompt's state for
    /// the others.
    fn finish_prefill(
        &mut self,
        at: usize,
        row: LogitsRow,
        out: &mut Events,
    ) -> Result<(), DeviceError> {
        let running = &mut self.running[at];
        let Some(mut prefill) = running.prefill.take() else {
            return Ok(());
        };
        let seq = prefill.seq;
        if let Some(logprobs) = prefill.take_logprobs() {
            out.push((running.id, Event::PromptLogprobs(logprobs)));
        }
        if running.params.max_tokens == 0 {
            for choice in mem::take(&mut running.pending_choices) {
                let stats = running.initial_stats();
                self.stats.finished += 1;
                let reason = FinishReason::Length;
                let event = Event::Finished {
                    choice,
                    reason,
                    stats,
                };
                out.push((running.id, event));
            }
            self.device.close(seq);
            self.running.remove_finished(&mut self.device);
            return Ok(());
        }
        let Some(choice) = running.pending_choices.pop_front() else {
            return Ok(());
        };
        if !running.pending_choices.is_empty() {
            let runner = self.device.runner();
            let saved = match runner.snapshot(seq, SnapshotLocation::Device) {
                Err(error) if error.is_out_of_memory() => {
                    runner.snapshot(seq, SnapshotLocation::Host)
                }
                saved => saved,
            };
            match saved {
                Ok(info) => {
                    running.prompt_state = Some(PromptState {
                        snapshot: info.id,
                        row: row.clone(),
                    });
                }
                Err(error) => {
                    self.device.close(seq);
                    return self.fail(at, error, out);
                }
            }
        }
        self.start_choice(at, choice, seq, &row, out);
        self.start_pending_choices(out)?;
        self.running.remove_finished(&mut self.device);
        Ok(())
    }

    /// Samples the first token of a choice whose prompt `seq` holds.
    fn start_choice(
        &mut self,
        at: usize,
        choice: usize,
        seq: SeqId,
        row: &LogitsRow,
        out: &mut Events,
    ) {
        let running = &self.running[at];
        let mut sequence = running.sequence(choice, seq, self.model());
        let token = match sequence.node_request(&[]).forced {
            Some(token) => sequence.sampler.forced_output(row, token),
            None => {
                let chosen = sequence.sampler.choose(row, sequence.position_after(0));
                sequence.surprisal.observe(row, chosen.id);
                chosen
            }
        };
        let finish_reason = sequence.finish_reason(1, token.id);
        sequence.push(slice::from_ref(&token));
        self.emit(&sequence, vec![token], finish_reason, out);
        if finish_reason.is_none() {
            self.running[at].sequences.push(sequence);
        }
    }
}
