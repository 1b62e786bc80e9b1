//! Preemption: which sequence gives up its KV pages if the pool has too few, and how it resumes.
//!
//! Sequences take pages from one pool as they grow. No page is reserved for `max_tokens`, since
//! most requests generate far fewer tokens than they allow. The rules:
//!
//! - A job is admitted if the pool holds its prompt plus
//!   [`reserve`](crate::SchedulerConfig::reserve) tokens, or its `max_tokens` if those are fewer.
//!   The pool must also hold the reserve of every open sequence. Until then the job waits, and so
//!   do the jobs behind it.
//! - Pages that only cached prefixes hold count as free, since the device evicts them on demand. A
//!   new job is counted in full, though pages it shares with an open sequence are stored once.
//! - If a sequence cannot grow, the last open sequence in priority order is *preempted*: its state
//!   is saved to host memory and it is closed. Its pages stay in place until another sequence needs
//!   them.
//! - Preempted sequences resume in priority order, before any later job starts, once the pool holds
//!   their tokens plus the reserve. They resume from the saved state, so their output does not
//!   change.
//! - If no state could be saved, even after evicting all cached prefixes, prompt and output are
//!   *recomputed*. The sampler's state is kept, so the output changes only as far as prefill and
//!   decode differ in rounding.
//!
//! The first sequence in priority order is never preempted while another is open, and the pool
//! holds at least one sequence of full length. So it always finishes, then the next, and none
//! starves. Two sequences cannot preempt each other in turn: a preempted one needs its pages and
//! more, which only an end or another preemption frees.

use contract::{DeviceError, SeqId, SnapshotId, SnapshotLocation};

use super::Scheduler;
use super::device::device_memory_exhausted;
use super::outcome::{Events, StepOutcome};
use super::prefill::Prefill;
use super::queue::PriorityKey;
use super::running::{Preempted, Recompute};

impl Scheduler {
    /// Whether the pool has capacity for one more sequence of `len` tokens soon and at most
    /// `max_len`.
    pub(super) fn has_capacity(&self, len: usize, max_len: usize) -> bool {
        let info = self.device.info();
        let (page, nodes) = (info.pool.page_size, info.limits.tree_nodes);
        let each = info.limits.max_pages_per_sequence(page);
        if info.pool.pages / each >= info.limits.sequences {
            return true;
        }
        // Pages of a sequence of `len` tokens after it has grown by the reserve.
        let soon = |len: usize, max_len: usize| {
            let grown = len.saturating_add(self.config.reserve).min(max_len);
            grown.saturating_add(nodes).div_ceil(page)
        };
        let mut alone = true;
        let mut owed = 0;
        for running in self.running.iter() {
            let max_len = running.max_len();
            let mut add = |held: usize, len: usize| {
                alone = false;
                owed += soon(len, max_len).saturating_sub(held.div_ceil(page));
            };
            if let Some(prefill) = &running.prefill {
                add(prefill.done, running.prompt.len());
            }
            for recomputing in &running.recomputing {
                add(recomputing.prefill.done, recomputing.tokens().len() + 1);
            }
            for sequence in &running.sequences {
                let len = sequence.history.tokens().len();
                // The last token is not in the KV cache yet.
                add(len - 1, len);
            }
        }
        // A single sequence may use the whole pool, which holds its full length.
        alone || owed + soon(len, max_len) <= self.device.capacity().tokens / page
    }

    /// Preempts the last open sequence in priority order. Returns false if it is the only one.
    pub(super) fn preempt_last(&mut self) -> Result<bool, DeviceError> {
        if self.running.n_open_sequences() < 2 {
            return Ok(false);
        }
        let Some(at) = self.running.last_open() else {
            return Ok(false);
        };
        let running = &mut self.running[at];
        tracing::info!(job = running.id.0, "preempted: KV pool exhausted");
        self.stats.preemptions += 1;
        if let Some(prefill) = running.prefill.take() {
            let saved = match prefill.done {
                0 => None,
                _ => self.save_preempted(prefill.seq)?,
            };
            self.device.close(prefill.seq);
            let preempted = Preempted::Prefill(prefill, saved);
            self.running[at].preempted.push(preempted);
            return Ok(true);
        }
        // A recomputed state is not worth saving: recomputing it again costs the same.
        if let Some(Recompute { sequence, prefill }) = running.recomputing.pop() {
            running.preempted.push(Preempted::Decode(sequence, None));
            self.device.close(prefill.seq);
            return Ok(true);
        }
        // The last choice of the job.
        let last = running.sequences.iter().enumerate();
        let Some((last, _)) = last.max_by_key(|(_, sequence)| sequence.choice) else {
            return Ok(false);
        };
        let sequence = Box::new(running.sequences.remove(last));
        let saved = self.save_preempted(sequence.seq)?;
        self.device.close(sequence.seq);
        let preempted = Preempted::Decode(sequence, saved);
        self.running[at].preempted.push(preempted);
        Ok(true)
    }

    /// Makes a long prompt give up its sequence for the waiting short prompt of `key`. Returns
    /// whether one did.
    ///
    /// The long prompt resumes from its saved state as soon as a sequence is free. It gives up its
    /// sequence a bounded number of times, and only if its state can be saved.
    pub(super) fn free_sequence_for_short(
        &mut self,
        key: PriorityKey,
    ) -> Result<bool, DeviceError> {
        let Some(short) = self.queue.get(key) else {
            return Ok(false);
        };
        let len = short.prompt.len();
        let max_len = len.saturating_add(short.params.max_tokens);
        let context = self.device.info().limits.context;
        if !self.has_capacity(len, max_len.min(context)) {
            return Ok(false);
        }
        let Some(at) = self.running.longest_prefill(key, self.device.chunk()) else {
            return Ok(false);
        };
        let Some(prefill) = &self.running[at].prefill else {
            return Ok(false);
        };
        let saved = match (prefill.done, prefill.seq) {
            (0, _) => None,
            (_, seq) => match self.device.runner().snapshot(seq, SnapshotLocation::Host) {
                Ok(info) => Some(info.id),
                Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
                // The short prompt waits: prefilling the long one again would cost more.
                Err(_) => return Ok(false),
            },
        };
        let running = &mut self.running[at];
        let Some(prefill) = running.prefill.take() else {
            return Ok(false);
        };
        tracing::debug!(job = running.id.0, "preempted: a short prompt goes first");
        running.has_yielded = true;
        running.yields += 1;
        self.stats.preemptions += 1;
        self.device.close(prefill.seq);
        running.preempted.push(Preempted::Prefill(prefill, saved));
        Ok(true)
    }

    /// Saves the state of a sequence to host memory, evicting cached prefixes if it must.
    ///
    /// Returns `None` if the state cannot be saved. The only error is a lost device.
    fn save_preempted(&mut self, seq: SeqId) -> Result<Option<SnapshotId>, DeviceError> {
        loop {
            let runner = self.device.runner();
            match runner.snapshot(seq, SnapshotLocation::Host) {
                Ok(info) => return Ok(Some(info.id)),
                Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
                Err(error) => {
                    if !error.is_out_of_memory() || !self.prefix.evict_one(runner)? {
                        tracing::warn!(%error, "cannot save the state of a preempted sequence");
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Resumes preempted sequences in priority order while there is capacity.
    pub(super) fn resume(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let mut outcome = StepOutcome::NothingToDo;
        while let Some((at, _)) = self.running.first_preempted() {
            // A job has either its prompt preempted or some of its choices.
            let preempted = self.running[at].preempted.iter().enumerate();
            let Some((i, _)) = preempted.min_by_key(|(_, preempted)| preempted.choice()) else {
                break;
            };
            let Some((seq, cached)) = self.open_for_resume(at, i)? else {
                return Ok(StepOutcome::OutOfMemory);
            };
            let preempted = self.running[at].preempted.remove(i);
            outcome = StepOutcome::Advanced;
            if let Some(state) = preempted.state() {
                let restored = self.device.runner().restore(seq, state);
                if let Err(error) = restored {
                    self.device.close(seq);
                    if device_memory_exhausted(&error)
                        && self.prefix.evict_one(self.device.runner())?
                    {
                        // Retry with the freed memory.
                        self.running[at].preempted.push(preempted);
                        continue;
                    }
                    self.device.free_snapshot(state);
                    self.fail(at, error, out)?;
                    continue;
                }
                self.device.free_snapshot(state);
            }
            self.stats.resumed += 1;
            let align = self.device.info().prefill_align;
            let running = &mut self.running[at];
            running.has_yielded = false;
            tracing::info!(job = running.id.0, "resumed");
            match preempted {
                Preempted::Decode(sequence, Some(_)) => running.resume_choice(sequence, seq),
                Preempted::Decode(sequence, None) => {
                    let prefill = Prefill::new(seq, None).resumed(cached, Vec::new());
                    running.recomputing.push(Recompute { sequence, prefill });
                }
                Preempted::Prefill(mut prefill, Some(_)) => {
                    prefill.seq = seq;
                    running.prefill = Some(prefill);
                }
                Preempted::Prefill(_, None) => {
                    let save_points = self.prefix.save_points(&running.prompt, cached, align);
                    let fresh = Prefill::new(seq, running.params.prompt_logprobs);
                    running.prefill = Some(fresh.resumed(cached, save_points));
                }
            }
        }
        Ok(outcome)
    }

    /// Prefills one chunk of a recomputed sequence. After the last chunk its choice decodes again.
    pub(super) fn recompute_chunk(
        &mut self,
        at: usize,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        let size = self.device.chunk();
        let running = &mut self.running[at];
        let Some(mut recomputing) = running.recomputing.pop() else {
            return Ok(StepOutcome::NothingToDo);
        };
        let before = recomputing.prefill.done;
        let tokens = recomputing.tokens().to_vec();
        let runner = self.device.runner();
        let chunk = recomputing.prefill.chunk(runner, &tokens, size, None);
        let (seq, done) = (recomputing.prefill.seq, recomputing.prefill.done);
        match chunk {
            Ok(Some(_)) => running.resume_choice(recomputing.sequence, seq),
            Ok(None) | Err(_) => running.recomputing.push(recomputing),
        }
        match chunk {
            Ok(_) => {
                self.stats.chunks += 1;
                self.stats.prompt_tokens += (done - before) as u64;
                Ok(StepOutcome::Advanced)
            }
            Err(error) => self.prefill_failed(at, error, out),
        }
    }

    /// Opens a sequence for preempted work, and returns how many tokens it holds if the work is
    /// recomputed.
    ///
    /// Returns `None` if no sequence can be opened now.
    fn open_for_resume(
        &mut self,
        at: usize,
        i: usize,
    ) -> Result<Option<(SeqId, usize)>, DeviceError> {
        let running = &self.running[at];
        let (key, max_len) = (running.key, running.max_len());
        let len = match &running.preempted[i] {
            Preempted::Prefill(_, None) => {
                let (prompt, params) = (running.prompt.clone(), running.params.clone());
                let wanted = (key, max_len, params.reuses_prefixes());
                return self.open_with_prefix(&prompt, params.session.as_ref(), wanted);
            }
            Preempted::Decode(sequence, None) => {
                let (tokens, params) = (sequence.history.tokens(), running.params.clone());
                // One of the tokens for the KV cache is always prefilled, as with a prompt.
                let tokens = tokens[..tokens.len() - 1].to_vec();
                let wanted = (key, max_len, params.reuses_prefixes());
                return self.open_with_prefix(&tokens, params.session.as_ref(), wanted);
            }
            Preempted::Prefill(_, Some(_)) => running.prompt.len(),
            Preempted::Decode(sequence, Some(_)) => sequence.history.tokens().len(),
        };
        let seq = self.open_sequence(key, (len, max_len))?;
        Ok(seq.map(|seq| (seq, 0)))
    }
}
