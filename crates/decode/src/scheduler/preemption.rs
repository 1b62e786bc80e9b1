//! Who gets pages when there are not enough for all.
//!
//! Sequences take pages of keys and values from one pool as they grow, and nobody is promised more than he has: most
//! requests name far more tokens than they end up saying, and a promise kept for each would leave most of the pool
//! empty. The rules:
//!
//! - A job is let in where the pool has room for its prompt and [`reserve`](crate::SchedulerConfig::reserve) tokens more
//!   (fewer where it may not say as many), beside as many for every text that is being read or said. Until then it waits
//!   in the queue, and those behind it too. Pages that saved states alone hold are room: the device moves them
//!   elsewhere when a sequence needs their place. A newcomer is counted in full, though what he has in common with
//!   somebody who is in takes room once; so this errs on the careful side.
//! - Where a sequence cannot grow, the place owners key comes last is given up: its state is saved in the host's memory,
//!   and it is *preempted*. Its pages stay where they are until somebody needs them.
//! - Preempted ones go on by their key, before anyone of a later key begins, once there is room for what they hold and
//!   the reserve; from the very state they stopped at, so that they say what they would have said.
//! - A prompt owners state nobody could save is read again, and so is a text with its prompt: then the host has no memory
//!   left, though all saved states were given up for it. Whatever chooses its tokens was kept, so it goes on as it would
//!   have, as far as reading tokens together gives the bits of saying them one by one.
//!
//! The place owners key comes first is never given up while there is another, and a pool holds at least one sequence at
//! full length, so it always goes on; so does then the next, and nobody waits for ever. Nor do two take pages from each
//! other in turns: what was preempted needs its pages back and more besides, which only an end or another parking frees.

use contract::{DeviceError, SeqId, SnapshotId, SnapshotLocation};

use super::Scheduler;
use super::prefill::Prefill;
use super::queue::PriorityKey;
use super::running::{Preempted, Recompute};
use super::{Events, StepOutcome};

/// Whether a refusal says that others hold the pool.
pub(crate) fn pool_exhausted(error: &DeviceError) -> bool {
    matches!(error, DeviceError::PoolExhausted { .. })
}

impl Scheduler {
    /// Whether the pool has room for one more sequence, of `len` tokens soon and `max_len` at most.
    pub(crate) fn has_capacity(&self, len: usize, max_len: usize) -> bool {
        let info = self.runner.info();
        let (page, nodes) = (info.pool.page_size, info.limits.tree_nodes);
        let each = info.limits.max_pages_per_sequence(page);
        if info.pool.pages / each >= info.limits.sequences {
            return true;
        }
        // Pages of a text that has so many tokens now, once it has grown by the reserve.
        let soon = |len: usize, max_len: usize| {
            let grown = len.saturating_add(self.config.reserve).min(max_len);
            grown.saturating_add(nodes).div_ceil(page)
        };
        let mut alone = true;
        let mut owed = 0;
        for running in &self.running {
            let max_len = running.max_len();
            let mut owes = |held: usize, len: usize| {
                alone = false;
                owed += soon(len, max_len).saturating_sub(held.div_ceil(page));
            };
            if let Some(prefill) = &running.prefill {
                owes(prefill.done, running.prompt.len());
            }
            for recomputing in &running.recomputing {
                owes(recomputing.prefill.done, recomputing.tokens().len() + 1);
            }
            for sequence in &running.sequences {
                let len = sequence.history.tokens().len();
                // The last token is not in the cache yet.
                owes(len - 1, len);
            }
        }
        // Whoever is alone has the whole pool, and that is enough for him.
        alone || owed + soon(len, max_len) <= self.runner.capacity().tokens / page
    }

    /// The key of what goes on first among those that gave their place up.
    pub(crate) fn first_preempted(&self) -> Option<PriorityKey> {
        let waiting = self.running.iter().filter(|r| !r.preempted.is_empty());
        waiting.map(|running| running.key).min()
    }

    /// A sequence could not grow: the place owners key comes last is given up. Says whether anything came of it; not
    /// where there is but one place.
    pub(crate) fn preempt_last(&mut self) -> Result<bool, DeviceError> {
        if self.n_open_sequences() < 2 {
            return Ok(false);
        }
        let open = self.running.iter().enumerate();
        let open = open.filter(|(_, running)| running.open_seqs().next().is_some());
        let Some((at, _)) = open.max_by_key(|(_, running)| running.key) else {
            return Ok(false);
        };
        let running = &mut self.running[at];
        tracing::info!(job = running.id.0, "preempted: the pool has no pages left");
        self.stats.preemptions += 1;
        if let Some(prefill) = running.prefill.take() {
            let saved = match prefill.done {
                0 => None,
                _ => self.save_preempted(prefill.seq)?,
            };
            self.runner.close(prefill.seq);
            let preempted = Preempted::Prefill(prefill, saved);
            self.running[at].preempted.push(preempted);
            return Ok(true);
        }
        // What is read again has no state worth saving: reading it once more costs what it cost.
        if let Some(Recompute { sequence, prefill }) = running.recomputing.pop() {
            running.preempted.push(Preempted::Decode(sequence, None));
            self.runner.close(prefill.seq);
            return Ok(true);
        }
        // Of the choices of a job the last one.
        let last = running.sequences.iter().enumerate();
        let Some((last, _)) = last.max_by_key(|(_, sequence)| sequence.choice) else {
            return Ok(false);
        };
        let sequence = Box::new(running.sequences.remove(last));
        let saved = self.save_preempted(sequence.seq)?;
        self.runner.close(sequence.seq);
        let preempted = Preempted::Decode(sequence, saved);
        self.running[at].preempted.push(preempted);
        Ok(true)
    }

    /// Saves the state of a place that is about to be given up; saved prompts go for it if they must. Gives nothing where
    /// it cannot be saved; the only error is a lost device.
    fn save_preempted(&mut self, seq: SeqId) -> Result<Option<SnapshotId>, DeviceError> {
        loop {
            match self.runner.snapshot(seq, SnapshotLocation::Host) {
                Ok(info) => return Ok(Some(info.id)),
                Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
                Err(error) => {
                    let device_memory = error.is_out_of_memory();
                    if !device_memory || !self.prefix.evict_one(&mut *self.runner)? {
                        tracing::warn!(%error, "a state cannot be saved");
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Lets those go on that gave their place up, by their key, while there is room.
    pub(crate) fn resume(&mut self, out: &mut Events) -> Result<StepOutcome, DeviceError> {
        let mut outcome = StepOutcome::NothingToDo;
        while let Some(key) = self.first_preempted() {
            let Some(at) = self.running.iter().position(|r| r.key == key) else {
                break;
            };
            // A job has either its prompt preempted or choices of it.
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
                let restored = self.runner.restore(seq, state);
                if let Err(error) = restored {
                    self.runner.close(seq);
                    if device_memory_exhausted(&error)
                        && self.prefix.evict_one(&mut *self.runner)?
                    {
                        // Once more with what that freed.
                        self.running[at].preempted.push(preempted);
                        continue;
                    }
                    self.runner.free_snapshot(state);
                    self.fail(at, &error, out)?;
                    continue;
                }
                self.runner.free_snapshot(state);
            }
            self.stats.resumed += 1;
            let align = self.runner.info().prefill_align;
            let running = &mut self.running[at];
            tracing::info!(job = running.id.0, "goes on");
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

    /// Reads one chunk of a text owners state is lost; at its end the choice goes on.
    pub(crate) fn recompute_chunk(
        &mut self,
        at: usize,
        out: &mut Events,
    ) -> Result<StepOutcome, DeviceError> {
        let running = &mut self.running[at];
        let Some(mut recomputing) = running.recomputing.pop() else {
            return Ok(StepOutcome::NothingToDo);
        };
        let before = recomputing.prefill.done;
        let tokens = recomputing.tokens().to_vec();
        let runner = &mut *self.runner;
        let chunk = recomputing.prefill.chunk(runner, &tokens, self.chunk, None);
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
            Err(error) if error.is_out_of_memory() => {
                self.note_out_of_memory(&error);
                let preempted = pool_exhausted(&error) && self.preempt_last()?;
                Ok(if preempted {
                    StepOutcome::Advanced
                } else {
                    StepOutcome::OutOfMemory
                })
            }
            Err(error) => {
                self.fail(at, &error, out)?;
                Ok(StepOutcome::Advanced)
            }
        }
    }

    /// A place for something preempted, and how much of its prompt is there already where that is read again; `None` while
    /// there is none.
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
                let wanted = (key, max_len, params.may_be_resumed());
                return self.open_with_prefix(&prompt, params.session.as_ref(), wanted);
            }
            Preempted::Decode(sequence, None) => {
                let (tokens, params) = (sequence.history.tokens(), running.params.clone());
                // One of those to be in the cache is always read, as with a prompt.
                let tokens = tokens[..tokens.len() - 1].to_vec();
                let wanted = (key, max_len, params.may_be_resumed());
                return self.open_with_prefix(&tokens, params.session.as_ref(), wanted);
            }
            Preempted::Prefill(_, Some(_)) => running.prompt.len(),
            Preempted::Decode(sequence, Some(_)) => sequence.history.tokens().len(),
        };
        let seq = self.open_sequence(key, (len, max_len))?;
        Ok(seq.map(|seq| (seq, 0)))
    }
}

/// Whether the device lacked memory, and not pages of the pool.
fn device_memory_exhausted(error: &DeviceError) -> bool {
    matches!(error, DeviceError::OutOfMemory { .. })
}
