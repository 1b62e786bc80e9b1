//! From the queue to the first token: places on the device, prompts read, choices begun.

use std::mem;
use std::slice;
use std::sync::Arc;

use contract::{DeviceError, LogitsRow, SeqId, SnapshotLocation, TokenId};

use super::Scheduler;
use super::preemption::pool_exhausted;
use super::queue::PriorityKey;
use super::running::{PromptState, RunningJob};
use super::sequence::StopConditions;
use super::{Events, StepOutcome};
use crate::event::{Event, FinishReason};
use crate::prefix::{Restored, SaveInfo};

impl Scheduler {
    /// Begins choices owners prompt is read and which waited for a place.
    pub(crate) fn start_pending_choices(
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
            let (Some(end), Some(choice)) =
                (&running.prompt_state, running.pending_choices.pop_front())
            else {
                continue;
            };
            let row = end.row.clone();
            if let Err(error) = self.runner.restore(seq, end.snapshot) {
                self.runner.close(seq);
                running.pending_choices.push_front(choice);
                self.fail(at, &error, out)?;
                continue;
            }
            outcome = StepOutcome::Advanced;
            self.start_choice(at, choice, seq, &row, out);
            self.remove_finished();
        }
        Ok(outcome)
    }

    /// Admits jobs in the order of the queue while there is room.
    pub(crate) fn admit_queued(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let mut outcome = StepOutcome::NothingToDo;
        while let (Some(job), Some(key)) = (self.queue.first(), self.queue.first_key()) {
            let stop_conditions = StopConditions::new(
                &job.params,
                &self.config.eos,
                self.runner.info().limits.context,
            );
            let max_len = stop_conditions.max_len(job.prompt.len());
            let (prompt, session) = (Arc::clone(&job.prompt), job.params.session.clone());
            let wanted = (key, max_len, job.params.may_be_resumed());
            let Some((seq, cached)) = self.open_with_prefix(&prompt, session.as_ref(), wanted)?
            else {
                return Ok(StepOutcome::OutOfMemory);
            };
            let align = self.runner.info().prefill_align;
            let save_points = self.prefix.save_points(&prompt, cached, align);
            let Some((key, entry)) = self.queue.pop() else {
                self.runner.close(seq);
                break;
            };
            let id = entry.job.id;
            let mut running = RunningJob::new(key, entry, seq, self.model());
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

    /// A place that holds as much of a prompt as a saved state does, if those may be used, and how much that is; `None`
    /// where there is no place now.
    pub(crate) fn open_with_prefix(
        &mut self,
        prompt: &[TokenId],
        session: Option<&Arc<str>>,
        (key, max_len, use_saved): (PriorityKey, usize, bool),
    ) -> Result<Option<(SeqId, usize)>, DeviceError> {
        let sizes = (prompt.len(), max_len);
        let Some(seq) = self.open_sequence(key, sizes)? else {
            return Ok(None);
        };
        if !use_saved {
            return Ok(Some((seq, 0)));
        }
        let runner = &mut *self.runner;
        match self.prefix.restore(runner, seq, prompt, session)? {
            Restored::At(position) => Ok(Some((seq, position))),
            Restored::NotFound => Ok(Some((seq, 0))),
            Restored::Broken => {
                self.runner.close(seq);
                let fresh = self.open_sequence(key, sizes)?;
                Ok(fresh.map(|seq| (seq, 0)))
            }
        }
    }

    /// A place on the device for what has this key and holds `len` tokens soon and `max_len` at most, or `None` where
    /// there is none now or the pool has no room.
    pub(crate) fn open_sequence(
        &mut self,
        key: PriorityKey,
        (len, max_len): (usize, usize),
    ) -> Result<Option<SeqId>, DeviceError> {
        let room = self.runner.capacity();
        let busy = self.n_open_sequences() >= self.config.max_sequences.max(1);
        if busy || room.sequences == 0 || self.first_preempted().is_some_and(|first| first < key) {
            return Ok(None);
        }
        if !self.has_capacity(len, max_len) {
            self.stats.pool_waits = true;
            return Ok(None);
        }
        match self.runner.open(max_len) {
            Ok(seq) => Ok(Some(seq)),
            Err(lost @ DeviceError::DeviceLost { .. }) => Err(lost),
            Err(error) => {
                self.note_out_of_memory(&error);
                Ok(None)
            }
        }
    }

    /// Reads one chunk of the prompt owners key it is.
    pub(crate) fn run_prefill_chunk(
        &mut self,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        let prefilling = self.running.iter().enumerate();
        let next = prefilling
            .filter(|(_, running)| running.prefill.is_some() || !running.recomputing.is_empty())
            .min_by_key(|(_, running)| running.key)
            .map(|(at, _)| at);
        let Some(at) = next else {
            return Ok(StepOutcome::NothingToDo);
        };
        if self.running[at].prefill.is_none() {
            return self.recompute_chunk(at, out);
        }
        let last = self.running[at].first_request(self.chunk, self.model());
        let running = &mut self.running[at];
        let Some(prefill) = &mut running.prefill else {
            return Ok(StepOutcome::NothingToDo);
        };
        let before = prefill.done;
        let row = match prefill.chunk(
            &mut *self.runner,
            &running.prompt,
            self.chunk,
            last.as_ref(),
        ) {
            Ok(row) => row,
            Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
            Err(error) if error.is_out_of_memory() => {
                self.note_out_of_memory(&error);
                let preempted = pool_exhausted(&error) && self.preempt_last()?;
                return Ok(match preempted {
                    true => StepOutcome::Advanced,
                    false => StepOutcome::OutOfMemory,
                });
            }
            Err(error) => {
                self.fail(at, &error, out)?;
                return Ok(StepOutcome::Advanced);
            }
        };
        self.stats.chunks += 1;
        self.stats.prompt_tokens += (prefill.done - before) as u64;
        let (done, total) = (prefill.done, running.prompt.len());
        if let Some(stop) = prefill.reached().filter(|_| running.params.use_saved) {
            let mark = SaveInfo {
                head: stop.head,
                session: running.params.session.as_ref(),
                from_warmup: false,
            };
            let tokens = &running.prompt[..done];
            self.prefix
                .save(&mut *self.runner, prefill.seq, tokens, mark)?;
        }
        let running = &self.running[at];
        out.push((running.id, Event::Prefill { done, total }));
        if let Some(row) = row {
            self.finish_prefill(at, row, out)?;
        }
        Ok(StepOutcome::Advanced)
    }

    /// Begins the first choice of a job owners prompt has just been read, and saves the state for the others.
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
            self.runner.close(seq);
            self.remove_finished();
            return Ok(());
        }
        let Some(choice) = running.pending_choices.pop_front() else {
            return Ok(());
        };
        if !running.pending_choices.is_empty() {
            let saved = match self.runner.snapshot(seq, SnapshotLocation::Device) {
                Err(error) if error.is_out_of_memory() => {
                    self.runner.snapshot(seq, SnapshotLocation::Host)
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
                    self.runner.close(seq);
                    return self.fail(at, &error, out);
                }
            }
        }
        self.start_choice(at, choice, seq, &row, out);
        self.start_pending_choices(out)?;
        self.remove_finished();
        Ok(())
    }

    /// Chooses the first token of a choice owners prompt `seq` holds.
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
        let token = match sequence.plan(&[]).forced {
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
